// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/shared_memory.hpp"

#include "cuda_plugin/cpu_memory.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <optional>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>

namespace gpustasis {
namespace {

constexpr std::uint64_t kPage = 4096;
constexpr std::string_view kRemoved = " (deleted)";
constexpr std::string_view kNamed = "[anon_shmem:";

bool is_writable(const Mapping& mapping) noexcept {
    return mapping.protection == (PROT_READ | PROT_WRITE);
}

bool is_large(const Mapping& mapping) noexcept {
    return is_writable(mapping) && mapping.end - mapping.start >= kMinCpuMapping;
}

bool holds_staging(const SharingTask& task, const Mapping& mapping) noexcept {
    return std::ranges::any_of(task.staging, [&](const Region& region) {
        return region.address < mapping.end && mapping.start < region.address + region.length;
    });
}

/// Of one file, in offsets of it: what no image may hold.
struct Limits {
    std::vector<AddressRange> left;
    std::uint64_t block = kPage;
};

// A restore writes to a stack before the memory is filled, whichever task maps it.
std::map<SharedFileId, Limits> limits_of(const std::vector<SharingTask>& tasks) {
    std::map<SharedFileId, Limits> limits;
    for (const SharingTask& task : tasks)
        for (const Mapping& mapping : task.mappings) {
            if (!maps_shared_memory(mapping))
                continue;
            Limits& of_file = limits[file_of(mapping)];
            if (std::ranges::find(mapping.flags, "hg") != mapping.flags.end())
                of_file.block = kHugePage;
            for (const std::uint64_t address : task.in_use) {
                const std::uint64_t page = address / kPage * kPage;
                const std::uint64_t start =
                    std::max(mapping.start, page - std::min(page, kCpuWindow));
                const std::uint64_t end = std::min(mapping.end, page + kCpuWindow);
                if (start < end)
                    of_file.left.push_back({start - mapping.start + mapping.offset,
                                            end - mapping.start + mapping.offset});
            }
        }
    for (auto& [inode, of_file] : limits)
        of_file.left = join(std::move(of_file.left));
    return limits;
}

void append_parts(const SharingTask& task, const Mapping& mapping, const SharedFile& file,
                  Limits& limits, std::vector<SharedPart>& parts) {
    const std::uint64_t block = std::max(limits.block, file.block);
    // Of a last page that the file has a part of nothing is taken: it is no whole block.
    const AddressRange mapped{mapping.offset,
                              std::min(mapping.offset + mapping.end - mapping.start, file.size)};
    std::vector<AddressRange> taken;
    for (const AddressRange& data : file.data) {
        const AddressRange run{std::max(data.start, mapped.start), std::min(data.end, mapped.end)};
        if (run.start >= run.end)
            continue;
        for (const AddressRange& part : parts_outside(run, limits.left, block, kMinCpuRun)) {
            parts.push_back(
                {.pid = task.pid,
                 .region = {mapping.start + (part.start - mapping.offset), part.end - part.start,
                            PROT_READ | PROT_WRITE, RegionKind::shared_anonymous},
                 .file = file_of(mapping),
                 .offset = part.start});
            taken.push_back(part);
        }
    }
    limits.left.insert(limits.left.end(), taken.begin(), taken.end());
    limits.left = join(std::move(limits.left));
}

} // namespace

bool maps_shared_memory(const Mapping& mapping) noexcept {
    return mapping.inode != 0 &&
           (mapping.name.starts_with(kNamed) ||
            (mapping.name.starts_with('/') && mapping.name.ends_with(kRemoved)));
}

SharedFileId file_of(const Mapping& mapping) noexcept {
    return {.device = mapping.device, .inode = mapping.inode};
}

bool may_share_memory(const std::vector<SharingTask>& tasks) noexcept {
    return std::ranges::any_of(tasks, [](const SharingTask& task) {
        return std::ranges::any_of(task.mappings, [](const Mapping& mapping) {
            return maps_shared_memory(mapping) && mapping.shared && is_large(mapping);
        });
    });
}

std::vector<SharedFileId> find_shared_candidates(const std::vector<SharingTask>& tasks) {
    std::set<SharedFileId> large;
    std::set<SharedFileId> left;
    for (const SharingTask& task : tasks)
        for (const Mapping& mapping : task.mappings) {
            if (!maps_shared_memory(mapping))
                continue;
            if (!mapping.shared || (mapping.protection & PROT_EXEC) != 0 ||
                leaves_to_criu(mapping) || holds_staging(task, mapping))
                left.insert(file_of(mapping));
            else if (is_large(mapping))
                large.insert(file_of(mapping));
        }
    std::vector<SharedFileId> candidates;
    std::ranges::set_difference(large, left, std::back_inserter(candidates));
    return candidates;
}

std::vector<SharedPart> choose_shared_memory(const std::vector<SharingTask>& tasks,
                                             const std::map<SharedFileId, SharedFile>& files) {
    std::map<SharedFileId, Limits> limits = limits_of(tasks);
    std::vector<SharedPart> parts;
    for (const SharingTask& task : tasks)
        for (const Mapping& mapping : task.mappings) {
            const auto file = files.find(file_of(mapping));
            if (file == files.end() || !maps_shared_memory(mapping) || !is_large(mapping))
                continue;
            append_parts(task, mapping, file->second, limits[file->first], parts);
        }
    if (parts.size() > kMaxCpuRegions) {
        std::ranges::sort(parts, [](const SharedPart& a, const SharedPart& b) {
            return std::tuple(b.region.length, a.pid, a.region.address) <
                   std::tuple(a.region.length, b.pid, b.region.address);
        });
        parts.resize(kMaxCpuRegions);
    }
    std::ranges::sort(
        parts, {}, [](const SharedPart& part) { return std::pair(part.pid, part.region.address); });
    return parts;
}

} // namespace gpustasis
