// SPDX-License-Identifier: Apache-2.0
/// Python buffers as the memory of a task.
#pragma once

#include "bindings/buffer_view.hpp"
#include "core/memory_port.hpp"

#include <cstdint>
#include <map>

namespace gpustasis::bindings {

/// Reads from buffers that stand for memory at given addresses.
class MemoryBuffers : public MemorySource {
public:
    /// With the GIL held. Throws Error: bad_argument if two begin at the same address.
    void add(std::uint64_t address, BufferView view);

    /// Throws Error: bad_argument where there is no buffer.
    void read(std::uint64_t address, MutBytes out) override;

private:
    std::map<std::uint64_t, BufferView> runs_;
};

} // namespace gpustasis::bindings
