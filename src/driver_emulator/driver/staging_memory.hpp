// SPDX-License-Identifier: Apache-2.0
/// The host memory that a Checkpoint moves GPU memory to, and the addresses of GPU memory meanwhile.
/// See checkpoint.hpp for what may be used here.
#pragma once

#include "driver_emulator/driver/driver.hpp"

namespace gpustasis::emulator {

template <typename Visit>
void for_each_segment(Driver& driver, Visit visit) noexcept {
    for (unsigned i = 0; i < driver.objects.device_count; ++i) {
        Vram& vram = driver.objects.devices[i].vram;
        for (auto& [address, segment] : vram.segments()) {
            visit(vram, address, segment);
        }
    }
}

/// Maps what each segment needs, of the kind and at the place that `plan` says. On failure some of
/// it is mapped.
[[nodiscard]] Result allocate_staging(Driver& driver, const OperationPlan& plan) noexcept;
void free_staging(Driver& driver) noexcept;

/// If `plan` says so, nothing is mapped at the addresses of GPU memory from now on, as older drivers
/// have it, but for the staging, which goes there.
void open_gaps(Driver& driver, const OperationPlan& plan) noexcept;

/// When the staging is gone. What has come to lie there meanwhile is left alone: out_of_memory.
[[nodiscard]] Result close_gaps(Driver& driver) noexcept;

} // namespace gpustasis::emulator
