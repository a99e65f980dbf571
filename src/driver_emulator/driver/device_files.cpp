// SPDX-License-Identifier: Apache-2.0
#include "driver_emulator/driver/device_files.hpp"

#include "driver_emulator/driver/passing_fd.hpp"

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <linux/perf_event.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace gpustasis::emulator {
namespace {

constexpr unsigned kRingEntries = 1024; // 64 bytes each: the 64 KiB of the real doorbell mapping
constexpr std::size_t kRingBytes = std::size_t{kRingEntries} * 64;
constexpr unsigned kUvmFiles = 2;
constexpr unsigned kInitGpuFiles = 4;
constexpr unsigned kHalfOfContext = 8;

// Devices that are safe to open, do nothing by being open, and that CRIU has no support for.
constexpr const char* kDevices[] = {"/dev/fuse", "/dev/loop-control", "/dev/kvm", "/dev/vhost-net"};

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

bool add(DeviceFiles& files, int fd) noexcept {
    if (fd < 0 || files.count == DeviceFiles::kMax) {
        return false; // the limit is above what a process of kMaxGpus GPUs has
    }
    files.fds[files.count++] = fd;
    return true;
}

bool keep(DeviceFiles& files, int fd, bool uvm) noexcept {
    if (fd < 0 || files.kept_count == DeviceFiles::kMaxKept) {
        return false;
    }
    files.kept[files.kept_count++] = {fd, uvm};
    return true;
}

/// Maps `size` bytes of `fd` where they were mapped before, if they have room there.
bool map_window(DeviceWindow& window, std::size_t size, int protection, int fd,
                off_t offset) noexcept {
    const bool has_room = window.address != nullptr && size <= window.size;
    void* mapping = mmap(has_room ? window.address : nullptr, size, protection,
                         MAP_SHARED | (has_room ? MAP_FIXED : 0), fd, offset);
    if (mapping == MAP_FAILED) {
        return false;
    }
    if (!has_room) {
        if (window.address != nullptr) {
            munmap(window.address, window.size);
        }
        window.address = mapping;
        window.size = size;
    }
    window.is_mapped = true;
    return true;
}

void unmap_window(DeviceWindow& window) noexcept {
    if (window.address != nullptr) {
        munmap(window.address, window.size);
        window = {};
    }
}

void reserve_window(DeviceWindow& window) noexcept {
    if (window.is_mapped &&
        mmap(window.address, window.size, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED) {
        unmap_window(window); // the device is to go, whatever becomes of its addresses
    }
    window.is_mapped = false;
}

/// The kernel maps a ring nowhere but where it likes, which is the highest room there is.
void* map_ring_anywhere(int fd) noexcept {
    return mmap(nullptr, kRingBytes, PROT_WRITE, MAP_SHARED, fd,
                static_cast<off_t>(IORING_OFF_SQES));
}

std::uintptr_t number_of(const void* address) noexcept {
    return reinterpret_cast<std::uintptr_t>(address);
}

struct Filler {
    void* address = MAP_FAILED;
    std::size_t size = 0;
};

/// Fills the room just below `top` with as much as goes in, but nothing below `end`. MAP_FAILED: no
/// room.
Filler fill_below(std::uintptr_t top, std::uintptr_t end) noexcept {
    constexpr std::size_t kLargest = std::size_t{1} << 36;
    for (std::size_t size = kLargest; size >= kRingBytes; size /= 2) {
        if (top - end < size) {
            continue;
        }
        void* wanted = reinterpret_cast<void*>(top - size);
        void* got = mmap(wanted, size, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
        if (got == wanted) {
            return {got, size};
        }
    }
    return {};
}

/// Maps a ring where one was: all room above is filled for the moment. Where that does not do, the
/// ring is mapped elsewhere.
void* map_ring_again(const DeviceWindow& window, int fd) noexcept {
    constexpr unsigned kMostFillers = 256;
    Filler fillers[kMostFillers];
    unsigned filled = 0;
    munmap(window.address, window.size);
    void* mapping = map_ring_anywhere(fd);
    while (mapping != MAP_FAILED && number_of(mapping) > number_of(window.address) &&
           filled < kMostFillers) {
        munmap(mapping, kRingBytes);
        fillers[filled] =
            fill_below(number_of(mapping) + kRingBytes, number_of(window.address) + window.size);
        const bool is_filled = fillers[filled].address != MAP_FAILED;
        filled += is_filled ? 1 : 0;
        mapping = map_ring_anywhere(fd);
        if (!is_filled) {
            break;
        }
    }
    while (filled > 0) {
        --filled;
        munmap(fillers[filled].address, fillers[filled].size);
    }
    return mapping;
}

bool map_ring(DeviceFiles& files) noexcept {
    DeviceWindow& window = files.registers;
    const int fd = open_ring();
    if (fd < 0) {
        return false;
    }
    void* mapping = window.address == nullptr ? map_ring_anywhere(fd) : map_ring_again(window, fd);
    if (mapping == MAP_FAILED) {
        window = {};
        close(fd);
        return false;
    }
    window = {mapping, kRingBytes, true};
    static_cast<void>(add(files, fd));
    std::strcpy(files.mapping_kind, "io_uring");
    return true;
}

/// The device itself, if it can be mapped, as of those that are chosen by themselves none can. A child
/// inherits that, as of a real one.
bool map_device(DeviceFiles& files) noexcept {
    const auto size = static_cast<std::size_t>(getpagesize());
    if (files.device[0] != '/' || files.count == 0 ||
        !map_window(files.registers, size, PROT_READ | PROT_WRITE, files.fds[0], 0)) {
        return false;
    }
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
    const auto size = static_cast<std::size_t>(getpagesize());
    if (!map_window(files.registers, size, PROT_READ, fd, 0)) {
        close(fd);
        return false;
    }
    static_cast<void>(add(files, fd));
    std::strcpy(files.mapping_kind, "perf_event");
    return true;
}

/// Room for a page with nothing mapped next to it, or the kernel makes one mapping of two.
void* lone_page(std::size_t page) noexcept {
    void* room = mmap(nullptr, 3 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (room == MAP_FAILED) {
        return nullptr;
    }
    char* middle = static_cast<char*>(room) + page;
    munmap(room, page);
    munmap(middle + page, page);
    return middle;
}

} // namespace

Result open_init_devices(DeviceFiles& files, const char* path, bool cloexec) noexcept {
    bool opened = add(files, open_device(files, path, cloexec));
    for (unsigned i = 0; opened && i < kUvmFiles; ++i) {
        opened = keep(files, open_device(files, path, cloexec), true);
    }
    for (unsigned i = 0; opened && i < kInitGpuFiles; ++i) {
        opened = add(files, open_device(files, path, cloexec));
    }
    return opened ? Result::success : Result::operating_system;
}

Result open_context_devices(DeviceFiles& files, const char* path, bool cloexec) noexcept {
    for (unsigned i = 0; i < kHalfOfContext; i += 2) {
        if (!add(files, open_device(files, path, cloexec)) ||
            !keep(files, open_device(files, path, cloexec), false)) {
            return Result::operating_system;
        }
    }
    return Result::success;
}

void map_registers(DeviceFiles& files) noexcept {
    if (!files.registers.is_mapped && !map_device(files) && !map_ring(files) &&
        !map_perf_event(files)) {
        std::strcpy(files.mapping_kind, "none");
    }
}

void open_named_devices(DeviceFiles& files, const DaemonInfo& info, const char* directory,
                        unsigned uvm_count) noexcept {
    char path[256];
    const int flags = O_RDONLY | (info.cloexec != 0 ? O_CLOEXEC : 0);
    for (unsigned i = 0; i < info.gpu_count && files.count < DeviceFiles::kMax; ++i) {
        std::snprintf(path, sizeof path, "%s/nvidia%u", directory, info.gpus[i].minor);
        add(files, open(path, flags));
    }
    std::snprintf(path, sizeof path, "%s/nvidia-uvm", directory);
    const PassingFd file(uvm_count > 0 ? open(path, O_RDONLY | O_CLOEXEC) : -1);
    if (file.get() < 0) {
        return;
    }
    const auto page = static_cast<std::size_t>(getpagesize());
    for (unsigned i = 0; i < uvm_count && i < DeviceFiles::kMaxUvm; ++i) {
        DeviceWindow& window = files.uvm[i];
        if (window.is_mapped) {
            continue;
        }
        if (window.address == nullptr) {
            window = {lone_page(page), page, false};
        }
        if (window.address == nullptr || !map_window(window, page, PROT_READ, file.get(), 0)) {
            break;
        }
    }
}

void release_devices(DeviceFiles& files, int placeholder) noexcept {
    for (DeviceWindow& window : files.uvm) {
        reserve_window(window);
    }
    reserve_window(files.registers);
    for (unsigned i = 0; i < files.kept_count; ++i) {
        if (placeholder >= 0) {
            dup2(placeholder, files.kept[i].fd);
        } else {
            close(files.kept[i].fd);
        }
    }
    files.kept_count = placeholder >= 0 ? files.kept_count : 0;
    while (files.count > 0) {
        close(files.fds[--files.count]);
    }
}

Result reopen_devices(DeviceFiles& files, const char* path, bool cloexec) noexcept {
    // Two numbers are free again at the end, below those that are in use: as the real driver has it.
    const PassingFd uvm(open_device(files, path, cloexec));
    bool opened = uvm.get() >= 0;
    for (unsigned i = 0; opened && i < files.kept_count; ++i) {
        if (files.kept[i].uvm) {
            opened = dup3(uvm.get(), files.kept[i].fd, cloexec ? O_CLOEXEC : 0) >= 0;
        }
    }
    opened = opened && add(files, open_device(files, path, cloexec)) &&
             add(files, open_device(files, path, cloexec));
    const PassingFd probe(opened ? open_device(files, path, cloexec) : -1);
    opened = opened && probe.get() >= 0 && add(files, open_device(files, path, cloexec));
    for (unsigned i = 0; opened && i < files.kept_count; ++i) {
        if (files.kept[i].uvm) {
            continue;
        }
        opened = add(files, open_device(files, path, cloexec));
        const PassingFd fresh(opened ? open_device(files, path, cloexec) : -1);
        opened = opened && fresh.get() >= 0 && dup2(fresh.get(), files.kept[i].fd) >= 0;
    }
    map_registers(files);
    return opened ? Result::success : Result::operating_system;
}

void close_devices(DeviceFiles& files) noexcept {
    release_devices(files, -1);
    for (DeviceWindow& window : files.uvm) {
        unmap_window(window);
    }
    unmap_window(files.registers);
}

} // namespace gpustasis::emulator
