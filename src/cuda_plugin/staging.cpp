// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/staging.hpp"

#include <sys/mman.h>

#include <algorithm>

namespace gpustasis {
namespace {

bool is_readable_anonymous(const Mapping& mapping) noexcept {
    return (mapping.protection & PROT_READ) != 0 &&
           (mapping.is_private_anonymous() || mapping.is_shared_anonymous());
}

RegionKind kind_of(const Mapping& mapping) noexcept {
    return mapping.shared ? RegionKind::shared_anonymous : RegionKind::private_anonymous;
}

/// What the kernel keeps at most in one piece, at a multiple of it in the file.
constexpr std::uint64_t kLargestFolio = std::uint64_t{2} << 20;

/// Of [start, end) in the shared memory `mapping`, what holds no part of a huge page. A part cannot be
/// dropped for sure: of a page that something else holds on to, the kernel makes zeros in its place
/// and leaves it there. Zeros that are there are not missing: they would be taken for what was
/// put back.
void cut_to_whole_folios(const Mapping& mapping, std::uint64_t& start, std::uint64_t& end) {
    if (start >= end)
        return;
    // In the file: an address less its offset there may lie below zero.
    const std::uint64_t first = mapping.offset + (start - mapping.start);
    const std::uint64_t from = (first + kLargestFolio - 1) / kLargestFolio * kLargestFolio;
    const std::uint64_t to = (first + (end - start)) / kLargestFolio * kLargestFolio;
    end = from < to ? start + (to - first) : start;
    start = from < to ? start + (from - first) : start;
}

void append(std::vector<Region>& regions, const Mapping& mapping, std::uint64_t start,
            std::uint64_t end) {
    if (mapping.shared)
        cut_to_whole_folios(mapping, start, end);
    if (start >= end)
        return;
    if (!regions.empty()) {
        Region& last = regions.back();
        // Shared neighbours are two files, and are dropped as two.
        if (last.address + last.length == start && last.protection == mapping.protection &&
            last.kind == RegionKind::private_anonymous && !mapping.shared) {
            last.length += end - start;
            return;
        }
    }
    regions.push_back({start, end - start, mapping.protection, kind_of(mapping)});
}

bool is_reserved(const Mapping& mapping) noexcept {
    return mapping.protection == PROT_NONE && mapping.is_private_anonymous();
}

/// Of glibc's malloc (HEAP_MAX_SIZE): that much memory at a multiple of it, the first of it in use
/// and the rest reserved.
constexpr std::uint64_t kArena = std::uint64_t{64} << 20;

/// Where in `mapping` such an arena begins, else its end. What was mapped below an arena may have
/// become one mapping with it. `next`: what follows `mapping`, if anything.
std::uint64_t arena_start(const Mapping& mapping, const Mapping* next) noexcept {
    const std::uint64_t start = (mapping.end - 1) / kArena * kArena;
    const bool is_arena = !mapping.shared && mapping.start <= start && next != nullptr &&
                          is_reserved(*next) && next->start == mapping.end &&
                          next->end == start + kArena;
    return is_arena ? start : mapping.end;
}

bool was_there(const std::vector<Mapping>& before, std::uint64_t address) noexcept {
    return std::ranges::any_of(before, [address](const Mapping& mapping) {
        return mapping.start <= address && address < mapping.end;
    });
}

/// Where in `mapping` the stack of a new thread ends, else its start. Such a stack lies above a guard
/// of at most 64 KiB that is new; 8 MiB are
/// the usual size. What is mapped above it may have become
/// one mapping with it. `below`: what lies below `mapping`, if anything.
std::uint64_t stack_end(const Mapping& mapping, const Mapping* below,
                        const std::vector<Mapping>& before) noexcept {
    constexpr std::uint64_t kMaxGuard = 64U << 10;
    constexpr std::uint64_t kMaxStack = std::uint64_t{8} << 20;
    const bool is_stack = !mapping.shared && below != nullptr && is_reserved(*below) &&
                          below->end == mapping.start && below->end - below->start <= kMaxGuard &&
                          !was_there(before, below->start);
    return is_stack ? std::min(mapping.end, mapping.start + kMaxStack) : mapping.start;
}

} // namespace

std::vector<Region> find_staging(const std::vector<Mapping>& before,
                                 const std::vector<Mapping>& after,
                                 const std::vector<std::uint64_t>& in_use) {
    std::vector<Region> regions;
    std::size_t first = 0; // the first old mapping that may still overlap
    for (std::size_t number = 0; number < after.size(); ++number) {
        const Mapping& mapping = after[number];
        const Mapping* below = number == 0 ? nullptr : &after[number - 1];
        const Mapping* next = number + 1 == after.size() ? nullptr : &after[number + 1];
        if (!is_readable_anonymous(mapping) || mapping.name == "[heap]")
            continue;
        const std::uint64_t end = arena_start(mapping, next);
        std::uint64_t at = stack_end(mapping, below, before);
        while (first < before.size() && before[first].end <= mapping.start)
            ++first;
        for (std::size_t i = first; i < before.size() && before[i].start < end; ++i) {
            const Mapping& old = before[i];
            // Only memory of the same kind was there before: what it held is CRIU's business.
            if (!is_readable_anonymous(old) || old.shared != mapping.shared ||
                old.inode != mapping.inode)
                continue;
            append(regions, mapping, at, std::min(end, std::max(at, old.start)));
            at = std::max(at, old.end);
        }
        append(regions, mapping, at, end);
    }
    std::erase_if(regions, [&](const Region& region) {
        return region.length < kMinStaging ||
               std::ranges::any_of(in_use, [&](std::uint64_t address) {
                   return region.address <= address && address < region.address + region.length;
               });
    });
    return regions;
}

} // namespace gpustasis
