// SPDX-License-Identifier: Apache-2.0
/// Where an image gets its bytes from and puts them back to.
#pragma once

#include "core/bytes.hpp"

#include <cstddef>
#include <cstdint>
#include <utility>

namespace gpustasis {

/// Memory that can be read by address. Called from several threads at once.
class MemorySource {
public:
    MemorySource() = default;
    MemorySource(const MemorySource&) = delete;
    MemorySource& operator=(const MemorySource&) = delete;
    virtual ~MemorySource() = default;

    /// Fill `out` with the bytes at `address`. Throws Error: io if any of them cannot be read.
    virtual void read(std::uint64_t address, MutBytes out) = 0;

    /// The `size` bytes at `address` where a source has them in this process, so that nobody copies them: the caller's
    /// until take_back(), also to write into, and as good as read by then. It may wait for what was lent of lower
    /// addresses to come back, and for no other. Empty: read() them. Throws Error: as read().
    virtual MutBytes lend(std::uint64_t address, std::size_t size) {
        static_cast<void>(address);
        static_cast<void>(size);
        return {};
    }
    /// What was lent for `address` is not needed any more. By any thread.
    virtual void take_back(std::uint64_t address, MutBytes lent) noexcept {
        static_cast<void>(address);
        static_cast<void>(lent);
    }
    /// Not all will be read, nor taken back: whoever waits in read() or lend() has an Error.
    virtual void cancel() noexcept {}
};

/// Memory that can be written by address. Called from several threads at once, never twice
/// for the same byte.
class MemorySink {
public:
    MemorySink() = default;
    MemorySink(const MemorySink&) = delete;
    MemorySink& operator=(const MemorySink&) = delete;
    virtual ~MemorySink() = default;

    /// Put `bytes` at `address`. Throws Error: io if any of them cannot be written.
    virtual void write(std::uint64_t address, Bytes bytes) = 0;

    /// Make [address, address + length) zero. `fresh` memory is already so and need not be
    /// touched; see ImageReader::restore.
    virtual void write_zeros(std::uint64_t address, std::uint64_t length) = 0;

    /// Memory of this process from which a sink puts `size` bytes at `address` without another copy: the caller's, to be
    /// filled, until put() or take_back(). Empty: write() them. Throws Error: as write().
    virtual MutBytes lend(std::uint64_t address, std::size_t size) {
        static_cast<void>(address);
        static_cast<void>(size);
        return {};
    }
    /// Put what was lent for `address` there, as write(); it is taken back, also if this fails.
    virtual void put(std::uint64_t address, MutBytes lent) {
        static_cast<void>(address);
        static_cast<void>(lent);
    }
    /// What was lent for `address` is not to be put there.
    virtual void take_back(std::uint64_t address, MutBytes lent) noexcept {
        static_cast<void>(address);
        static_cast<void>(lent);
    }
};

/// Bytes that a MemorySource or a MemorySink has lent, if any; taken back in the end.
template <class Lender>
class Lent {
public:
    Lent() = default;
    Lent(Lender& lender, std::uint64_t address, std::size_t size)
        : lender_(&lender), address_(address), bytes_(lender.lend(address, size)) {}
    Lent(Lent&& other) noexcept
        : lender_(other.lender_), address_(other.address_),
          bytes_(std::exchange(other.bytes_, {})) {}
    Lent& operator=(Lent&& other) noexcept {
        if (this != &other) {
            reset();
            lender_ = other.lender_;
            address_ = other.address_;
            bytes_ = std::exchange(other.bytes_, {});
        }
        return *this;
    }
    Lent(const Lent&) = delete;
    Lent& operator=(const Lent&) = delete;
    ~Lent() { reset(); }

    /// Empty: none were lent.
    MutBytes bytes() const noexcept { return bytes_; }
    void reset() noexcept {
        if (const MutBytes bytes = std::exchange(bytes_, {}); !bytes.empty())
            lender_->take_back(address_, bytes);
    }
    /// MemorySink::put().
    void put() { lender_->put(address_, std::exchange(bytes_, {})); }

private:
    Lender* lender_ = nullptr;
    std::uint64_t address_ = 0;
    MutBytes bytes_;
};

} // namespace gpustasis
