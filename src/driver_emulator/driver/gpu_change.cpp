// SPDX-License-Identifier: Apache-2.0
#include "driver_emulator/driver/gpu_change.hpp"

#include "driver_emulator/driver/driver.hpp"

#include <algorithm>
#include <cstring>

namespace gpustasis::emulator {
namespace {

unsigned find_gpu(const DaemonInfo& info, const Uuid& uuid) noexcept {
    for (unsigned i = 0; i < info.gpu_count; ++i) {
        if (info.gpus[i].uuid == uuid) {
            return i;
        }
    }
    return kMaxGpus;
}

bool has_device(const Driver& driver, const Uuid& uuid) noexcept {
    for (unsigned i = 0; i < driver.objects.device_count; ++i) {
        if (driver.objects.devices[i].uuid == uuid) {
            return true;
        }
    }
    return false;
}

} // namespace

void settle_events(Driver& driver) noexcept {
    for (auto& [handle, event] : driver.objects.events) {
        if (event->recorded && event->done_ns == 0) {
            const std::uint64_t direct = event->point_ns == nullptr ? 0 : event->point_ns->load();
            event->done_ns =
                std::max({event->recorded_ns, driver.link.done_ns(event->sequence), direct});
        }
    }
}

void release_gpus(Driver& driver, int placeholder) noexcept {
    for (unsigned i = 0; i < driver.objects.device_count; ++i) {
        driver.objects.devices[i].vram.detach();
    }
    driver.link.close();
    release_devices(driver.devices, placeholder);
}

Result choose_gpus(const Driver& driver, const DaemonInfo& now, const GpuPair* pairs,
                   unsigned pair_count, unsigned (&gpus)[kMaxGpus]) noexcept {
    for (unsigned p = 0; p < pair_count; ++p) {
        if (!has_device(driver, pairs[p].old_uuid)) {
            return Result::invalid_value; // and no other
        }
    }
    for (unsigned i = 0; i < driver.objects.device_count; ++i) {
        Uuid wanted = driver.objects.devices[i].uuid;
        bool paired = false;
        for (unsigned p = 0; p < pair_count && !paired; ++p) {
            if (pairs[p].old_uuid == wanted) {
                wanted = pairs[p].new_uuid;
                paired = true;
            }
        }
        gpus[i] = find_gpu(now, wanted);
        if ((pair_count > 0 && !paired) || gpus[i] == kMaxGpus) {
            return Result::invalid_value; // pairs must name every GPU the process could see
        }
        for (unsigned other = 0; other < i; ++other) {
            if (gpus[other] == gpus[i]) {
                return Result::invalid_value;
            }
        }
        if (std::strcmp(now.gpus[gpus[i]].name, driver.info.gpus[i].name) != 0) {
            return Result::not_supported; // not the same kind of chip
        }
    }
    return Result::success;
}

Result reload_modules(Driver& driver) noexcept {
    for (auto& [handle, module] : driver.objects.modules) {
        const Result result =
            driver.link.load_module(module->id, module->image, module->image_size);
        if (result != Result::success) {
            return result;
        }
    }
    return Result::success;
}

Result take_gpus(Driver& driver, const DaemonInfo& now, const unsigned (&gpus)[kMaxGpus],
                 bool had_context) noexcept {
    const DaemonInfo& info = driver.info;
    Result result = reopen_devices(driver.devices, info.device_path, info.cloexec != 0);
    open_named_devices(driver.devices, now, device_directory(), 0);
    if (had_context) {
        map_uvm(driver);
    }
    if (result != Result::success || !had_context) {
        return result;
    }
    result = driver.link.open(driver.devices.device, driver.devices.mapping_kind);
    for (unsigned i = 0; i < driver.objects.device_count && result == Result::success; ++i) {
        Vram& vram = driver.objects.devices[i].vram;
        if (!vram.owns_addresses()) {
            continue;
        }
        result = vram.reattach(driver.link, now.gpus[gpus[i]].minor);
        for (auto& [address, segment] : vram.segments()) {
            if (result == Result::success) {
                result = vram.map_again(driver.link, address, segment.size);
            }
        }
    }
    return result;
}

void adopt_gpus(Driver& driver, const DaemonInfo& now, const unsigned (&gpus)[kMaxGpus]) noexcept {
    for (unsigned i = 0; i < driver.objects.device_count; ++i) {
        driver.objects.devices[i].gpu = now.gpus[gpus[i]].minor;
        driver.objects.devices[i].uuid = now.gpus[gpus[i]].uuid;
        driver.info.gpus[i] = now.gpus[gpus[i]];
    }
}

} // namespace gpustasis::emulator
