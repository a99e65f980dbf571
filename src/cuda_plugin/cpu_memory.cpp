// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/cpu_memory.hpp"

#include "core/error.hpp"
#include "core/file.hpp"
#include "core/unique_fd.hpp"
#include "cuda_plugin/address_ranges.hpp"
#include "tracee/page_scan.hpp"
#include "tracee/proc.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <filesystem>
#include <iterator>
#include <limits>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

namespace gpustasis {
namespace {

constexpr std::uint64_t kPage = 4096;
// Documentation/filesystems/proc.rst, VmFlags.
constexpr std::array<std::string_view, 11> kLeft = {"lo", "lf", "ht", "io", "pf", "um",
                                                    "uw", "wf", "dc", "gd", "ss"};
// Of /proc/PID/pagemap: Documentation/admin-guide/mm/pagemap.rst.
constexpr std::uint64_t kPresent = std::uint64_t{1} << 63;
constexpr std::uint64_t kSwapped = std::uint64_t{1} << 62;
constexpr std::uint64_t kOfFile = std::uint64_t{1} << 61;
constexpr std::uint64_t kExclusive = std::uint64_t{1} << 56;
constexpr std::size_t kEntries = 32768;
constexpr std::size_t kScanned = 512;
// The kernel takes three times as long to scan pages as to tell of each.
constexpr std::uint64_t kSmallMapping = std::uint64_t{16} << 20;

// Parts of what a link in /proc/PID/fd, or the name of a mapping, says.
constexpr std::array<std::string_view, 4> kDevices = {"[io_uring]", "[vfio", "/[aio]", "/dmabuf"};
constexpr std::string_view kNvidia =
    "/dev/nvidia"; // quiet once the driver has checkpointed the task

/// Private pages of a frozen task that are in memory and no other task's.
class OwnPages {
public:
    explicit OwnPages(pid_t pid)
        : path_("/proc/" + std::to_string(pid) + "/pagemap"),
          fd_(::open(path_.c_str(), O_RDONLY | O_CLOEXEC)), scanner_(fd_.get(), kScanned) {
        if (!fd_)
            throw io_error("cannot open " + path_, errno);
    }

    /// Of one mapping: no run goes on in the next, which has other flags.
    std::vector<Region> find(std::uint64_t start, std::uint64_t end) {
        std::vector<Region> runs;
        if (end - start <= kSmallMapping)
            look({start, end - start}, runs);
        else
            scan(start, end, runs);
        std::erase_if(runs, [](const Region& run) { return run.length < kMinCpuRun; });
        return runs;
    }

private:
    /// Passes holes, however large, at once.
    void scan(std::uint64_t start, std::uint64_t end, std::vector<Region>& runs) {
        std::vector<PageRange> present;
        constexpr std::uint64_t kNot = kPageFile | kPageSwapped | kPageZero;
        scanner_.scan(start, end, {.inverted = kNot, .all_of = kNot | kPagePresent, .any_of = 0},
                      ScanMode::look, false, present);
        // The scan cannot tell which pages are shared with a parent or a child.
        for (std::size_t i = 0; i < present.size(); ++i) {
            PageRange range = present[i];
            while (i + 1 < present.size() && range.address + range.length == present[i + 1].address)
                range.length += present[++i].length;
            if (range.length >= kMinCpuRun)
                look(range, runs);
        }
    }

    /// A page of zeros that is the kernel's is not exclusive.
    void look(const PageRange& range, std::vector<Region>& runs) {
        for (std::uint64_t done = 0; done < range.length;) {
            const std::uint64_t pages =
                std::min<std::uint64_t>(kEntries, (range.length - done) / kPage);
            entries_.resize(std::max(entries_.size(), pages)); // no more than a small task needs
            const std::span<std::uint64_t> entries(entries_.data(), pages);
            const std::uint64_t first = range.address + done;
            read_at(fd_.get(), first / kPage * sizeof(std::uint64_t),
                    std::as_writable_bytes(entries));
            for (std::uint64_t i = 0; i < pages; ++i)
                if ((entries[i] & (kPresent | kSwapped | kOfFile | kExclusive)) ==
                    (kPresent | kExclusive))
                    append(first + i * kPage, runs);
            done += pages * kPage;
        }
    }

    static void append(std::uint64_t address, std::vector<Region>& runs) {
        if (!runs.empty() && runs.back().address + runs.back().length == address)
            runs.back().length += kPage;
        else
            runs.push_back({address, kPage, PROT_READ | PROT_WRITE, RegionKind::private_anonymous});
    }

    std::string path_;
    UniqueFd fd_;
    PageScanner scanner_;
    std::vector<std::uint64_t> entries_;
};

/// As far as it can be told without the flags.
bool is_plain_memory(const Mapping& mapping) noexcept {
    return mapping.is_private_anonymous() && mapping.end - mapping.start >= kMinCpuMapping &&
           mapping.protection == (PROT_READ | PROT_WRITE);
}

bool has_flag(const Mapping& mapping, std::string_view flag) noexcept {
    return std::ranges::find(mapping.flags, flag) != mapping.flags.end();
}

bool names_device(std::string_view name) noexcept {
    return std::ranges::any_of(kDevices, [name](std::string_view part) {
        return name.find(part) != std::string_view::npos;
    });
}

/// kB in the line "VmPin:" of a task's status.
std::uint64_t pinned(pid_t pid) {
    const std::string status = proc::read_file("/proc/" + std::to_string(pid) + "/status");
    const std::size_t line = status.find("\nVmPin:");
    if (line == std::string::npos) // a task that has ended has no memory
        return 0;
    const std::size_t digits = status.find_first_of("0123456789", line);
    std::uint64_t value = 0;
    std::from_chars(status.data() + std::min(digits, status.size()), status.data() + status.size(),
                    value);
    return value;
}

} // namespace

bool leaves_to_criu(const Mapping& mapping) noexcept {
    return mapping.flags.empty() || std::ranges::any_of(mapping.flags, [](const std::string& flag) {
               return std::ranges::find(kLeft, flag) != kLeft.end();
           });
}

std::vector<Region> choose_cpu_memory(const std::vector<Mapping>& mappings,
                                      const std::vector<std::uint64_t>& in_use,
                                      const std::vector<Region>& staging, const FindPages& find) {
    std::vector<AddressRange> left;
    for (const std::uint64_t address : in_use) {
        const std::uint64_t page = address / kPage * kPage;
        // It can be any number, as a register can.
        constexpr std::uint64_t kLast = std::numeric_limits<std::uint64_t>::max();
        left.push_back(
            {page - std::min(page, kCpuWindow), page + std::min(kLast - page, kCpuWindow)});
    }
    for (const Region& region : staging)
        left.push_back({region.address, region.address + region.length});
    left = join(std::move(left));
    std::vector<Region> chosen;
    for (const Mapping& mapping : mappings) {
        if (!is_plain_memory(mapping) || leaves_to_criu(mapping))
            continue;
        const std::uint64_t block = has_flag(mapping, "hg") ? kHugePage : kPage;
        for (const Region& run : find(mapping.start, mapping.end))
            for (const AddressRange& part :
                 parts_outside({run.address, run.address + run.length}, left, block, kMinCpuRun))
                chosen.push_back({part.start, part.end - part.start, PROT_READ | PROT_WRITE,
                                  RegionKind::private_anonymous});
    }
    if (chosen.size() > kMaxCpuRegions) {
        std::ranges::sort(chosen, [](const Region& a, const Region& b) {
            return std::pair(b.length, a.address) < std::pair(a.length, b.address);
        });
        chosen.resize(kMaxCpuRegions);
        std::ranges::sort(chosen, {}, &Region::address);
    }
    return chosen;
}

std::vector<Region> find_own_pages(pid_t pid, const std::vector<Mapping>& mappings) {
    std::vector<Region> runs;
    std::optional<OwnPages> pages;
    for (const Mapping& mapping : mappings) {
        if (!is_plain_memory(mapping))
            continue;
        if (!pages)
            pages.emplace(pid);
        std::ranges::copy(pages->find(mapping.start, mapping.end), std::back_inserter(runs));
    }
    return runs;
}

FindPages among(const std::vector<Region>& pages) {
    return [&pages](std::uint64_t start, std::uint64_t end) {
        const auto first = std::ranges::lower_bound(pages, start, {}, &Region::address);
        const auto behind = std::ranges::lower_bound(pages, end, {}, &Region::address);
        return std::vector<Region>(first, behind);
    };
}

// The numbers: Documentation/admin-guide/devices.txt.
bool is_harmless_device(dev_t number, std::string_view link) noexcept {
    const unsigned minor_number = minor(number);
    switch (major(number)) {
    case 1:
        return minor_number == 3 || minor_number == 5 || (7 <= minor_number && minor_number <= 9);
    case 4: return true;                                        // ttys
    case 5: return minor_number <= 2;                           // tty, console, ptmx
    case 10: return minor_number == 200 || minor_number == 229; // net/tun, fuse
    default: break;
    }
    return (136 <= major(number) && major(number) <= 143) || link.starts_with(kNvidia); // pts
}

std::string why_written_by_device(pid_t pid, const std::vector<Mapping>& mappings) {
    if (const std::uint64_t kilobytes = pinned(pid); kilobytes != 0)
        return std::to_string(kilobytes) + " kB of its memory are pinned (VmPin)";
    for (const Mapping& mapping : mappings)
        if (names_device(mapping.name) ||
            (mapping.name.starts_with('/') && !mapping.name.starts_with(kNvidia) &&
             (has_flag(mapping, "io") || has_flag(mapping, "pf"))))
            return "it has " + mapping.name + " mapped";
    std::error_code error;
    const std::filesystem::path directory = "/proc/" + std::to_string(pid) + "/fd";
    for (const auto& link : std::filesystem::directory_iterator(directory)) {
        const std::filesystem::path target = std::filesystem::read_symlink(link.path(), error);
        struct statx status {};
        // As the kernel has it: what serves the file's file system may be frozen with the tree.
        if (error ||
            ::statx(AT_FDCWD, link.path().c_str(), AT_STATX_DONT_SYNC, STATX_TYPE, &status) != 0)
            continue; // closed by a thread that shares the table; there is none in a frozen task
        const dev_t number = makedev(status.stx_rdev_major, status.stx_rdev_minor);
        if (names_device(target.native()) ||
            (S_ISCHR(status.stx_mode) && !is_harmless_device(number, target.native())))
            return "it has " + target.string() + " open";
    }
    return {};
}

} // namespace gpustasis
