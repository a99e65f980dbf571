// SPDX-License-Identifier: Apache-2.0
/// Kernel files loaded into a worker.
#pragma once

#include "driver_emulator/wire.hpp"

#include <cstdint>
#include <map>
#include <string>

namespace gpustasis_emulator {
struct Kernel;
}

namespace gpustasis::emulator {

class ModuleTable {
public:
    /// Loads the shared object behind `image`; the descriptor stays the caller's.
    Result load(std::uint64_t module, int image);
    Result unload(std::uint64_t module);

    /// The kernel of that name, or null.
    [[nodiscard]] const gpustasis_emulator::Kernel* find(std::uint64_t module,
                                                         const std::string& name) const;

private:
    std::map<std::uint64_t, void*> handles_;
    int next_fd_ = 64;
};

/// Describes a kernel to a client. Result::invalid_image if its description cannot be right.
[[nodiscard]] FunctionReply describe(const gpustasis_emulator::Kernel* kernel);

} // namespace gpustasis::emulator
