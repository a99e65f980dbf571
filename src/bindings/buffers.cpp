// SPDX-License-Identifier: Apache-2.0
#include "bindings/buffers.hpp"

#include "core/error.hpp"

#include <algorithm>
#include <iterator>
#include <string>

namespace gpustasis::bindings {

void MemoryBuffers::add(std::uint64_t address, BufferView view) {
    if (!runs_.try_emplace(address, std::move(view)).second)
        throw Error(Errc::bad_argument, "two buffers at address " + std::to_string(address));
}

void MemoryBuffers::read(std::uint64_t address, MutBytes out) {
    while (!out.empty()) {
        const auto after = runs_.upper_bound(address);
        const auto missing = [&] {
            return Error(Errc::bad_argument, "no buffer at address " + std::to_string(address));
        };
        if (after == runs_.begin())
            throw missing();
        const auto& [begin, view] = *std::prev(after);
        const Bytes bytes = view.bytes();
        if (address - begin >= bytes.size())
            throw missing();
        const Bytes rest = bytes.subspan(address - begin);
        const Bytes part = rest.first(std::min(rest.size(), out.size()));
        copy_bytes(part, out.data());
        out = out.subspan(part.size());
        address += part.size();
    }
}

} // namespace gpustasis::bindings
