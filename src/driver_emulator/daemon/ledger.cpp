#include "driver_emulator/daemon/ledger.hpp"

#include <cerrno>
#include <sys/mman.h>
#include <system_error>

namespace cudackpt::emulator {

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

void Ledger::forget(LedgerSlot& slot) noexcept {
    for (unsigned gpu = 0; gpu < kMaxGpus; ++gpu) {
        used_[gpu] -= slot.used[gpu].exchange(0);
    }
    slot.attached = 0;
    slot.worker = 0;
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

} // namespace cudackpt::emulator
