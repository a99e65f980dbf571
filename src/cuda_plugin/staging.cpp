#include "cuda_plugin/staging.hpp"

#include "core/error.hpp"
#include "core/process_memory.hpp"
#include "core/unique_fd.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>

namespace gpustasis {
namespace {

std::string hex(std::uint64_t value) {
    std::array<char, 20> text{};
    std::snprintf(text.data(), text.size(), "%#llx", static_cast<unsigned long long>(value));
    return text.data();
}

bool is_readable_anonymous(const Mapping& mapping) noexcept {
    return (mapping.protection & PROT_READ) != 0 &&
           (mapping.is_private_anonymous() || mapping.is_shared_anonymous());
}

RegionKind kind_of(const Mapping& mapping) noexcept {
    return mapping.shared ? RegionKind::shared_anonymous : RegionKind::private_anonymous;
}

void append(std::vector<Region>& regions, const Mapping& mapping, std::uint64_t start,
            std::uint64_t end) {
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

/// Whether no page of the region is present or swapped out, by /proc/PID/pagemap.
bool is_untouched(pid_t pid, const Region& region) {
    const std::string path = "/proc/" + std::to_string(pid) + "/pagemap";
    const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!fd)
        throw io_error("cannot open " + path, errno);
    constexpr std::uint64_t kPresentOrSwapped = std::uint64_t{3} << 62;
    const auto page_size = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    std::vector<std::uint64_t> entries(8192);
    std::uint64_t page = region.address / page_size;
    std::uint64_t left = region.length / page_size;
    while (left > 0) {
        const std::size_t count = std::min<std::uint64_t>(left, entries.size());
        const ssize_t got = ::pread(fd.get(), entries.data(), count * sizeof(entries[0]),
                                    static_cast<off_t>(page * sizeof(entries[0])));
        if (got <= 0)
            throw io_error("cannot read " + path, got < 0 ? errno : EIO);
        const auto read = static_cast<std::size_t>(got) / sizeof(entries[0]);
        for (std::size_t i = 0; i < read; ++i)
            if ((entries[i] & kPresentOrSwapped) != 0)
                return false;
        page += read;
        left -= read;
    }
    return true;
}

/// Throws unless the task maps all of `region`, and just as it says.
void require_mapped(const std::vector<Mapping>& maps, const Region& region) {
    const std::uint64_t end = region.address + region.length;
    std::uint64_t at = region.address;
    for (const Mapping& mapping : maps) {
        if (mapping.end <= at)
            continue;
        if (mapping.start > at)
            break;
        if (!is_readable_anonymous(mapping) || kind_of(mapping) != region.kind ||
            mapping.protection != region.protection)
            break;
        at = mapping.end;
        if (at >= end)
            return;
    }
    throw Error(Errc::corrupt_data, "the task does not map " + hex(region.address) + "-" +
                                        hex(end) + " as its GPU image says (differs at " + hex(at) +
                                        ")");
}

} // namespace

std::vector<Region> find_staging(const std::vector<Mapping>& before,
                                 const std::vector<Mapping>& after) {
    std::vector<Region> regions;
    std::size_t first = 0; // the first old mapping that may still overlap
    for (const Mapping& mapping : after) {
        if (!is_readable_anonymous(mapping))
            continue;
        std::uint64_t at = mapping.start;
        while (first < before.size() && before[first].end <= at)
            ++first;
        for (std::size_t i = first; i < before.size() && before[i].start < mapping.end; ++i) {
            const Mapping& old = before[i];
            // Only memory of the same kind was there before: what it held is CRIU's business.
            if (!is_readable_anonymous(old) || old.shared != mapping.shared ||
                old.inode != mapping.inode)
                continue;
            append(regions, mapping, at, std::max(at, old.start));
            at = std::max(at, old.end);
        }
        append(regions, mapping, at, mapping.end);
    }
    return regions;
}

void refill(pid_t pid, const ImageReader& image, unsigned threads) {
    const std::vector<Mapping> maps = read_maps(pid);
    bool fresh = true;
    for (const Region& region : image.info().regions) {
        require_mapped(maps, region);
        // A shared page can be there without this task having touched it.
        fresh = fresh && region.kind == RegionKind::private_anonymous && is_untouched(pid, region);
    }
    ProcessMemory memory(pid);
    image.restore(memory, threads, fresh);
}

} // namespace gpustasis
