// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/traced_thread.hpp"

#include "tracee/proc.hpp"

#include <unistd.h>

#include <exception>
#include <string>

namespace gpustasis {

bool is_traced_by_us(pid_t tid) noexcept {
    try {
        return proc::tracer_of(tid) == ::getpid();
    } catch (const std::exception&) {
        return false; // it has ended
    }
}

} // namespace gpustasis
