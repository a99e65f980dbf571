// SPDX-License-Identifier: Apache-2.0
#include "driver_emulator/daemon/ledger.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <iterator>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <system_error>
#include <unistd.h>

namespace gpustasis::emulator {
namespace {

/// Field 22 of /proc/PID/stat; 0: it is gone.
std::uint64_t start_time(pid_t pid) noexcept {
    char path[32];
    std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    char text[1024] = "";
    const ssize_t size = fd >= 0 ? read(fd, text, sizeof text - 1) : -1;
    if (fd >= 0) {
        close(fd);
    }
    const char* at = size > 0 ? std::strrchr(text, ')') : nullptr; // behind the name: field 3
    for (int field = 2; at != nullptr && field < 22; ++field) {
        at = std::strchr(at + 1, ' ');
    }
    return at != nullptr ? std::strtoull(at, nullptr, 10) : 0;
}

bool has_ended(const LedgerSlot& slot) noexcept {
    const int client = static_cast<int>(syscall(SYS_pidfd_open, slot.client, 0));
    if (client < 0) { // the number may be a thread's by now
        return errno == ESRCH || errno == EINVAL || errno == ENOENT;
    }
    pollfd end{client, POLLIN, 0}; // readable when it has ended, reaped or not
    const bool is_readable = poll(&end, 1, 0) == 1;
    close(client);
    const std::uint64_t now = start_time(slot.client); // 0: /proc may hide it
    return is_readable || (now != 0 && slot.client_start != 0 && now != slot.client_start);
}

} // namespace

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

bool Ledger::is_awaiting_release(const LedgerSlot& own) const noexcept {
    return std::any_of(std::begin(slots_), std::end(slots_), [&](const LedgerSlot& slot) {
        return &slot != &own && slot.worker != 0 && slot.client > 0 && has_ended(slot);
    });
}

void Ledger::assign(LedgerSlot& slot, pid_t client) noexcept {
    slot.client = client;
    slot.client_start = start_time(client);
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
