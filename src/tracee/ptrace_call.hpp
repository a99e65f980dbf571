// SPDX-License-Identifier: Apache-2.0
/// ptrace(2) with an Error instead of errno.
#pragma once

#include "core/error.hpp"

#include <sys/ptrace.h>
#include <sys/types.h>

#include <cerrno>
#include <csignal>
#include <cstdint>
#include <string>

namespace gpustasis {

// linux/ptrace.h; glibc 2.36 has no names for them.
inline constexpr auto kPtraceGetSignalMask = static_cast<__ptrace_request>(0x420a);
inline constexpr auto kPtraceSetSignalMask = static_cast<__ptrace_request>(0x420b);

/// Every signal but SIGTRAP, as a kernel signal mask.
inline constexpr std::uint64_t kAllButSigtrap = ~(std::uint64_t{1} << (SIGTRAP - 1));

inline void ptrace_call(__ptrace_request request, const char* name, pid_t tid, void* address,
                        void* data) {
    if (::ptrace(request, tid, address, data) != 0)
        throw io_error(std::string(name) + " of thread " + std::to_string(tid), errno);
}

inline std::uint64_t get_signal_mask(pid_t tid) {
    std::uint64_t mask = 0;
    ptrace_call(kPtraceGetSignalMask, "PTRACE_GETSIGMASK", tid,
                reinterpret_cast<void*>(sizeof(mask)), &mask);
    return mask;
}

inline void set_signal_mask(pid_t tid, std::uint64_t mask) {
    ptrace_call(kPtraceSetSignalMask, "PTRACE_SETSIGMASK", tid,
                reinterpret_cast<void*>(sizeof(mask)), &mask);
}

} // namespace gpustasis
