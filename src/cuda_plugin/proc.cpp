// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/proc.hpp"

#include "core/error.hpp"
#include "core/unique_fd.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <climits>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace gpustasis::proc {
namespace {

// Parts of paths in /proc/PID/maps. NVML starts a thread of the same kind.
constexpr std::array<std::string_view, 3> kDriverMarks = {"/libcuda.so", "/libnvidia-ml.so",
                                                          "/dev/nvidia"};
constexpr std::size_t kLongestMark = 16;

// "cuda" and the two numbers, 22 bits each, in hexadecimal digits.
constexpr std::string_view kNameStart = "cuda";
constexpr std::size_t kDigits = 11;
constexpr unsigned kNumberBits = 22;

// The driver's helper threads of a checkpoint are gone within microseconds of its answer.
constexpr int kHelperThreadsMs = 5'000;

// A thread's name takes about a tenth of the time that the mappings of a small process take.
constexpr std::uint64_t kFewThreads = 4;
// Of more, it is faster to pass their stacks once and to look at every file mapping between.
constexpr std::uint64_t kManyThreads = 256;

/// By the links of its directory: two, and one for each thread.
std::uint64_t count_threads(pid_t pid) {
    const std::string path = "/proc/" + std::to_string(pid) + "/task";
    struct stat status {};
    if (::stat(path.c_str(), &status) != 0)
        throw io_error("cannot examine " + path, errno);
    return status.st_nlink - 2;
}

bool has_mark(std::string_view text) {
    return std::ranges::any_of(kDriverMarks, [text](std::string_view mark) {
        return text.find(mark) != std::string_view::npos;
    });
}

// PROCMAP_QUERY of Linux 6.11 (linux/fs.h), which older headers lack.
struct ProcmapQuery {
    std::uint64_t size, flags, address, start, end, vma_flags, page_size, offset, inode;
    std::uint32_t major, minor, name_size, build_id_size;
    std::uint64_t name, build_id;
};
constexpr unsigned long kProcmapQuery = _IOWR('f', 17, ProcmapQuery);
constexpr std::uint64_t kExecutable = 0x4, kShared = 0x8, kThisOrNext = 0x10, kFileBacked = 0x20;

/// Ask the kernel for one file mapping with these flags after the other: stacks of threads cost next
/// to nothing. nullopt: this kernel cannot, or a path is too long for it.
std::optional<bool> asked_maps_driver(int maps, std::uint64_t flags) {
    std::array<char, PATH_MAX> name;
    ProcmapQuery query{};
    query.size = sizeof(query);
    query.flags = kThisOrNext | kFileBacked | flags;
    for (;;) {
        query.name = reinterpret_cast<std::uintptr_t>(name.data());
        query.name_size = name.size();
        if (::ioctl(maps, kProcmapQuery, &query) != 0) {
            if (errno == EINTR)
                continue;
            if (errno == ENOENT || errno == ESRCH) // there is no other one, or no memory at all
                return false;
            return std::nullopt;
        }
        // The size counts the zero at the end.
        if (query.name_size != 0 && has_mark({name.data(), query.name_size - 1}))
            return true;
        query.address = query.end;
    }
}

/// Of a library one mapping is executable, of four or five; a device is mapped shared.
std::optional<bool> asked_maps_driver(int maps, bool many_threads) {
    if (many_threads)
        return asked_maps_driver(maps, std::uint64_t{0});
    const auto library = asked_maps_driver(maps, kExecutable);
    return library == false ? asked_maps_driver(maps, kShared) : library;
}

/// Read in blocks: what a task maps is as long as the task likes.
bool maps_driver(pid_t pid, bool many_threads) {
    const std::string path = "/proc/" + std::to_string(pid) + "/maps";
    const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!fd)
        throw io_error("cannot open " + path, errno);
    if (const auto answer = asked_maps_driver(fd.get(), many_threads))
        return *answer;
    std::array<char, 16384> buffer;
    std::size_t kept = 0; // a mark may lie across two blocks
    for (;;) {
        const ssize_t got = ::read(fd.get(), buffer.data() + kept, buffer.size() - kept);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            throw io_error("cannot read " + path, errno);
        if (got == 0)
            return false;
        const std::string_view text(buffer.data(), kept + static_cast<std::size_t>(got));
        if (has_mark(text))
            return true;
        kept = std::min(text.size(), kLongestMark);
        std::copy(text.end() - static_cast<std::ptrdiff_t>(kept), text.end(), buffer.begin());
    }
}

/// The two descriptors that a restore thread's name gives; nullopt: another thread's name.
std::optional<std::array<std::uint64_t, 2>> channel_of(std::string_view name) {
    if (name.size() != kNameStart.size() + kDigits || !name.starts_with(kNameStart))
        return std::nullopt;
    std::uint64_t value = 0;
    const auto [at, error] =
        std::from_chars(name.data() + kNameStart.size(), name.data() + name.size(), value, 16);
    if (error != std::errc{} || at != name.data() + name.size())
        return std::nullopt;
    return std::array{value >> kNumberBits, value & ((1U << kNumberBits) - 1)};
}

/// Whether opening the task's descriptor `number` through /proc touches no file: it is a pipe, of a
/// kind that cannot be opened so, or not there.
bool opens_no_file(pid_t pid, std::uint64_t number) {
    const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(number);
    std::array<char, 64> target{};
    const ssize_t size = ::readlink(path.c_str(), target.data(), target.size());
    if (size < 0 && (errno == ENOENT || errno == ESRCH))
        return true;
    if (size < 0)
        throw io_error("cannot read the link " + path, errno);
    const std::string_view text(target.data(), static_cast<std::size_t>(size));
    return text.starts_with("pipe:[") || text.starts_with("socket:[") ||
           text.starts_with("anon_inode:");
}

} // namespace

bool may_use_cuda(pid_t pid) {
    const std::uint64_t count = count_threads(pid);
    const bool many = count > kManyThreads;
    if (count <= kFewThreads)
        return has_thread_named(pid, kNameStart) && maps_driver(pid, many);
    return maps_driver(pid, many) && has_thread_named(pid, kNameStart);
}

bool is_driver_thread(std::string_view name) {
    return channel_of(name).has_value();
}

void require_pipes_in_thread_names(pid_t pid) {
    for (const std::string& name : thread_names(pid)) {
        const auto channel = channel_of(name);
        if (!channel)
            continue;
        for (const std::uint64_t number : *channel)
            if (!opens_no_file(pid, number))
                throw Error(Errc::unsupported,
                            "pid " + std::to_string(pid) + " has a thread named " + name +
                                ", as the driver names its own, and descriptor " +
                                std::to_string(number) +
                                " of that name is not a pipe: the driver would open a file of the "
                                "process; nothing is asked of the driver");
    }
}

std::optional<std::array<std::uint64_t, 2>> restore_channel(pid_t pid, pid_t tid) {
    std::string name =
        read_file("/proc/" + std::to_string(pid) + "/task/" + std::to_string(tid) + "/comm");
    if (name.ends_with('\n'))
        name.pop_back();
    return channel_of(name);
}

void wait_for_helper_threads(pid_t pid, const std::vector<pid_t>& before) {
    for (int waited = 0; waited < kHelperThreadsMs; ++waited) {
        if (std::ranges::includes(before, threads(pid)))
            return;
        ::poll(nullptr, 0, 1);
    }
    throw Error(Errc::io, "pid " + std::to_string(pid) +
                              ": a thread that the driver made for the checkpoint lingers");
}

} // namespace gpustasis::proc
