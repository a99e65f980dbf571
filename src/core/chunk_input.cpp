// SPDX-License-Identifier: Apache-2.0
#include "core/chunk_input.hpp"

#include "core/aligned_buffer.hpp"
#include "core/error.hpp"
#include "core/file.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <utility>

namespace gpustasis {
namespace {

// Returns how many bytes were read: fewer than asked for where the file ends, or where it cannot be
// read directly any further.
std::size_t read_direct(int fd, std::uint64_t offset, MutBytes out) noexcept {
    std::size_t done = 0;
    while (done < out.size()) {
        const ssize_t got =
            ::pread(fd, out.data() + done, out.size() - done, static_cast<off_t>(offset + done));
        if (got <= 0)
            break; // an error, or the end: the page cache's read says which
        done += static_cast<std::size_t>(got);
        if (done % kDirectAlignment != 0)
            break;
    }
    return done;
}

} // namespace

ChunkInput::ChunkInput(std::shared_ptr<const UniqueFd> file, std::uint64_t begin,
                       std::uint64_t size, IoMode mode)
    : file_(std::move(file)), begin_(begin), mode_(mode) {
    direct_ = open_direct(file_->get(), O_RDONLY, mode);
    if (direct_ && mode == IoMode::automatic && is_mostly_cached(file_->get(), begin + size))
        direct_.reset();
}

Bytes ChunkInput::read(std::uint64_t offset, std::size_t size, MutBytes buffer) const {
    offset += begin_;
    std::size_t done = 0;
    if (direct_ && is_aligned(buffer) && offset % kDirectAlignment == 0)
        done = read_direct(direct_.get(), offset, buffer.first(direct_size(size)));
    if (done < size && mode_ == IoMode::direct && offset + size <= file_size(file_->get()))
        throw Error(Errc::unsupported, "direct I/O was asked for, and a read was refused");
    if (done < size)
        read_at(file_->get(), offset + done, buffer.first(size).subspan(done));
    return buffer.first(size);
}

} // namespace gpustasis
