// SPDX-License-Identifier: Apache-2.0
// Pinned host memory: shared anonymous mappings, which /proc shows as "/dev/zero (deleted)", like
// the real driver's.
#include "driver_emulator/driver/api.hpp"
#include "driver_emulator/driver/driver.hpp"

#include <sys/mman.h>

using namespace gpustasis::emulator;

namespace {

constexpr unsigned kKnownAllocFlags = 0x7;    // portable, device map, write combined
constexpr unsigned kKnownRegisterFlags = 0xf; // portable, device map, I/O memory, read only

std::uint64_t number(const void* pointer) {
    return reinterpret_cast<std::uint64_t>(pointer);
}

int allocate(void** pointer, std::size_t size, unsigned flags) {
    return call_in_context([=](Driver& driver, Context& context) {
        if (pointer == nullptr || size == 0 || (flags & ~kKnownAllocFlags) != 0) {
            return Result::invalid_value;
        }
        const std::size_t mapped = (size + kSegmentSize - 1) / kSegmentSize * kSegmentSize;
        if (mapped < size) {
            return Result::out_of_memory;
        }
        const std::lock_guard lock(driver.mutex);
        void* memory =
            mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE,
                 -1, 0); // pinned: it is there
        if (memory == MAP_FAILED) {
            return Result::out_of_memory;
        }
        try {
            driver.objects.host_ranges[number(memory)] = {size, mapped, flags, &context};
        } catch (...) {
            munmap(memory, mapped);
            throw;
        }
        *pointer = memory;
        return Result::success;
    });
}

/// Forgets a range that starts there. `ours`: whether it is one of allocate().
Result release(Driver& driver, void* pointer, bool ours, Result missing) {
    const std::lock_guard lock(driver.mutex);
    const auto found = driver.objects.host_ranges.find(number(pointer));
    if (found == driver.objects.host_ranges.end() || (found->second.mapped_size != 0) != ours) {
        return missing;
    }
    if (ours) {
        munmap(pointer, found->second.mapped_size);
    }
    driver.objects.host_ranges.erase(found);
    return Result::success;
}

} // namespace

GPUSTASIS_API(cuMemAllocHost_v2)(void** pointer, std::size_t size) {
    return allocate(pointer, size, 0);
}

GPUSTASIS_API(cuMemHostAlloc)(void** pointer, std::size_t size, unsigned flags) {
    return allocate(pointer, size, flags);
}

GPUSTASIS_API(cuMemFreeHost)(void* pointer) {
    return call_in_context([=](Driver& driver, Context&) {
        const Result done = synchronise(driver);
        return done != Result::success ? done
                                       : release(driver, pointer, true, Result::invalid_value);
    });
}

GPUSTASIS_API(cuMemHostRegister_v2)(void* pointer, std::size_t size, unsigned flags) {
    return call_in_context([=](Driver& driver, Context& context) {
        if (pointer == nullptr || size == 0 || (flags & ~kKnownRegisterFlags) != 0) {
            return Result::invalid_value;
        }
        const std::lock_guard lock(driver.mutex);
        auto& ranges = driver.objects.host_ranges;
        const auto next = ranges.lower_bound(number(pointer));
        const bool covered = driver.objects.find_host(number(pointer)).second != nullptr;
        if (covered || (next != ranges.end() && next->first - number(pointer) < size)) {
            return Result::host_memory_already_registered;
        }
        ranges[number(pointer)] = {size, 0, flags, &context};
        return Result::success;
    });
}

GPUSTASIS_API(cuMemHostUnregister)(void* pointer) {
    return call_in_context([=](Driver& driver, Context&) {
        // The memory is the caller's to free from now on: no copy may be at work on it.
        const Result done = synchronise(driver);
        return done != Result::success
                   ? done
                   : release(driver, pointer, false, Result::host_memory_not_registered);
    });
}

GPUSTASIS_API(cuMemHostGetDevicePointer_v2)(DevicePtr*, void*, unsigned) {
    // Kernels run in another process, where host memory is not: see CAN_MAP_HOST_MEMORY.
    return call_in_context([](Driver&, Context&) { return Result::not_supported; });
}

GPUSTASIS_API(cuMemHostGetFlags)(unsigned* flags, void* pointer) {
    return call_in_context([=](Driver& driver, Context&) {
        const std::lock_guard lock(driver.mutex);
        const HostRange* range = driver.objects.find_host(number(pointer)).second;
        if (flags == nullptr || range == nullptr) {
            return Result::invalid_value;
        }
        *flags = range->flags;
        return Result::success;
    });
}
