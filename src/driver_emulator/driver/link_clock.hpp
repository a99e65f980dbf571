// SPDX-License-Identifier: Apache-2.0
/// How long copies between a GPU and the host take: each GPU has a link of its own, in both directions
/// at once, which all copies of a direction share, whichever process makes them.
#pragma once

#include "driver_emulator/wire.hpp"

#include <cstdint>

namespace gpustasis::emulator {

enum class LinkDirection : unsigned { to_host, to_device };

/// What a copy of a mapping goes over.
struct LinkRates {
    DeviceOrdinal device = 0;         ///< the caller's number for the GPU
    unsigned gpu = 0;                 ///< the daemon's
    std::uint32_t ms_per_gib[2] = {}; ///< by direction; 0 = as fast as memory
    LinkPage* links = nullptr;
};

/// Takes the link for `size` bytes; its end waits until they can have gone over it. Nothing is locked:
/// copies of several threads overlap.
class LinkTurn {
public:
    LinkTurn(const LinkRates& rates, LinkDirection direction, std::uint64_t size) noexcept;
    ~LinkTurn();
    LinkTurn(const LinkTurn&) = delete;
    LinkTurn& operator=(const LinkTurn&) = delete;

private:
    std::uint64_t end_ns_ = 0;
};

/// The links of the machine: memory that all processes share, mapped once in each. Null without a daemon.
LinkPage* link_page() noexcept;

} // namespace gpustasis::emulator
