// SPDX-License-Identifier: Apache-2.0
#include "driver_emulator/driver/staging_memory.hpp"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <utility>

namespace gpustasis::emulator {
namespace {

void* map_staging(void* address, std::size_t size, StagingKind kind) noexcept {
    const int fixed = address == nullptr ? 0 : MAP_FIXED_NOREPLACE;
    if (kind == StagingKind::memfd) {
        const int fd = static_cast<int>(syscall(SYS_memfd_create, "cuda-staging", MFD_CLOEXEC));
        void* memory = MAP_FAILED;
        if (fd >= 0 && syscall(SYS_ftruncate, fd, size) == 0) {
            memory = mmap(address, size, PROT_READ | PROT_WRITE, MAP_SHARED | fixed, fd, 0);
        }
        if (fd >= 0) {
            syscall(SYS_close, fd);
        }
        return memory;
    }
    const int sharing = kind == StagingKind::shared ? MAP_SHARED : MAP_PRIVATE;
    void* memory =
        mmap(address, size, PROT_READ | PROT_WRITE, sharing | MAP_ANONYMOUS | fixed, -1, 0);
    if (memory != MAP_FAILED && kind == StagingKind::locked && mlock(memory, size) != 0) {
        munmap(memory, size);
        return MAP_FAILED;
    }
    return memory;
}

template <typename Visit>
void for_each_window(Driver& driver, Visit visit) noexcept {
    for (unsigned i = 0; i < driver.objects.device_count; ++i) {
        if (Vram& vram = driver.objects.devices[i].vram; vram.owns_addresses()) {
            visit(vram);
        }
    }
}

} // namespace

Result allocate_staging(Driver& driver, const OperationPlan& plan) noexcept {
    Result result = Result::success;
    for_each_segment(driver, [&](Vram&, std::uint64_t address, Segment& segment) {
        if (result != Result::success) {
            return;
        }
        void* wanted = driver.gaps ? reinterpret_cast<void*>(address) : nullptr;
        void* memory = map_staging(wanted, segment.size, static_cast<StagingKind>(plan.staging));
        if (memory == MAP_FAILED) {
            result = Result::out_of_memory;
            return;
        }
        segment.staging = memory;
    });
    return result;
}

void free_staging(Driver& driver) noexcept {
    for_each_segment(driver, [](Vram&, std::uint64_t, Segment& segment) {
        if (segment.staging != nullptr) {
            munmap(segment.staging, segment.size);
            segment.staging = nullptr;
        }
    });
}

void open_gaps(Driver& driver, const OperationPlan& plan) noexcept {
    driver.gaps = plan.gaps != 0;
    if (driver.gaps) {
        for_each_window(driver, [](Vram& vram) { vram.release_addresses(); });
    }
}

Result close_gaps(Driver& driver) noexcept {
    Result result = Result::success;
    if (std::exchange(driver.gaps, false)) {
        for_each_window(driver, [&result](Vram& vram) {
            const Result reserved = vram.reserve_addresses();
            result = result == Result::success ? reserved : result;
        });
    }
    return result;
}

} // namespace gpustasis::emulator
