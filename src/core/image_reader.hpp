/// Read an image (docs/format.md) that may be damaged or hostile.
#pragma once

#include "core/chunk_codec.hpp"
#include "core/image_info.hpp"
#include "core/image_writer.hpp"
#include "core/memory_port.hpp"

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace cudackpt {

struct ChunkInfo {
    std::uint64_t address = 0;    ///< in the task
    std::uint32_t plain_size = 0; ///< bytes of memory; chunk_size, or less at a region's end
    std::uint32_t stored_size = 0;
    std::uint64_t offset = 0; ///< in the file
    Encoding encoding = Encoding::zero;
    Id hash{}; ///< XXH3-128 of the plain bytes, canonical (big-endian) form
};

/// Opening checks everything but the chunks and the padding after them: header, trailer, metadata and index with their
/// checksums and every bound, and that the file is exactly as long as it says. Methods may be
/// called from several threads at once. `threads` is as in WriteOptions. Holds the index (40 bytes
/// per chunk) and, while restoring or verifying, about two chunks of memory per thread.
class ImageReader {
public:
    /// Throws Error: io, corrupt_data, unsupported; what() names the file.
    static ImageReader open(int dir_fd, const std::string& name);

    ImageReader(ImageReader&&) noexcept;
    ImageReader& operator=(ImageReader&&) noexcept;
    ~ImageReader();

    const ImageInfo& info() const noexcept;
    const EncodingTotals& totals() const noexcept;
    std::uint64_t file_size() const noexcept;
    Id digest() const noexcept; ///< equal to WriteResult::digest of the write that made it

    std::uint64_t chunk_count() const noexcept;
    ChunkInfo chunk(std::uint64_t index) const; ///< Throws Error: bad_argument past the end.

    /// Read, decode and check one chunk into `plain` (exactly plain_size bytes).
    void read_chunk(std::uint64_t index, MutBytes plain) const;

    /// Called now and then with the plain bytes done so far; from one thread at a time.
    using Progress = std::function<void(std::uint64_t done)>;

    /// Put every chunk into `sink`, each checked with its padding before it is written, in parallel
    /// with bounded memory. If `fresh`, the target's pages are known to be untouched zero pages and zero
    /// chunks are left out. Throws Error at the first chunk that fails (its number and address are
    /// in what()); what was written before stays written.
    void restore(MemorySink& sink, unsigned threads, bool fresh,
                 const Progress& progress = {}) const;

    /// Check every chunk and every padding byte. Throws Error as restore.
    void verify(unsigned threads, const Progress& progress = {}) const;

private:
    struct State;
    explicit ImageReader(std::unique_ptr<State> state) noexcept;
    std::unique_ptr<State> state_;
};

} // namespace cudackpt
