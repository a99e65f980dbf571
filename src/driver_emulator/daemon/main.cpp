// SPDX-License-Identifier: Apache-2.0
/// gpustasis-gpu-emulator: the process that plays the GPUs. Started by `gpustasis emulator start`.
#include "driver_emulator/daemon/machine.hpp"
#include "driver_emulator/daemon/server.hpp"

#include <cstdio>
#include <exception>

int main(int argc, char** argv) {
    try {
        gpustasis::emulator::Server(gpustasis::emulator::parse_options({argv + 1, argv + argc}))
            .run();
        return 0;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "gpustasis-gpu-emulator: %s\n", error.what());
        return 1;
    }
}
