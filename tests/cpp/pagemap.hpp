// SPDX-License-Identifier: Apache-2.0
/// A pagemap as CRIU writes it: criu's images/pagemap.proto.
#pragma once

#include "sample.hpp"

#include <cstdint>
#include <initializer_list>

namespace sample {

/// One with a run of pages for each of `flags` (1: in a parent, 2: could be lazy, 4: present).
inline Buffer pagemap(std::initializer_list<std::uint8_t> flags) {
    // The image's magic and the pagemap's; the head: 2 bytes, pages_id = 1.
    Buffer bytes;
    const auto put = [&](std::initializer_list<std::uint8_t> more) {
        for (const std::uint8_t byte : more)
            bytes.push_back(std::byte{byte});
    };
    put({0x19, 0x43, 0x56, 0x54, 0x25, 0x40, 0x08, 0x56, 2, 0, 0, 0, 0x08, 1});
    // vaddr = 0x400000, nr_pages = 3, flags.
    for (const std::uint8_t flag : flags)
        put({9, 0, 0, 0, 0x08, 0x80, 0x80, 0x80, 0x02, 0x10, 3, 0x20, flag});
    return bytes;
}

} // namespace sample
