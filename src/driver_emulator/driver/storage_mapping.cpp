// SPDX-License-Identifier: Apache-2.0
#include "driver_emulator/driver/storage_mapping.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace gpustasis::emulator {
namespace {

constexpr std::uint64_t kSliceBytes = std::uint64_t{1} << 20; // those who share a link take turns
constexpr std::size_t kPatternBytes = 65536;
constexpr std::uint64_t kPage = 4096;

Result read_file(int file, std::uint64_t offset, void* to, std::uint64_t size) noexcept {
    for (char* at = static_cast<char*>(to); size > 0;) {
        const ssize_t got = pread(file, at, size, static_cast<off_t>(offset));
        if (got <= 0) {
            return Result::invalid_value;
        }
        at += got;
        offset += static_cast<std::uint64_t>(got);
        size -= static_cast<std::uint64_t>(got);
    }
    return Result::success;
}

Result write_file(int file, std::uint64_t offset, const void* from, std::uint64_t size) noexcept {
    for (const char* at = static_cast<const char*>(from); size > 0;) {
        const ssize_t put = pwrite(file, at, size, static_cast<off_t>(offset));
        if (put <= 0) {
            return errno == ENOSPC || errno == ENOMEM ? Result::out_of_memory
                                                      : Result::invalid_value;
        }
        at += put;
        offset += static_cast<std::uint64_t>(put);
        size -= static_cast<std::uint64_t>(put);
    }
    return Result::success;
}

bool is_zero(const void* pattern, std::size_t size) noexcept {
    const auto* bytes = static_cast<const unsigned char*>(pattern);
    return std::all_of(bytes, bytes + size, [](unsigned char byte) { return byte == 0; });
}

} // namespace

StorageMapping::StorageMapping(std::uint64_t address, int memory,
                               const std::vector<StorageRun>& runs, LinkRates rates)
    : address_(address), memory_(memory), rates_(rates) {
    for (const StorageRun& run : runs) {
        runs_[size_] = run;
        size_ += run.size;
    }
}

/// visit(offset in the file, bytes before this part, size) for slices of the range.
template <typename Visit>
Result StorageMapping::for_each_part(std::uint64_t address, std::uint64_t size,
                                     Visit visit) const noexcept {
    for (std::uint64_t done = 0; done < size;) {
        const std::uint64_t at = address - address_ + done;
        const auto& [start, run] = *std::prev(runs_.upper_bound(at));
        const std::uint64_t part = std::min({size - done, run.size - (at - start), kSliceBytes});
        const Result result = visit(run.offset + (at - start), done, part);
        if (result != Result::success) {
            return result;
        }
        done += part;
    }
    return Result::success;
}

Result StorageMapping::read_to_host(std::uint64_t address, void* to,
                                    std::uint64_t size) const noexcept {
    return for_each_part(address, size, [=, this](auto offset, auto before, auto part) {
        const LinkTurn turn(rates_, LinkDirection::to_host, part);
        return read_file(memory_.get(), offset, static_cast<char*>(to) + before, part);
    });
}

Result StorageMapping::write_from_host(std::uint64_t address, const void* from,
                                       std::uint64_t size) const noexcept {
    return for_each_part(address, size, [=, this](auto offset, auto before, auto part) {
        const LinkTurn turn(rates_, LinkDirection::to_device, part);
        const std::lock_guard one_at_a_time(writing_); // those who wait sleep, and do not spin
        return write_file(memory_.get(), offset, static_cast<const char*>(from) + before, part);
    });
}

Result StorageMapping::read(std::uint64_t address, void* to, std::uint64_t size) const noexcept {
    return for_each_part(address, size, [=, this](auto offset, auto before, auto part) {
        return read_file(memory_.get(), offset, static_cast<char*>(to) + before, part);
    });
}

Result StorageMapping::write(std::uint64_t address, const void* from,
                             std::uint64_t size) const noexcept {
    return for_each_part(address, size, [=, this](auto offset, auto before, auto part) {
        return write_file(memory_.get(), offset, static_cast<const char*>(from) + before, part);
    });
}

Result StorageMapping::fill(std::uint64_t address, const void* pattern, std::size_t pattern_size,
                            std::uint64_t size) const noexcept {
    const bool zero = is_zero(pattern, pattern_size);
    unsigned char buffer[kPatternBytes];
    for (std::size_t i = 0; i < sizeof buffer; i += pattern_size) {
        std::memcpy(buffer + i, pattern, pattern_size);
    }
    return for_each_part(address, size, [&](auto offset, auto, auto part) {
        // A hole reads as zeros, at no cost. The file is long enough, or the memory is gone.
        if (zero && offset % kPage == 0 && part % kPage == 0) {
            const off_t end = lseek(memory_.get(), 0, SEEK_END);
            return static_cast<std::uint64_t>(end) >= offset + part &&
                           fallocate(memory_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                                     static_cast<off_t>(offset), static_cast<off_t>(part)) == 0
                       ? Result::success
                       : Result::invalid_value;
        }
        for (std::uint64_t done = 0; done < part; done += sizeof buffer) {
            const Result result = write_file(memory_.get(), offset + done, buffer,
                                             std::min<std::uint64_t>(part - done, sizeof buffer));
            if (result != Result::success) {
                return result;
            }
        }
        return Result::success;
    });
}

std::uint64_t MappingTable::reserve(std::uint64_t size) {
    for (auto& [address, range] : ranges_) {
        if (!range.taken && range.size >= size) {
            range.taken = true;
            return address;
        }
    }
    // No memory of the host, so that whoever uses such an address without the driver ends at once.
    const std::uint64_t padded = size + kSegmentSize;
    void* memory =
        mmap(nullptr, padded, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        return 0;
    }
    const auto first = reinterpret_cast<std::uint64_t>(memory);
    const std::uint64_t address = (first + kSegmentSize - 1) / kSegmentSize * kSegmentSize;
    try {
        ranges_[address] = {size, true, nullptr};
    } catch (...) {
        munmap(memory, padded);
        throw;
    }
    return address;
}

void MappingTable::add(const std::shared_ptr<const StorageMapping>& mapping) {
    ranges_.at(mapping->address()).mapping = mapping;
}

void MappingTable::remove(std::uint64_t address) {
    Range& range = ranges_.at(address);
    range.mapping = nullptr;
    range.taken = false;
}

const MappingTable::Range* MappingTable::find_range(std::uint64_t address) const noexcept {
    auto found = ranges_.upper_bound(address);
    if (found == ranges_.begin()) {
        return nullptr;
    }
    --found;
    return address - found->first < found->second.size ? &found->second : nullptr;
}

std::shared_ptr<const StorageMapping> MappingTable::find(std::uint64_t address) const noexcept {
    const Range* range = find_range(address);
    return range != nullptr && range->mapping != nullptr && range->mapping->contains(address, 0)
               ? range->mapping
               : nullptr;
}

bool MappingTable::is_dead(std::uint64_t address) const noexcept {
    return find_range(address) != nullptr && find(address) == nullptr;
}

} // namespace gpustasis::emulator
