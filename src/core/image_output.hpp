// SPDX-License-Identifier: Apache-2.0
/// Where a writer puts an image: a file, or what looks like one.
#pragma once

#include "core/bytes.hpp"
#include "core/chunk_io.hpp"
#include "core/direct_io.hpp"
#include "core/file.hpp"

#include <cstddef>
#include <cstdint>
#include <string>

namespace gpustasis {

/// A new image, every byte of which is put once at most, at any time. What is never put is zero.
/// Destroyed without commit(), it leaves nothing behind.
class ImageOutput {
public:
    ImageOutput() = default;
    ImageOutput(const ImageOutput&) = delete;
    ImageOutput& operator=(const ImageOutput&) = delete;
    virtual ~ImageOutput() = default;

    /// Put a chunk, by several threads at once: the first `size` bytes of `buffer`, and zeros behind them
    /// up to the next multiple of the image's alignment. What of `buffer` is behind them may be set to
    /// zero, up to a multiple of kDirectAlignment. Throws Error: io.
    virtual void write(std::uint64_t offset, MutBytes buffer, std::size_t size) = 0;

    /// Put all of `bytes`: what is no chunk. By one thread. Throws Error: io.
    virtual void put(std::uint64_t offset, Bytes bytes) = 0;

    /// The image has `size` bytes. Complete and durable under its name on return; on an exception
    /// nothing is there that was not there before. Once, when no thread writes any more. Throws Error: io.
    virtual void commit(std::uint64_t size) = 0;

    /// Whether a write waits for a device, and not for a processor.
    virtual bool is_direct() const noexcept = 0;
};

/// A file in the clear.
class FileOutput final : public ImageOutput {
public:
    /// `dir_fd` stays the caller's, and open. `alignment`: of the chunks. Throws Error: as PartFile and
    /// ChunkOutput.
    FileOutput(int dir_fd, const std::string& name, IoMode io, std::uint32_t alignment)
        : file_(dir_fd, name), chunks_(file_.fd(), io, alignment) {}

    void write(std::uint64_t offset, MutBytes buffer, std::size_t size) override {
        chunks_.write(offset, buffer, size);
    }
    void put(std::uint64_t offset, Bytes bytes) override { write_at(file_.fd(), offset, bytes); }
    /// Before anything is put: have room on the medium for an image of `size` bytes, so that no write of it fails for
    /// want of room. False: this file system reserves none, and there seems to be room. Throws Error: io if there is not.
    bool reserve(std::uint64_t size) { return chunks_.reserve_all(size); }
    void commit(std::uint64_t size) override {
        chunks_.finish(size);
        file_.commit();
    }
    bool is_direct() const noexcept override { return chunks_.is_direct(); }

private:
    PartFile file_;
    ChunkOutput chunks_;
};

} // namespace gpustasis
