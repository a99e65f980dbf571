/// Write the GPU memory of one task as an image (docs/format.md).
#pragma once

#include "core/chunk_codec.hpp"
#include "core/image_info.hpp"
#include "core/memory_port.hpp"

#include <cstdint>
#include <string>

namespace cudackpt {

/// Chunks and bytes by how they are stored. `plain` counts memory, `stored` the bytes of the file
/// that hold it.
struct EncodingTotals {
    struct Count {
        std::uint64_t chunks = 0;
        std::uint64_t plain = 0;
        std::uint64_t stored = 0;

        bool operator==(const Count&) const = default;
    };
    Count zero, lz4, raw, ref;

    /// Count one chunk more.
    void add(Encoding encoding, std::uint64_t plain, std::uint64_t stored) noexcept;
    EncodingTotals& operator+=(const EncodingTotals& other) noexcept;
    bool operator==(const EncodingTotals&) const = default;
};

struct WriteOptions {
    unsigned threads = 0;           ///< 0: as many as there are processors to run on
    bool compress = true;           ///< false: chunks are zero or raw
    int lz4_acceleration = 1;       ///< 1..65537, as LZ4_compress_fast
    std::uint32_t alignment = 4096; ///< of chunks in the file; a power of two, 1..4096
};

struct WriteResult {
    EncodingTotals totals;
    std::uint64_t file_size = 0;
    Id digest{}; ///< of the whole file by way of its index and metadata; the manifest holds it
};

/// Write all regions of `info` from `source` to the file `name` in directory `dir_fd`.
/// Written to a temporary name, synced, renamed, and the directory synced: on return the image
/// is complete and durable; on an exception nothing named `name` was made and the temporary file
/// is gone. The bytes of the file depend on `info`, the memory and all of `options`
/// but the threads, never on timing. Holds at most about three chunks of
/// memory per thread. `info.chunk_size` 0 means kDefaultChunkSize.
/// Throws Error: bad_argument if `info` breaks a bound of docs/format.md, io if reading the
/// source or writing the file fails (ENOSPC among them).
WriteResult write_image(int dir_fd, const std::string& name, const ImageInfo& info,
                        MemorySource& source, const WriteOptions& options);

} // namespace cudackpt
