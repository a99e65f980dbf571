// SPDX-License-Identifier: Apache-2.0
#include "driver_emulator/daemon/ledger.hpp"

#include <cerrno>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <system_error>
#include <unistd.h>

namespace gpustasis::emulator {

Ledger& Ledger::create(const DaemonInfo& info) {
    void* memory =
        mmap(nullptr, sizeof(Ledger), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        throw std::system_error(errno, std::generic_category(), "memory for the ledger");
    }
    auto& ledger = *static_cast<Ledger*>(memory); // zeroes are its initial state
    for (unsigned i = 0; i < info.gpu_count; ++i) {
        ledger.capacity_[i] = info.gpus[i].memory;
    }
    return ledger;
}

bool Ledger::acquire(LedgerSlot& slot, unsigned gpu, std::uint64_t size) noexcept {
    std::uint64_t used = used_[gpu].load();
    do {
        if (size > capacity_[gpu] - used) {
            return false;
        }
    } while (!used_[gpu].compare_exchange_weak(used, used + size));
    slot.used[gpu] += size;
    return true;
}

void Ledger::release(LedgerSlot& slot, unsigned gpu, std::uint64_t size) noexcept {
    slot.used[gpu] -= size;
    used_[gpu] -= size;
}

void Ledger::release_all(LedgerSlot& slot) noexcept {
    for (unsigned gpu = 0; gpu < kMaxGpus; ++gpu) {
        used_[gpu] -= slot.used[gpu].exchange(0);
    }
    slot.attached = 0;
}

void Ledger::forget(LedgerSlot& slot) noexcept {
    release_all(slot);
    slot.worker = 0;
}

bool Ledger::is_awaiting_release() const noexcept {
    for (const LedgerSlot& slot : slots_) {
        if (slot.worker == 0 || slot.client <= 0) {
            continue;
        }
        const int client = static_cast<int>(syscall(SYS_pidfd_open, slot.client, 0));
        pollfd end{client, POLLIN, 0}; // readable when it has ended, reaped or not
        const bool dead = client < 0 ? errno == ESRCH : poll(&end, 1, 0) == 1;
        if (client >= 0) {
            close(client);
        }
        if (dead) {
            return true;
        }
    }
    return false;
}

LedgerSlot* Ledger::find_free_slot() noexcept {
    return find_worker(0);
}

LedgerSlot* Ledger::find_worker(pid_t worker) noexcept {
    for (LedgerSlot& slot : slots_) {
        if (slot.worker == worker) {
            return &slot;
        }
    }
    return nullptr;
}

} // namespace gpustasis::emulator
