// SPDX-License-Identifier: Apache-2.0
/// The floating-point and vector registers of a tracee, as a signal frame holds them.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <vector>

namespace gpustasis {

/// The registers of thread `tid`, a stopped tracee of the caller, as the XSAVE area of a signal
/// frame, the magic numbers of both its ends included: rt_sigreturn loads all of them from it. To
/// be put at a multiple of kVectorStateAlignment. Empty if the processor has no XSAVE.
/// Sources: arch/x86/include/uapi/asm/sigcontext.h (struct _fpx_sw_bytes, struct _xstate),
/// arch/x86/kernel/fpu/signal.c. Throws Error: io.
std::vector<std::byte> read_vector_state(pid_t tid);

inline constexpr std::size_t kVectorStateAlignment = 64;

} // namespace gpustasis
