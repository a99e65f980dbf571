// SPDX-License-Identifier: Apache-2.0
/// Write the GPU memory of one task as an image (docs/format.md).
#pragma once

#include "core/chunk_codec.hpp"
#include "core/direct_io.hpp"
#include "core/image_info.hpp"
#include "core/image_output.hpp"
#include "core/memory_port.hpp"
#include "core/parent_index.hpp"

#include <cstdint>
#include <string>

namespace gpustasis {

struct WriteOptions {
    unsigned threads = 0;           ///< 0: as many as there are processors to run on
    bool compress = true;           ///< false: chunks are zero or raw
    int lz4_acceleration = 1;       ///< 1..65537, as LZ4_compress_fast
    std::uint32_t alignment = 4096; ///< of chunks in the file; a power of two, 1..4096
    IoMode io = IoMode::automatic;
    /// Chunks that it has, of the parent or of images that this dump wrote before, become references;
    /// nullptr: there is neither.
    const ParentIndex* parent = nullptr;
    /// Read each such chunk before it is referred to, and compare it with the memory. What cannot be
    /// read or is not the same is stored anew, and counted.
    bool check_parent = false;
};

struct WriteResult {
    EncodingTotals totals;
    std::uint64_t file_size = 0;
    std::uint64_t damaged_in_parent = 0; ///< chunks stored anew because those known are damaged
    std::string first_damage;            ///< in which file, where, and what is wrong
    Id digest{}; ///< of all of the file, by way of its index and metadata; the manifest holds it
};

/// Write all regions of `info` from `source` to the file `name` in directory `dir_fd`.
/// Written to a temporary name, synced, renamed, and the directory synced: on return the image
/// is complete and durable; on an exception nothing named `name` was made and the temporary file
/// is gone. The bytes of the file depend on `info`, the memory and all of `options` but threads and
/// io, never on timing. Holds at most about three chunks of
/// memory per thread. `info.chunk_size` 0 means the parent's, or kDefaultChunkSize without one.
/// parent_id and sources of `info` are left out and follow from the options.
/// Throws Error: bad_argument if `info` breaks a bound of docs/format.md or its chunk size is not
/// the parent's, io if reading the
/// source or writing the file fails (ENOSPC among them).
WriteResult write_image(int dir_fd, const std::string& name, const ImageInfo& info,
                        MemorySource& source, const WriteOptions& options);

/// The same, to `output`, which was made for `options.alignment` and of which nothing is left on an
/// exception once it is gone. `options.io` is that one's business.
WriteResult write_image(ImageOutput& output, const ImageInfo& info, MemorySource& source,
                        const WriteOptions& options);

} // namespace gpustasis
