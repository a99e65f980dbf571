// SPDX-License-Identifier: Apache-2.0
/// Where an image gets its bytes from and puts them back to.
#pragma once

#include "core/bytes.hpp"

#include <cstdint>

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
};

} // namespace gpustasis
