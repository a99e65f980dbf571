// SPDX-License-Identifier: Apache-2.0
#include "driver_emulator/driver/gate.hpp"

#include "driver_emulator/driver/futex.hpp"

namespace gpustasis::emulator {

void Gate::enter() noexcept {
    while (true) {
        inside_.fetch_add(1);
        if (closed_.load() == 0) {
            return;
        }
        leave();
        futex_wait(closed_, 1, 0);
    }
}

void Gate::leave() noexcept {
    if (inside_.fetch_sub(1) == 1 && closed_.load() != 0) {
        futex_wake(inside_);
    }
}

void Gate::open() noexcept {
    closed_.store(0);
    futex_wake(closed_);
}

void Gate::wait_for_leave() noexcept {
    const std::uint32_t inside = inside_.load();
    if (inside != 0) {
        futex_wait(inside_, inside, 10);
    }
}

} // namespace gpustasis::emulator
