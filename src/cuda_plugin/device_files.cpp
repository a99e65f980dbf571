// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/device_files.hpp"

#include "core/error.hpp"
#include "cuda_plugin/host.hpp"
#include "cuda_plugin/proc.hpp"
#include "cuda_plugin/traced_thread.hpp"
#include "tracee/injected_syscall.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <memory>
#include <sstream>
#include <utility>

namespace gpustasis {
namespace {

std::string of_task(pid_t pid, const std::string& name) {
    return "/proc/" + std::to_string(pid) + "/" + name;
}

bool closes_on_exec(pid_t pid, int fd) {
    std::istringstream info(proc::read_file(of_task(pid, "fdinfo/" + std::to_string(fd))));
    unsigned flags = 0;
    for (std::string word; info >> word;)
        if (word == "flags:" && info >> std::oct >> flags)
            return (flags & O_CLOEXEC) != 0;
    return true; // not known
}

} // namespace

bool is_driver_device(std::string_view path) {
    return path.starts_with(kDriverDevice);
}

std::string link_of(const std::string& link) {
    std::array<char, PATH_MAX> target;
    const ssize_t size = ::readlink(link.c_str(), target.data(), target.size());
    return size < 0 ? "" : std::string(target.data(), static_cast<std::size_t>(size));
}

std::vector<DeviceFile> device_files(pid_t pid) {
    const std::string directory = of_task(pid, "fd");
    const std::unique_ptr<DIR, decltype([](DIR* open) { ::closedir(open); })> open(
        ::opendir(directory.c_str()));
    if (!open)
        throw io_error("cannot open " + directory, errno);
    std::vector<DeviceFile> found;
    while (const dirent* entry = ::readdir(open.get())) {
        std::string path = link_of(directory + "/" + entry->d_name);
        if (is_driver_device(path))
            found.push_back({std::atoi(entry->d_name), std::move(path)});
    }
    return found;
}

std::optional<std::vector<int>> driver_descriptors(pid_t pid) noexcept {
    try {
        std::vector<int> found;
        for (const DeviceFile& file : device_files(pid))
            found.push_back(file.fd);
        std::ranges::sort(found);
        return found;
    } catch (const std::exception&) {
        return std::nullopt;
    }
}

void close_on_exec(TaskRecord& record, const std::optional<std::vector<int>>& before) noexcept {
    try {
        auto open = driver_descriptors(record.pid);
        if (!before || !open)
            throw Error(Errc::io, "its descriptors cannot be read");
        std::erase_if(*open, [&](int fd) {
            return std::ranges::binary_search(*before, fd) || closes_on_exec(record.pid, fd);
        });
        if (open->empty())
            return;
        InjectedSyscalls task({record.pid, record.restore_tid, record.thawed, record.signal_mask});
        if (!task.has_way_back()) // nothing that the task should die of if criu is killed
            throw Error(Errc::unsupported, "it has no code to make system calls with");
        for (const int fd : *open)
            if (task.call(SYS_fcntl, static_cast<std::uint64_t>(fd), F_SETFD, FD_CLOEXEC) != 0)
                host::warn("pid " + std::to_string(record.pid) + ": descriptor " +
                           std::to_string(fd) + " of the driver's stays open in programs");
        task.finish();
    } catch (const std::exception& e) {
        host::warn("pid " + std::to_string(record.pid) +
                   ": programs that it executes may inherit files of the driver: " + e.what());
    }
}

} // namespace gpustasis
