// SPDX-License-Identifier: Apache-2.0
#include "driver_emulator/driver/vram.hpp"

#include "driver_emulator/driver/daemon_link.hpp"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace gpustasis::emulator {
namespace {

constexpr std::uint64_t kAlignment = 512;            // of every device pointer
constexpr std::uint64_t kSmallLimit = 1 << 20;       // larger ones have segments of their own
constexpr std::uint64_t kFirstBase = 0x7e0000000000; // below where the kernel puts libraries
constexpr std::uint64_t kLastBase = 0x100000000000;
constexpr std::size_t kPatternBytes = 65536;

std::uint64_t round_up(std::uint64_t value, std::uint64_t step) {
    return (value + step - 1) / step * step;
}

void* pointer(std::uint64_t address) {
    return reinterpret_cast<void*>(address);
}

} // namespace

Result Vram::attach(DaemonLink& link, unsigned gpu, std::uint64_t capacity) {
    // Twice the memory, so that gaps between allocations never make an address the scarce thing.
    const std::uint64_t size = round_up(capacity * 2, std::uint64_t{1} << 30);
    for (std::uint64_t base = kFirstBase; base > kLastBase; base -= size) {
        base -= base % kSegmentSize;
        if (mmap(pointer(base), size, PROT_NONE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1,
                 0) != pointer(base)) {
            if (errno == EEXIST) {
                continue;
            }
            return Result::out_of_memory;
        }
        const Result result = link.attach_device(gpu, base, size, &memory_);
        if (result == Result::success) {
            gpu_ = gpu;
            base_ = base;
            window_size_ = size;
            return Result::success;
        }
        munmap(pointer(base), size);
        if (result != Result::not_ready) { // not_ready: the worker has something there
            return result;
        }
    }
    return Result::out_of_memory;
}

Result Vram::reattach(DaemonLink& link, unsigned gpu) noexcept {
    const Result result = link.attach_device(gpu, base_, window_size_, &memory_);
    if (result != Result::success) {
        return result == Result::not_ready ? Result::operating_system : result;
    }
    gpu_ = gpu;
    return Result::success;
}

void Vram::detach() noexcept {
    if (memory_ >= 0) {
        close(memory_);
        memory_ = -1;
    }
}

Result Vram::map_again(DaemonLink& link, std::uint64_t address, std::uint64_t size) noexcept {
    return link.map_segment(gpu_, address - base_, size);
}

void Vram::release_addresses() noexcept {
    munmap(pointer(base_), window_size_);
}

Result Vram::reserve_addresses() noexcept {
    void* got = mmap(pointer(base_), window_size_, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    return got == pointer(base_) ? Result::success : Result::out_of_memory;
}

std::uint64_t Vram::find_gap(std::uint64_t size) const noexcept {
    std::uint64_t address = base_;
    for (const auto& [start, segment] : segments_) {
        if (start - address >= size) {
            return address;
        }
        address = start + segment.size;
    }
    return base_ + window_size_ - address >= size ? address : 0;
}

Result Vram::add_segment(DaemonLink& link, std::uint64_t size, bool shared, Segment** segment,
                         std::uint64_t* address) {
    *address = find_gap(size);
    if (*address == 0) {
        return Result::out_of_memory;
    }
    Segment& made = segments_[*address]; // first: it may throw, and then nothing is taken
    const Result result = link.map_segment(gpu_, *address - base_, size);
    if (result != Result::success) {
        segments_.erase(*address);
        return result;
    }
    made.size = size;
    made.shared = shared;
    *segment = &made;
    return Result::success;
}

Result Vram::allocate(DaemonLink& link, std::uint64_t size, const Context* owner,
                      DevicePtr* address) {
    if (size == 0) {
        return Result::invalid_value;
    }
    if (size > window_size_) {
        return Result::out_of_memory;
    }
    if (size <= kSmallLimit) {
        return allocate_small(link, {round_up(size, kAlignment), owner}, address);
    }
    Segment* segment = nullptr;
    std::uint64_t start = 0;
    const Result result = add_segment(link, round_up(size, kSegmentSize), false, &segment, &start);
    if (result == Result::success) {
        segment->allocations[start] = {size, owner};
        *address = start;
    }
    return result;
}

Result Vram::allocate_small(DaemonLink& link, Block block, DevicePtr* address) {
    for (auto& [start, segment] : segments_) {
        if (!segment.shared) {
            continue;
        }
        std::uint64_t free = start;
        for (const auto& [taken, taken_block] : segment.allocations) {
            if (taken - free >= block.size) {
                break;
            }
            free = taken + taken_block.size;
        }
        if (start + segment.size - free >= block.size) {
            segment.allocations[free] = block;
            *address = free;
            return Result::success;
        }
    }
    Segment* segment = nullptr;
    std::uint64_t start = 0;
    const Result result = add_segment(link, kSegmentSize, true, &segment, &start);
    if (result == Result::success) {
        segment->allocations[start] = block;
        *address = start;
    }
    return result;
}

Result Vram::free(DaemonLink& link, DevicePtr address) {
    auto found = segments_.upper_bound(address);
    if (found == segments_.begin()) {
        return Result::invalid_value;
    }
    --found;
    Segment& segment = found->second;
    if (segment.allocations.erase(address) == 0) {
        return Result::invalid_value;
    }
    if (!segment.allocations.empty()) {
        return Result::success;
    }
    const Result result = link.unmap_segment(gpu_, found->first - base_, segment.size);
    segments_.erase(found);
    return result;
}

void Vram::free_all(DaemonLink& link, const Context* owner) {
    for (auto segment = segments_.begin(); segment != segments_.end();) {
        std::erase_if(segment->second.allocations,
                      [owner](const auto& entry) { return entry.second.owner == owner; });
        if (!segment->second.allocations.empty()) {
            ++segment;
            continue;
        }
        link.unmap_segment(gpu_, segment->first - base_, segment->second.size);
        segment = segments_.erase(segment);
    }
}

Allocation Vram::find(DevicePtr address) const noexcept {
    auto segment = segments_.upper_bound(address);
    if (segment == segments_.begin()) {
        return {};
    }
    --segment;
    const auto& allocations = segment->second.allocations;
    auto found = allocations.upper_bound(address);
    if (found == allocations.begin()) {
        return {};
    }
    --found;
    const Block& block = found->second;
    return address - found->first < block.size ? Allocation{found->first, block.size, block.owner}
                                               : Allocation{};
}

bool Vram::contains(DevicePtr address, std::uint64_t size) const noexcept {
    const Allocation allocation = find(address);
    return allocation.size != 0 && size <= allocation.size - (address - allocation.address);
}

Result Vram::read(DevicePtr address, void* to, std::size_t size) const noexcept {
    // Not pread(): it is a cancellation point, and helper threads share the restore thread's TLS.
    auto offset = static_cast<long>(address - base_);
    for (char* at = static_cast<char*>(to); size > 0;) {
        const long got = syscall(SYS_pread64, memory_, at, size, offset);
        if (got <= 0) {
            return Result::invalid_value;
        }
        at += got;
        offset += got;
        size -= static_cast<std::size_t>(got);
    }
    return Result::success;
}

Result Vram::write(DevicePtr address, const void* from, std::size_t size) noexcept {
    auto offset = static_cast<long>(address - base_);
    for (const char* at = static_cast<const char*>(from); size > 0;) {
        const long put = syscall(SYS_pwrite64, memory_, at, size, offset);
        if (put <= 0) {
            return errno == ENOSPC || errno == ENOMEM ? Result::out_of_memory
                                                      : Result::invalid_value;
        }
        at += put;
        offset += put;
        size -= static_cast<std::size_t>(put);
    }
    return Result::success;
}

Result Vram::fill(DevicePtr address, const void* pattern, std::size_t pattern_size,
                  std::uint64_t size) noexcept {
    unsigned char buffer[kPatternBytes];
    for (std::size_t i = 0; i < sizeof buffer; i += pattern_size) {
        std::memcpy(buffer + i, pattern, pattern_size);
    }
    while (size > 0) {
        const std::size_t part = size < sizeof buffer ? size : sizeof buffer;
        const Result result = write(address, buffer, part);
        if (result != Result::success) {
            return result;
        }
        address += part;
        size -= part;
    }
    return Result::success;
}

} // namespace gpustasis::emulator
