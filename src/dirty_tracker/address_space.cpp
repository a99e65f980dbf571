// SPDX-License-Identifier: Apache-2.0
#include "dirty_tracker/address_space.hpp"

#include "core/error.hpp"
#include "tracee/proc.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include <cerrno>
#include <string>

namespace gpustasis {
namespace {

std::string name_of(pid_t pid) {
    return "process " + std::to_string(pid);
}

Error without_memory(pid_t pid) {
    return {Errc::unsupported, name_of(pid) + " shows no memory of its own: it is the kernel's, it "
                                              "is ending, or its main thread has ended"};
}

bool is_shared_memory(const Mapping& mapping) noexcept {
    return mapping.is_shared_anonymous() || mapping.name.starts_with("/memfd:") ||
           mapping.name.starts_with("/dev/shm/") || mapping.name.starts_with("/SYSV");
}

} // namespace

MappingUse use_of(const Mapping& mapping) noexcept {
    const std::string& name = mapping.name;
    const bool writable = (mapping.protection & PROT_WRITE) != 0;
    if (mapping.shared) {
        if (is_shared_memory(mapping))
            return MappingUse::shared_memory;
        if (name.starts_with("/dev/") || name.starts_with("anon_inode:"))
            return MappingUse::ignored;
        return writable ? MappingUse::untracked : MappingUse::ignored;
    }
    if (name.starts_with('[') && name != "[heap]" && name != "[stack]" &&
        !name.starts_with("[anon:"))
        return MappingUse::ignored; // [vdso] and its like
    // A device's pages are not the process's even if mapped privately.
    if (name.starts_with("/dev/") && !name.starts_with("/dev/zero") &&
        !name.starts_with("/dev/shm/") && !name.starts_with("/dev/hugepages/"))
        return MappingUse::ignored;
    // Code: watching it would slow it down, and there is nothing to see.
    if (mapping.inode != 0 && !writable && (mapping.protection & PROT_EXEC) != 0)
        return MappingUse::ignored;
    return MappingUse::private_memory;
}

AddressSpace::AddressSpace(pid_t pid) : pid_(pid) {
    if (pid <= 0)
        throw Error(Errc::bad_argument, std::to_string(pid) + " is no process id");
    pidfd_ = UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
    if (!pidfd_ && errno == ESRCH)
        throw Error(Errc::gone, "there is no " + name_of(pid));
    if (!pidfd_ && errno == EINVAL)
        throw Error(Errc::bad_argument, std::to_string(pid) + " is a thread of a process, not one");
    if (!pidfd_)
        throw io_error("pidfd_open of " + name_of(pid), errno);
    maps_ = open_file("maps");
    pagemap_ = open_file("pagemap");
    require_alive(); // so the files are those of the process that pidfd_ holds
    if (proc::read_rest(maps_.get(), "/proc/PID/maps of " + name_of(pid)).empty())
        throw without_memory(pid);
}

UniqueFd AddressSpace::open_file(const char* file) const {
    const std::string path = "/proc/" + std::to_string(pid_) + "/" + file;
    UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (fd)
        return fd;
    const int error = errno;
    require_alive();
    throw error == ESRCH ? without_memory(pid_) : io_error("cannot open " + path, error);
}

std::vector<Mapping> AddressSpace::mappings() const {
    const std::string what = "/proc/PID/maps of " + name_of(pid_);
    if (::lseek(maps_.get(), 0, SEEK_SET) != 0)
        throw io_error("cannot rewind " + what, errno);
    std::string text;
    try {
        text = proc::read_rest(maps_.get(), what);
    } catch (const Error&) {
        require_alive();
        throw;
    }
    std::vector<Mapping> mappings = parse_maps(text);
    if (mappings.empty()) {
        require_alive();
        throw Error(Errc::gone, name_of(pid_) + " has executed another program, or its main "
                                                "thread has ended: its memory is not to be seen");
    }
    return mappings;
}

void AddressSpace::require_alive() const {
    pollfd poll{.fd = pidfd_.get(), .events = POLLIN, .revents = 0};
    if (::poll(&poll, 1, 0) < 0 && errno != EINTR)
        throw io_error("poll of " + name_of(pid_), errno);
    if ((poll.revents & POLLIN) != 0)
        throw Error(Errc::gone, name_of(pid_) + " has ended");
}

} // namespace gpustasis
