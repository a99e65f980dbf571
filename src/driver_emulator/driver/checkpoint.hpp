// SPDX-License-Identifier: Apache-2.0
/// The target's side of the checkpoint API: what the restore thread does when it is asked.
///
/// Runs while all other threads may be stopped by a tracer, each of them at any instruction. So:
/// no malloc, no C library function that takes a lock, no lock but those that the closed gate
/// keeps free.
#pragma once

namespace gpustasis::emulator {

struct Driver;

/// Reads one request from the channel, carries it out, and replies.
void answer_request(Driver& driver) noexcept;

} // namespace gpustasis::emulator
