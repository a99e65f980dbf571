// SPDX-License-Identifier: Apache-2.0
/// Names for runs of bytes that somebody else owns.
#pragma once

#include <cstddef>
#include <cstring>
#include <span>

namespace gpustasis {

using Bytes = std::span<const std::byte>;
using MutBytes = std::span<std::byte>;

// std::ranges::copy() and equal() of such spans are loops over single bytes with GCC 12.

/// All of `from` to `to`, which does not overlap it.
inline void copy_bytes(Bytes from, std::byte* to) noexcept {
    if (!from.empty())
        std::memcpy(to, from.data(), from.size());
}

inline bool same_bytes(Bytes one, Bytes other) noexcept {
    return one.size() == other.size() &&
           (one.empty() || std::memcmp(one.data(), other.data(), one.size()) == 0);
}

} // namespace gpustasis
