// SPDX-License-Identifier: Apache-2.0
/// Read an image (docs/format.md) that may be damaged or hostile.
#pragma once

#include "core/bytes.hpp"
#include "core/chunk_codec.hpp"
#include "core/direct_io.hpp"
#include "core/image_info.hpp"
#include "core/image_input.hpp"
#include "core/lineage.hpp"
#include "core/memory_port.hpp"

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace gpustasis {

struct ChunkInfo {
    std::uint64_t address = 0;    ///< in the task
    std::uint32_t plain_size = 0; ///< bytes of memory; chunk_size, or less at a region's end
    std::uint32_t stored_size = 0;
    std::uint64_t offset = 0;      ///< in the file that `source` says
    std::uint64_t stored_hash = 0; ///< XXH3-64 of the stored bytes, if lz4; else 0
    Encoding encoding = Encoding::zero;
    std::uint16_t source = 0; ///< which file: 0: this one; n: that of info().sources[n - 1]
    Id hash{};                ///< XXH3-128 of the plain bytes, canonical (big-endian) form
};

/// One image. Of a checkpoint that has a parent, chunks may lie in images of earlier ones, its sources:
/// those are needed for reading chunks only.
///
/// Opening checks everything but the chunks and the padding after them: header, trailer, metadata and index with their
/// checksums and every bound, and that the file is exactly as long as it says. Methods may be
/// called from several threads at once. `threads` is as in WriteOptions. Holds the index (40 bytes
/// per chunk) and, while restoring or verifying, about two chunks of memory per thread.
class ImageReader {
public:
    /// Throws Error: io, corrupt_data, unsupported; what() names the file.
    /// `io`: how chunks are read. Automatic: directly where that is possible and most of the file is
    /// not in the page cache.
    static ImageReader open(int dir_fd, const std::string& name, IoMode io = IoMode::automatic);

    /// An image that is the `length` bytes of the file `fd` from `offset`, for example a member of a
    /// tar archive. `fd` is copied. `name` is for messages. Throws as open().
    static ImageReader open_part(int fd, std::uint64_t offset, std::uint64_t length,
                                 const std::string& name);

    /// An image that is the bytes of `input`. `name` is for messages. Throws as open().
    static ImageReader from_input(std::shared_ptr<const ImageInput> input, const std::string& name);

    /// An image of which only the ends are at hand: its first kHeaderSize bytes, and its last ones
    /// from the metadata on (tail_size()); `size` is that of all. It is checked as open() does. Its
    /// chunks cannot be read through it: whoever gets their bytes asks check_stored().
    /// Throws Error: as open(); bad_argument if the ends are longer than `size`.
    static ImageReader from_ends(Bytes header, Bytes tail, std::uint64_t size,
                                 const std::string& name);

    /// How many bytes from_ends() needs of the end of an image of `size` bytes: metadata, index
    /// and trailer, as its last kTrailerSize bytes say. Of a trailer that says nonsense it is
    /// kTrailerSize: from_ends() says then what is wrong.
    static std::uint64_t tail_size(Bytes trailer, std::uint64_t size);

    ImageReader(ImageReader&&) noexcept;
    ImageReader& operator=(ImageReader&&) noexcept;
    ~ImageReader();

    const ImageInfo& info() const noexcept;
    const EncodingTotals& totals() const noexcept;
    std::uint64_t file_size() const noexcept;
    std::uint32_t alignment() const noexcept; ///< of chunks in the file, in bytes
    Id digest() const noexcept; ///< equal to WriteResult::digest of the write that made it

    std::uint64_t chunk_count() const noexcept;
    ChunkInfo chunk(std::uint64_t index) const; ///< Throws Error: bad_argument past the end.

    /// Find every source of an earlier checkpoint by way of `lineage`, which is that of this image's
    /// directory, and keep its file. To be called before chunks that lie there are read; other
    /// threads may read meanwhile. Does nothing once it has succeeded.
    /// Throws Error: io, corrupt_data; what() names the checkpoint that is missing or another.
    void attach_sources(Lineage& lineage);

    /// Read, decode and check one chunk into `plain` (exactly plain_size bytes).
    void read_chunk(std::uint64_t index, MutBytes plain) const;

    /// Check that `stored` are the stored bytes of that chunk, by all its hashes, wherever they were
    /// read. Throws Error: corrupt_data; bad_argument past the end.
    void check_stored(std::uint64_t index, Bytes stored) const;

    /// Called now and then with the plain bytes done so far; from one thread at a time.
    using Progress = std::function<void(std::uint64_t done)>;

    /// Put every chunk into `sink`, each checked with its padding before it is written, in parallel
    /// with bounded memory. If `fresh`, the target's pages are known to be untouched zero pages and zero
    /// chunks are left out. Throws Error at the first chunk that fails (its number and address are
    /// in what()); what was written before stays written.
    void restore(MemorySink& sink, unsigned threads, bool fresh,
                 const Progress& progress = {}) const;

    /// Show the stored bytes of every chunk that is not zero to `use(number, stored)`, in parallel
    /// and in no order, each chunk checked before as restore() does. Throws Error as restore.
    using UseStored = std::function<void(std::uint64_t number, Bytes stored)>;
    void visit_stored(unsigned threads, const UseStored& use, const Progress& progress = {}) const;

    /// Check every chunk and every padding byte. Throws Error as restore.
    void verify(unsigned threads, const Progress& progress = {}) const;

private:
    struct State;
    explicit ImageReader(std::unique_ptr<State> state) noexcept;
    std::unique_ptr<State> state_;
};

} // namespace gpustasis
