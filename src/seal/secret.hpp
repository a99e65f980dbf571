// SPDX-License-Identifier: Apache-2.0
/// Memory for keys.
#pragma once

#include "core/bytes.hpp"

#include <cstddef>

namespace gpustasis::seal {

/// Pages of their own that are never swapped (mlock), in no core dump (MADV_DONTDUMP), not there in a child
/// made by fork (MADV_DONTFORK: it would hold them unlocked), and wiped before they are given back. A child
/// that drops one goes on; one that uses it dies: bytes that read as zeros would be a key that everybody has.
class Secret {
public:
    /// `size` zero bytes, at least one. Throws KeyMemoryError, which names the limit if memory cannot be locked.
    explicit Secret(std::size_t size);
    Secret(Secret&& other) noexcept;
    Secret& operator=(Secret&& other) noexcept;
    Secret(const Secret&) = delete;
    Secret& operator=(const Secret&) = delete;
    ~Secret();

    Bytes bytes() const noexcept { return {data_, size_}; }
    MutBytes bytes() noexcept { return {data_, size_}; }
    std::size_t size() const noexcept { return size_; }

private:
    void clear() noexcept;

    std::byte* data_ = nullptr;
    std::size_t size_ = 0;
    std::size_t mapped_ = 0;
    int owner_ = 0; // process id: in no other one is there anything at data_, or it is another's
};

/// Overwrites what held plain text or a part of a key, so that the compiler does not leave it out.
void wipe(MutBytes bytes) noexcept;

} // namespace gpustasis::seal
