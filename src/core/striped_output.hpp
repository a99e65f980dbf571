/// The files of an image that is being written: its own, and its stripes.
#pragma once

#include "core/bytes.hpp"
#include "core/chunk_output.hpp"
#include "core/file.hpp"
#include "core/image_info.hpp"
#include "core/place_in_order.hpp"

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

namespace gpustasis {

/// How many files an image is written to, its own among them. `wanted`: 1 … kMaxStripes is that; 0
/// chooses. On tmpfs one thread at a time can write to a file, whatever the file has of space: there
/// it is one for each of `threads` that will write, up to a few, if there is enough to write.
/// Elsewhere it is 1. `fd`: a file beside which they will be. `plain_size`: memory, in bytes.
/// Throws Error: bad_argument, io.
unsigned stripe_count(unsigned wanted, int fd, unsigned threads, std::uint64_t plain_size);

/// Chunk n is in file n mod files(), and each file has its chunks in their order: what is in the
/// files follows from chunks and number of files, not from threads. Destroyed without commit(),
/// nothing is left.
class StripedOutput {
public:
    /// `image`: the part of the image file `name` in `dir_fd`; stays the caller's.
    /// Throws Error: io; unsupported as ChunkOutput.
    StripedOutput(PartFile& image, int dir_fd, const std::string& name, unsigned files, IoMode mode,
                  std::uint32_t alignment);

    unsigned files() const noexcept { return static_cast<unsigned>(outputs_.size()); }
    bool is_direct() const noexcept { return outputs_.front().chunks.is_direct(); }

    /// As PlaceInOrder::take(), for a chunk by its number in the image.
    std::optional<std::uint64_t> take(std::uint64_t chunk, std::uint64_t stored_size);
    void cancel() noexcept;
    /// As ChunkOutput::write(), of that chunk.
    void write(std::uint64_t chunk, std::uint64_t offset, MutBytes buffer, std::size_t size);

    /// Where the chunk data of the image's own file ends. Once all threads are done.
    std::uint64_t data_end() const noexcept { return outputs_.front().places.end(); }
    /// Write what stripes have around their chunks. `index`: packed, with the sources of these
    /// chunks. Returns the stripes as sources of the image. Throws Error: io.
    std::vector<Source> finish_stripes(const ImageInfo& info, Bytes index);
    /// The image's own file is to be `size` long: nothing more comes. Throws Error: io.
    void finish_image(std::uint64_t size) { outputs_.front().chunks.finish(size); }

    /// Sync all files, then give them their names, the image's own last: it is complete with all its
    /// stripes. Stripes that an older image had beyond these are removed. On an exception none of
    /// these files is left; an older image of the name is lost once stripes have got theirs.
    /// Throws Error: io.
    void commit();

    /// Bytes of all files. After finish_stripes() and finish_image().
    std::uint64_t total_size() const;

private:
    struct Output {
        Output(int file, IoMode mode, std::uint32_t alignment, std::uint64_t header_size);
        int fd;
        ChunkOutput chunks;
        PlaceInOrder places;
    };

    PartFile& image_;
    const int dir_fd_;
    const std::string name_;
    const std::uint32_t alignment_;
    std::deque<PartFile> stripes_;
    std::deque<Output> outputs_; ///< the image's own first
};

} // namespace gpustasis
