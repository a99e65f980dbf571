// SPDX-License-Identifier: Apache-2.0
/// One client's side of the GPUs: a process that holds its VRAM and runs its kernels.
#pragma once

#include "driver_emulator/daemon/ledger.hpp"
#include "driver_emulator/wire.hpp"

#include <sys/socket.h>

namespace gpustasis::emulator {

/// Runs in a freshly forked child until the client is gone, then exits.
/// @param socket the client's connection; no other descriptor of the daemon is open
/// @param peer   who connected; the worker takes on its user and group before it runs its kernels
[[noreturn]] void run_worker(int socket, const ucred& peer, const DaemonInfo& info, Ledger& ledger,
                             LedgerSlot& slot, const AttachClient& hello);

} // namespace gpustasis::emulator
