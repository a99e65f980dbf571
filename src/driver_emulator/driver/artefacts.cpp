// SPDX-License-Identifier: Apache-2.0
#include "driver_emulator/driver/artefacts.hpp"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <initializer_list>
#include <linux/io_uring.h>
#include <linux/perf_event.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

namespace gpustasis::emulator {
namespace {

constexpr int kListenBacklog = 128;
constexpr unsigned kRingEntries = 1024; // 64 bytes each: the 64 KiB of the real doorbell mapping
constexpr std::size_t kRingBytes = std::size_t{kRingEntries} * 64;

// Devices that are safe to open, do nothing by being open, and that CRIU has no support for.
constexpr const char* kDevices[] = {"/dev/fuse", "/dev/loop-control", "/dev/kvm", "/dev/vhost-net"};

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

int open_ring() noexcept {
    io_uring_params params{};
    return static_cast<int>(syscall(SYS_io_uring_setup, kRingEntries, &params));
}

/// The stand-in for one device file. Remembers in `files.device` what it was.
int open_device(DeviceFiles& files, const char* path, bool cloexec) noexcept {
    const int flags = O_RDWR | (cloexec ? O_CLOEXEC : 0);
    const auto remember = [&files](const char* what) {
        std::memset(files.device, 0, sizeof files.device);
        std::strncpy(files.device, what, sizeof files.device - 1);
    };
    if (*path != '\0') {
        remember(path);
        return open(path, flags);
    }
    for (const char* device : kDevices) {
        const int fd = open(device, flags);
        if (fd >= 0) {
            remember(device);
            return fd;
        }
    }
    remember("io_uring");
    const int ring = open_ring();
    if (ring >= 0) {
        return ring;
    }
    remember("AF_ALG");
    return socket(AF_ALG, SOCK_SEQPACKET | (cloexec ? SOCK_CLOEXEC : 0), 0);
}

void add(DeviceFiles& files, int fd) noexcept {
    files.fds[files.count++] = fd;
}

bool map_ring(DeviceFiles& files) noexcept {
    const int fd = open_ring();
    if (fd < 0) {
        return false;
    }
    void* mapping =
        mmap(nullptr, kRingBytes, PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(IORING_OFF_SQES));
    if (mapping == MAP_FAILED) {
        close(fd);
        return false;
    }
    add(files, fd);
    files.mapping = mapping;
    files.mapping_size = kRingBytes;
    std::strcpy(files.mapping_kind, "io_uring");
    return true;
}

/// The device that the setting names, if it can be mapped. A child inherits that, as of a real one.
bool map_device(DeviceFiles& files) noexcept {
    const auto size = static_cast<std::size_t>(getpagesize());
    void* mapping = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, files.fds[0], 0);
    if (mapping == MAP_FAILED) {
        return false;
    }
    files.mapping = mapping;
    files.mapping_size = size;
    std::strcpy(files.mapping_kind, "device_path");
    return true;
}

bool map_perf_event(DeviceFiles& files) noexcept {
    perf_event_attr attributes{};
    attributes.type = PERF_TYPE_SOFTWARE;
    attributes.size = sizeof attributes;
    attributes.config = PERF_COUNT_SW_DUMMY;
    attributes.exclude_kernel = 1;
    attributes.exclude_hv = 1;
    const int fd = static_cast<int>(
        syscall(SYS_perf_event_open, &attributes, 0, -1, -1, PERF_FLAG_FD_CLOEXEC));
    if (fd < 0) {
        return false;
    }
    const auto size = static_cast<std::size_t>(getpagesize());
    void* mapping = mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
    if (mapping == MAP_FAILED) {
        close(fd);
        return false;
    }
    add(files, fd);
    files.mapping = mapping;
    files.mapping_size = size;
    std::strcpy(files.mapping_kind, "perf_event");
    return true;
}

} // namespace

Result open_channel(Channel& channel, bool cloexec) noexcept {
    const int event_flags = cloexec ? EFD_CLOEXEC : 0;
    const int pipe_flags = cloexec ? O_CLOEXEC : 0;
    channel.events[0] = eventfd(0, event_flags);
    channel.events[1] = eventfd(0, event_flags | EFD_NONBLOCK);
    if (channel.events[0] < 0 || channel.events[1] < 0 || pipe2(channel.request, pipe_flags) != 0 ||
        pipe2(channel.reply, pipe_flags) != 0) {
        close_channel(channel);
        return Result::operating_system;
    }
    channel.listener = bind_listener(cloexec);
    if (channel.listener < 0) {
        close_channel(channel);
        return Result::operating_system;
    }
    return Result::success;
}

void close_channel(Channel& channel) noexcept {
    close_all({&channel.events[0], &channel.events[1], &channel.request[0], &channel.request[1],
               &channel.reply[0], &channel.reply[1], &channel.listener});
}

Result open_devices(DeviceFiles& files, unsigned count, const char* path, bool cloexec) noexcept {
    for (unsigned i = 0; i < count && files.count < DeviceFiles::kMax - 1; ++i) {
        const int fd = open_device(files, path, cloexec);
        if (fd < 0) {
            return Result::operating_system;
        }
        add(files, fd);
    }
    const bool is_named = *path != '\0' && files.count > 0;
    if (files.mapping == nullptr && !(is_named && map_device(files)) && !map_ring(files) &&
        !map_perf_event(files)) {
        std::strcpy(files.mapping_kind, "none");
    }
    return Result::success;
}

void open_named_devices(DeviceFiles& files, const DaemonInfo& info, const char* directory,
                        unsigned uvm_count) noexcept {
    char path[256];
    const int flags = O_RDONLY | (info.cloexec != 0 ? O_CLOEXEC : 0);
    for (unsigned i = 0; i < info.gpu_count && files.count < DeviceFiles::kMax; ++i) {
        std::snprintf(path, sizeof path, "%s/nvidia%u", directory, info.gpus[i].minor);
        if (const int fd = open(path, flags); fd >= 0) {
            add(files, fd);
        }
    }
    std::snprintf(path, sizeof path, "%s/nvidia-uvm", directory);
    const int fd = uvm_count > 0 ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) {
        return;
    }
    const auto page = static_cast<std::size_t>(getpagesize());
    for (unsigned i = 0; i < uvm_count && i < DeviceFiles::kMaxUvm; ++i) {
        if (files.uvm[i] != nullptr) {
            continue;
        }
        // A page apart, or the kernel makes one mapping of two.
        void* room = mmap(nullptr, 3 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (room == MAP_FAILED) {
            break;
        }
        char* middle = static_cast<char*>(room) + page;
        munmap(room, page);
        munmap(middle + page, page);
        void* mapping = mmap(middle, page, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0);
        files.uvm[i] = mapping == MAP_FAILED ? nullptr : mapping;
    }
    close(fd);
}

void close_devices(DeviceFiles& files) noexcept {
    for (void*& mapping : files.uvm) {
        if (mapping != nullptr) {
            munmap(mapping, static_cast<std::size_t>(getpagesize()));
            mapping = nullptr;
        }
    }
    if (files.mapping != nullptr) {
        munmap(files.mapping, files.mapping_size);
        files.mapping = nullptr;
    }
    while (files.count > 0) {
        close(files.fds[--files.count]);
    }
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
