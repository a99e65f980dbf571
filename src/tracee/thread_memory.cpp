// SPDX-License-Identifier: Apache-2.0
#include "tracee/thread_memory.hpp"

#include "tracee/proc.hpp"
#include "tracee/ptrace.hpp"

#include <sys/syscall.h>
#include <sys/user.h>
#include <unistd.h>

namespace gpustasis {
namespace {

// linux/ptrace.h, since 5.13; glibc 2.36 has no name for it.
constexpr auto kPtraceGetRseqConfiguration = static_cast<__ptrace_request>(0x420f);
struct RseqConfiguration {
    std::uint64_t address;
    std::uint32_t size;
    std::uint32_t signature;
    std::uint32_t flags;
    std::uint32_t padding;
};

} // namespace

std::vector<std::uint64_t> addresses_in_use(pid_t pid) {
    std::vector<std::uint64_t> addresses;
    for (const pid_t tid : proc::threads(pid)) {
        user_regs_struct registers{};
        ptrace_call(PTRACE_GETREGS, "PTRACE_GETREGS", tid, nullptr, &registers);
        addresses.push_back(registers.rsp);
        addresses.push_back(registers.fs_base);
        addresses.push_back(registers.rip);
        RseqConfiguration rseq{};
        // An older kernel has no such request: its rseq area lies by the thread pointer.
        if (::ptrace(kPtraceGetRseqConfiguration, tid, reinterpret_cast<void*>(sizeof(rseq)),
                     &rseq) > 0)
            addresses.push_back(rseq.address);
        void* robust = nullptr;
        std::size_t size = 0;
        if (::syscall(SYS_get_robust_list, tid, &robust, &size) == 0)
            addresses.push_back(reinterpret_cast<std::uint64_t>(robust));
    }
    return addresses;
}

} // namespace gpustasis
