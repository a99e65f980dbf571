// SPDX-License-Identifier: Apache-2.0
#include "tracee/task_maps.hpp"

#include "core/error.hpp"
#include "tracee/proc.hpp"

#include <sys/mman.h>
#include <sys/sysmacros.h>

#include <algorithm>
#include <charconv>

namespace gpustasis {
namespace {

constexpr std::string_view kFlags = "VmFlags:";

/// Takes fields off the front of one line of /proc/PID/maps.
class Line {
public:
    explicit Line(std::string_view text) : whole_(text), rest_(text) {}

    std::uint64_t number(int base, char end) {
        std::uint64_t value = 0;
        const char* last = rest_.data() + rest_.size();
        const auto [at, error] = std::from_chars(rest_.data(), last, value, base);
        if (error != std::errc{} || at == last || *at != end)
            fail();
        rest_.remove_prefix(static_cast<std::size_t>(at - rest_.data()) + 1);
        return value;
    }

    std::string_view word() {
        const std::size_t space = rest_.find(' ');
        if (space == std::string_view::npos)
            fail();
        const std::string_view found = rest_.substr(0, space);
        rest_.remove_prefix(space + 1);
        return found;
    }

    std::string_view name() const {
        const std::size_t begin = rest_.find_first_not_of(' ');
        return begin == std::string_view::npos ? std::string_view{} : rest_.substr(begin);
    }

    [[noreturn]] void fail() const {
        throw Error(Errc::corrupt_data, "not a line of /proc/PID/maps: " + std::string(whole_));
    }

private:
    std::string_view whole_;
    std::string_view rest_;
};

Mapping parse_line(std::string_view text) {
    Line line(text);
    Mapping mapping;
    mapping.start = line.number(16, '-');
    mapping.end = line.number(16, ' ');
    const std::string_view flags = line.word();
    if (flags.size() != 4)
        line.fail();
    mapping.protection = (flags[0] == 'r' ? PROT_READ : 0U) | (flags[1] == 'w' ? PROT_WRITE : 0U) |
                         (flags[2] == 'x' ? PROT_EXEC : 0U);
    mapping.shared = flags[3] == 's';
    mapping.offset = line.number(16, ' ');
    const std::uint64_t major_number = line.number(16, ':');
    const std::uint64_t minor_number = line.number(16, ' ');
    mapping.device =
        makedev(static_cast<unsigned>(major_number), static_cast<unsigned>(minor_number));
    // The inode is the last field of a line without a name, with or without a space behind it.
    const std::string_view name_and_inode = line.name();
    const std::size_t inode_end = name_and_inode.find(' ');
    const std::string_view inode = name_and_inode.substr(0, inode_end);
    if (std::from_chars(inode.data(), inode.data() + inode.size(), mapping.inode).ec != std::errc{})
        line.fail();
    if (inode_end != std::string_view::npos) {
        const std::size_t name = name_and_inode.find_first_not_of(' ', inode_end);
        if (name != std::string_view::npos)
            mapping.name = name_and_inode.substr(name);
    }
    return mapping;
}

} // namespace

bool Mapping::is_private_anonymous() const noexcept {
    return !shared && inode == 0 &&
           (name.empty() || name == "[heap]" || name.starts_with("[anon:"));
}

bool Mapping::is_shared_anonymous() const noexcept {
    return shared && (name == "/dev/zero (deleted)" || name == "/memfd:/dev/zero (deleted)" ||
                      name.starts_with("[anon_shmem:"));
}

std::vector<Mapping> parse_maps(std::string_view text) {
    std::vector<Mapping> mappings;
    while (!text.empty()) {
        const std::size_t end = text.find('\n');
        mappings.push_back(parse_line(text.substr(0, end)));
        if (end == std::string_view::npos)
            break;
        text.remove_prefix(end + 1);
    }
    return mappings;
}

std::vector<Mapping> parse_smaps(std::string_view text) {
    std::vector<Mapping> mappings;
    while (!text.empty()) {
        const std::size_t end = std::min(text.find('\n'), text.size());
        std::string_view line = text.substr(0, end);
        text.remove_prefix(std::min(end + 1, text.size()));
        // What is said of a mapping begins with a capital, the mapping with its address.
        if (line.empty() || line[0] < 'A' || line[0] > 'Z') {
            mappings.push_back(parse_line(line));
            continue;
        }
        if (mappings.empty() || !line.starts_with(kFlags))
            continue;
        line.remove_prefix(kFlags.size());
        for (std::size_t at = 0; at + 2 <= line.size();) {
            if (line[at] == ' ') {
                ++at;
                continue;
            }
            mappings.back().flags.emplace_back(line.substr(at, 2));
            at += 2;
        }
    }
    return mappings;
}

std::vector<Mapping> read_maps_with_flags(pid_t pid) {
    return parse_smaps(proc::read_file("/proc/" + std::to_string(pid) + "/smaps"));
}

std::vector<Mapping> read_maps(pid_t pid) {
    return parse_maps(proc::read_file("/proc/" + std::to_string(pid) + "/maps"));
}

} // namespace gpustasis
