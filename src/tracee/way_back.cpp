// SPDX-License-Identifier: Apache-2.0
#include "tracee/way_back.hpp"

#include "core/error.hpp"
#include "core/process_memory.hpp"
#include "tracee/proc.hpp"
#include "tracee/ptrace.hpp"
#include "tracee/task_maps.hpp"
#include "tracee/vector_state.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <span>
#include <string>
#include <vector>

namespace gpustasis {
namespace {

constexpr std::array kSyscallRet = {std::byte{0x0f}, std::byte{0x05}, std::byte{0xc3}};
constexpr std::array kRestorer = {std::byte{0x48}, std::byte{0xc7}, std::byte{0xc0},
                                  std::byte{0x0f}, std::byte{0x00}, std::byte{0x00},
                                  std::byte{0x00}, std::byte{0x0f}, std::byte{0x05}};

constexpr std::uint64_t kRedZone = 128;
constexpr std::uint64_t kMaxCode = 64U << 20;  // no C library is larger; do not read a JIT's arena
constexpr std::uint64_t kMaxGuard = 64U << 10; // of a thread's stack; a heap's reserve is larger
constexpr std::uint64_t kMinStackLeft = 4U << 10; // beside the way back
constexpr std::uint64_t kUserCode64 = 0x33;       // __USER_CS of a 64-bit program

// arch/x86/include/uapi/asm/ucontext.h
constexpr std::uint64_t kUcFpXstate = 0x1;
constexpr std::uint64_t kUcSigcontextSs = 0x2;
constexpr std::uint64_t kUcStrictRestoreSs = 0x4;
// No flag sigaltstack(2) knows: the kernel keeps the thread's alternate stack as it is.
constexpr std::int32_t kKeepAlternateStack = 0x7fff;

/// What lies at the stack pointer when "ret" is reached: struct rt_sigframe up to the signal mask.
struct Frame {
    std::uint64_t restorer;
    std::uint64_t uc_flags;
    std::uint64_t uc_link;
    std::uint64_t stack_address;
    std::int32_t stack_flags;
    std::int32_t stack_padding;
    std::uint64_t stack_size;
    std::uint64_t r8, r9, r10, r11, r12, r13, r14, r15;
    std::uint64_t rdi, rsi, rbp, rbx, rdx, rax, rcx, rsp, rip, rflags;
    std::uint16_t cs, gs, fs, ss;
    std::uint64_t error, trap, old_mask, cr2;
    std::uint64_t fpstate;
    std::uint64_t reserved[8];
    std::uint64_t signal_mask;
};
static_assert(sizeof(Frame) == 8 + 8 + 8 + 24 + 256 + 8);

bool has_shadow_stack(pid_t pid) {
    const std::string status = proc::read_file("/proc/" + std::to_string(pid) + "/status");
    const std::size_t at = status.find("\nx86_Thread_features:");
    return at != std::string::npos &&
           status.substr(at + 1, status.find('\n', at + 1) - at).find("shstk") != std::string::npos;
}

template <std::size_t Size>
std::uint64_t find(std::span<const std::byte> code, std::uint64_t address,
                   const std::array<std::byte, Size>& wanted) {
    const auto found = std::ranges::search(code, wanted);
    return found.empty() ? 0 : address + static_cast<std::uint64_t>(found.begin() - code.begin());
}

/// A stack that is a program's own making (a coroutine's, a goroutine's) may end right below its
/// stack pointer, in memory that somebody else uses.
bool has_stack_room(const std::vector<Mapping>& maps, std::uint64_t stack, std::uint64_t size) {
    const auto at = std::ranges::find_if(
        maps, [&](const Mapping& m) { return m.start <= stack && stack <= m.end; });
    if (at == maps.end() || stack - at->start < size)
        return false;
    if (at->name == "[stack]")
        return true;
    if (at == maps.begin() || !at->is_private_anonymous())
        return false;
    const Mapping& guard = *std::prev(at);
    return guard.end == at->start && guard.protection == PROT_NONE &&
           guard.end - guard.start <= kMaxGuard;
}

// linux/errno.h (kernel-internal): how an interrupted call says that it wants to be made again.
bool wants_restart(std::uint64_t rax) noexcept {
    const auto result = static_cast<std::int64_t>(rax);
    return result == -512 || result == -513 || result == -514 || result == -516;
}

} // namespace

std::optional<WayBackCode> find_way_back_code(pid_t pid) {
    if (has_shadow_stack(pid))
        return std::nullopt;
    std::vector<Mapping> maps = read_maps(pid);
    std::erase_if(maps, [](const Mapping& mapping) {
        return (mapping.protection & PROT_EXEC) == 0 || mapping.shared || mapping.inode == 0 ||
               mapping.end - mapping.start > kMaxCode;
    });
    std::ranges::partition(maps, [](const Mapping& mapping) {
        return mapping.name.find("/libc") != std::string::npos ||
               mapping.name.find("/ld-") != std::string::npos;
    });
    WayBackCode code;
    ProcessMemory memory(pid);
    std::vector<std::byte> bytes;
    for (const Mapping& mapping : maps) {
        bytes.resize(mapping.end - mapping.start);
        memory.read(mapping.start, bytes);
        if (code.syscall_ret == 0)
            code.syscall_ret = find(bytes, mapping.start, kSyscallRet);
        if (code.restorer == 0)
            code.restorer = find(bytes, mapping.start, kRestorer);
        if (code.syscall_ret != 0 && code.restorer != 0)
            return code;
    }
    return std::nullopt;
}

std::uint64_t write_way_back(pid_t pid, const WayBackCode& code, const user_regs_struct& registers,
                             Bytes vector_state, std::uint64_t signal_mask) {
    const std::uint64_t vectors_at =
        (registers.rsp - kRedZone - vector_state.size()) & ~(kVectorStateAlignment - 1);
    Frame frame{};
    frame.restorer = code.restorer;
    frame.uc_flags = kUcSigcontextSs | kUcStrictRestoreSs;
    frame.stack_flags = kKeepAlternateStack;
    frame.r8 = registers.r8;
    frame.r9 = registers.r9;
    frame.r10 = registers.r10;
    frame.r11 = registers.r11;
    frame.r12 = registers.r12;
    frame.r13 = registers.r13;
    frame.r14 = registers.r14;
    frame.r15 = registers.r15;
    frame.rdi = registers.rdi;
    frame.rsi = registers.rsi;
    frame.rbp = registers.rbp;
    frame.rbx = registers.rbx;
    frame.rdx = registers.rdx;
    frame.rax = registers.rax;
    frame.rcx = registers.rcx;
    frame.rsp = registers.rsp;
    frame.rip = registers.rip;
    frame.rflags = registers.eflags;
    frame.cs = static_cast<std::uint16_t>(registers.cs);
    frame.ss = static_cast<std::uint16_t>(registers.ss);
    frame.signal_mask = signal_mask;
    if (!vector_state.empty()) {
        frame.uc_flags |= kUcFpXstate;
        frame.fpstate = vectors_at;
    }
    if (static_cast<std::int64_t>(registers.orig_rax) >= 0 && wants_restart(registers.rax)) {
        constexpr std::uint64_t kSyscallSize = 2;
        frame.rax = registers.orig_rax;
        frame.rip = registers.rip - kSyscallSize;
    }
    const std::uint64_t at = (vectors_at - sizeof(frame)) & ~std::uint64_t{15};
    std::vector<std::byte> bytes(vectors_at - at + vector_state.size());
    std::memcpy(bytes.data(), &frame, sizeof(frame));
    std::ranges::copy(vector_state, bytes.begin() + static_cast<std::ptrdiff_t>(vectors_at - at));
    ProcessMemory(pid).write(at, bytes);
    return at;
}

void require_room_for_way_back(const std::vector<Mapping>& maps, pid_t tid) {
    const std::string name = "thread " + std::to_string(tid);
    user_regs_struct registers{};
    ptrace_call(PTRACE_GETREGS, "PTRACE_GETREGS", tid, nullptr, &registers);
    if (registers.cs != kUserCode64)
        throw Error(Errc::unsupported, name + " runs 32-bit code");
    const std::uint64_t size = kRedZone + kVectorStateAlignment + read_vector_state(tid).size() +
                               sizeof(Frame) + 16 + kMinStackLeft;
    if (!has_stack_room(maps, registers.rsp, size))
        throw Error(Errc::unsupported,
                    name + " may have too little stack left for a call in its name");
}

} // namespace gpustasis
