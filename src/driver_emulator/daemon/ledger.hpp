// SPDX-License-Identifier: Apache-2.0
/// Who holds how much VRAM: one table in memory that the daemon shares with its workers.
#pragma once

#include "driver_emulator/wire.hpp"

#include <atomic>
#include <cstdint>
#include <sys/types.h>

namespace gpustasis::emulator {

/// One client; its slot is free when worker is 0.
struct LedgerSlot {
    std::atomic<pid_t> worker;
    pid_t client;               ///< as the daemon sees it; 0 if it does not
    std::uint64_t client_start; ///< in ticks since the boot; a restored one has the same pid
    char name[16];
    char device[32];
    char mapping[32];
    std::atomic<std::uint64_t> used[kMaxGpus];
    std::atomic<std::uint32_t> attached; ///< bit i: has a context on GPU i
};

/// Lives in shared memory: made once by create(), never destroyed.
class Ledger {
public:
    /// Throws std::system_error if there is no memory.
    static Ledger& create(const DaemonInfo& info);

    /// Takes `size` bytes of a GPU for a client. Returns false, and takes nothing, if fewer are
    /// free.
    [[nodiscard]] bool acquire(LedgerSlot& slot, unsigned gpu, std::uint64_t size) noexcept;
    void release(LedgerSlot& slot, unsigned gpu, std::uint64_t size) noexcept;

    /// Gives back all that a client holds.
    void release_all(LedgerSlot& slot) noexcept;

    /// Whether some other client is dead and its worker not yet reaped: memory is about to be free.
    [[nodiscard]] bool is_awaiting_release(const LedgerSlot& own) const noexcept;

    /// Gives back all that a dead worker's client held and frees the slot.
    void forget(LedgerSlot& slot) noexcept;

    /// Notes whom a slot is for; its worker is noted by whoever has started that.
    static void assign(LedgerSlot& slot, pid_t client) noexcept;

    [[nodiscard]] LedgerSlot* find_free_slot() noexcept;
    [[nodiscard]] LedgerSlot* find_worker(pid_t worker) noexcept;
    [[nodiscard]] const LedgerSlot* slots() const noexcept { return slots_; }
    [[nodiscard]] std::uint64_t used(unsigned gpu) const noexcept { return used_[gpu].load(); }
    [[nodiscard]] std::uint64_t capacity(unsigned gpu) const noexcept { return capacity_[gpu]; }

private:
    std::atomic<std::uint64_t> used_[kMaxGpus];
    std::uint64_t capacity_[kMaxGpus];
    LedgerSlot slots_[kMaxClients];
};

} // namespace gpustasis::emulator
