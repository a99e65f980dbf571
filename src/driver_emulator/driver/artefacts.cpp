// SPDX-License-Identifier: Apache-2.0
#include "driver_emulator/driver/artefacts.hpp"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <initializer_list>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

namespace gpustasis::emulator {
namespace {

constexpr int kListenBacklog = 128;

int bind_listener(bool cloexec) noexcept {
    struct stat pid_namespace {};
    if (stat("/proc/self/ns/pid", &pid_namespace) != 0) {
        return -1;
    }
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    // Abstract, and its last NUL is part of the name, as found in CRIU images of the real driver.
    const int length =
        std::snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "cuda-uvmfd-%lu-%d",
                      static_cast<unsigned long>(pid_namespace.st_ino), getpid());
    const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path)) +
                      static_cast<socklen_t>(length) + 2;
    const int fd = socket(AF_UNIX, SOCK_SEQPACKET | (cloexec ? SOCK_CLOEXEC : 0), 0);
    if (fd < 0) {
        return -1;
    }
    if (bind(fd, reinterpret_cast<const sockaddr*>(&address), size) != 0 ||
        listen(fd, kListenBacklog) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

void close_all(std::initializer_list<int*> fds) noexcept {
    for (int* fd : fds) {
        if (*fd >= 0) {
            close(*fd);
            *fd = -1;
        }
    }
}

} // namespace

Result open_channel(Channel& channel, bool cloexec) noexcept {
    const int pipe_flags = cloexec ? O_CLOEXEC : 0;
    channel.event = eventfd(0, EFD_NONBLOCK | (cloexec ? EFD_CLOEXEC : 0));
    const bool opened = channel.event >= 0 && pipe2(channel.request, pipe_flags) == 0 &&
                        pipe2(channel.reply, pipe_flags) == 0;
    return opened ? Result::success : Result::operating_system;
}

Result open_listener(Channel& channel, bool cloexec) noexcept {
    channel.listener = bind_listener(cloexec);
    return channel.listener >= 0 ? Result::success : Result::operating_system;
}

Result open_later_event(Channel& channel, bool cloexec) noexcept {
    if (channel.later_event < 0) {
        channel.later_event = eventfd(0, cloexec ? EFD_CLOEXEC : 0);
    }
    return channel.later_event >= 0 ? Result::success : Result::operating_system;
}

void close_channel(Channel& channel) noexcept {
    close_all({&channel.event, &channel.later_event, &channel.request[0], &channel.request[1],
               &channel.reply[0], &channel.reply[1], &channel.listener});
}

Result open_event(EventFiles& files, unsigned index, bool cloexec) noexcept {
    if (files.events[index] < 0) {
        files.events[index] = eventfd(0, EFD_NONBLOCK | (cloexec ? EFD_CLOEXEC : 0));
    }
    return files.events[index] >= 0 ? Result::success : Result::operating_system;
}

Result open_event_pipe(EventFiles& files, bool cloexec) noexcept {
    const bool opened =
        files.pipe[0] >= 0 || pipe2(files.pipe, O_NONBLOCK | (cloexec ? O_CLOEXEC : 0)) == 0;
    return opened ? Result::success : Result::operating_system;
}

void reserve_addresses() noexcept {
    struct Reservation {
        std::uintptr_t address; ///< 0 = anywhere
        std::size_t size;
    };
    constexpr Reservation kReservations[] = {
        {0x200000000, 0x200200000}, {0, 536866816}, {0, 16912384}, {0, 16912384}};
    for (const Reservation& wanted : kReservations) {
        const int fixed = wanted.address != 0 ? MAP_FIXED_NOREPLACE : 0;
        if (mmap(reinterpret_cast<void*>(wanted.address), wanted.size, PROT_NONE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | fixed, -1, 0) == MAP_FAILED) {
            continue; // taken, and left alone: the real driver does without as well
        }
    }
}

Result map_system_memory() noexcept {
    constexpr std::size_t kSize = std::size_t{2} << 20;
    void* memory = mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        return Result::out_of_memory;
    }
    std::memcpy(memory, "gpustasis driver emulator", 25); // a page of it is in use
    return Result::success;
}

} // namespace gpustasis::emulator
