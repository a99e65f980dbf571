// SPDX-License-Identifier: Apache-2.0
#include "core/process_memory.hpp"

#include "core/error.hpp"
#include "core/file.hpp"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <string>

namespace gpustasis {
namespace {

Error failed(const char* verb, pid_t pid, std::uint64_t address, int error_number) {
    char what[96];
    std::snprintf(what, sizeof what, "cannot %s memory of pid %d at 0x%llx", verb, pid,
                  static_cast<unsigned long long>(address));
    return io_error(what, error_number);
}

iovec remote_run(std::uint64_t address, std::uint64_t length) noexcept {
    return {reinterpret_cast<void*>(address), static_cast<std::size_t>(length)};
}

// The kernel writes through here even where the mapping's protection forbids it, as a debugger
// may; process_vm_writev does not.
UniqueFd open_mem(pid_t pid, int flags) {
    return UniqueFd(::open(("/proc/" + std::to_string(pid) + "/mem").c_str(), flags | O_CLOEXEC));
}

} // namespace

void ProcessMemory::read(std::uint64_t address, MutBytes out) {
    UniqueFd mem;
    while (!out.empty()) {
        ssize_t got;
        if (mem.get() < 0) {
            const iovec local{out.data(), out.size()};
            const iovec remote = remote_run(address, out.size());
            got = ::process_vm_readv(pid_, &local, 1, &remote, 1, 0);
            if (got < 0 && errno == EFAULT) {
                mem = open_mem(pid_, O_RDONLY);
                if (mem.get() < 0)
                    throw failed("read", pid_, address, errno);
                continue;
            }
        } else {
            got = ::pread(mem.get(), out.data(), out.size(), static_cast<off_t>(address));
        }
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            throw failed("read", pid_, address, got < 0 ? errno : ESRCH);
        address += static_cast<std::uint64_t>(got);
        out = out.subspan(static_cast<std::size_t>(got));
    }
}

void ProcessMemory::write(std::uint64_t address, Bytes bytes) {
    UniqueFd opened;
    int mem = mem_;
    while (!bytes.empty()) {
        ssize_t put;
        if (mem < 0) {
            const iovec local{const_cast<std::byte*>(bytes.data()), bytes.size()};
            const iovec remote = remote_run(address, bytes.size());
            put = ::process_vm_writev(pid_, &local, 1, &remote, 1, 0);
            if (put < 0 && errno == EFAULT) {
                opened = open_mem(pid_, O_WRONLY);
                mem = opened.get();
                if (mem < 0)
                    throw failed("write", pid_, address, errno);
                continue;
            }
        } else {
            put = ::pwrite(mem, bytes.data(), bytes.size(), static_cast<off_t>(address));
        }
        if (put < 0 && errno == EINTR)
            continue;
        if (put <= 0)
            throw failed("write", pid_, address, put < 0 ? errno : ESRCH);
        address += static_cast<std::uint64_t>(put);
        bytes = bytes.subspan(static_cast<std::size_t>(put));
    }
}

void ProcessMemory::write_zeros(std::uint64_t address, std::uint64_t length) {
    static constexpr std::array<std::byte, 64U << 10> kZeros{};
    while (length != 0) {
        const std::size_t size = std::min<std::uint64_t>(length, kZeros.size());
        write(address, Bytes(kZeros).first(size));
        address += size;
        length -= size;
    }
}

} // namespace gpustasis
