// SPDX-License-Identifier: Apache-2.0
/// A signal frame that leads a borrowed thread home by itself, should its tracer die.
#pragma once

#include "core/bytes.hpp"
#include "tracee/task_maps.hpp"

#include <sys/types.h>
#include <sys/user.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace gpustasis {

/// Code that every x86-64 C library has: "syscall; ret", and the signal restorer
/// "mov $15,%rax; syscall" (rt_sigreturn).
struct WayBackCode {
    std::uint64_t syscall_ret = 0;
    std::uint64_t restorer = 0;
};

/// Search the task's executable file mappings, the C library first. nullopt: not found, or the
/// task has a shadow stack, which refuses returns that no call made. Throws Error: io.
std::optional<WayBackCode> find_way_back_code(pid_t pid);

/// Write, below the red zone of the thread's stack, the address of the restorer and a signal
/// frame that holds `registers`, `vector_state` (vector_state.hpp) and `signal_mask`. A thread that
/// then executes `syscall; ret` with the stack pointer returned here goes back to what it did: if
/// it was stopped in a system call that the kernel would restart, to making that call again.
/// Source: arch/x86/kernel/signal_64.c, struct rt_sigframe. Throws Error: io.
std::uint64_t write_way_back(pid_t pid, const WayBackCode& code, const user_regs_struct& registers,
                             Bytes vector_state, std::uint64_t signal_mask);

/// Throws Error: unsupported unless the stack of a stopped thread is known to have room for that: it is the
/// main thread's, or lies above a guard. `maps` are its process's. io.
void require_room_for_way_back(const std::vector<Mapping>& maps, pid_t tid);

} // namespace gpustasis
