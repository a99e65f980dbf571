// SPDX-License-Identifier: Apache-2.0
#include "driver_emulator/driver/driver.hpp"

#include "driver_emulator/driver/driver_threads.hpp"
#include "driver_emulator/driver/futex.hpp"
#include "driver_emulator/driver/staging.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>

namespace gpustasis::emulator {
namespace {

bool is_quiet() {
    const char* quiet = std::getenv("GPUSTASIS_EMULATOR_QUIET");
    return quiet != nullptr && std::strcmp(quiet, "1") == 0;
}

void fill_devices(Driver& driver) {
    driver.objects.device_count = driver.info.gpu_count;
    for (unsigned i = 0; i < driver.info.gpu_count; ++i) {
        driver.objects.devices[i].ordinal = static_cast<int>(i);
        driver.objects.devices[i].gpu = driver.info.gpus[i].minor;
        driver.objects.devices[i].uuid = driver.info.gpus[i].uuid;
    }
}

/// What a fault makes of cuInit: success if there is none.
Result fail_init(const OperationPlan& plan) noexcept {
    switch (plan.action) {
    case FaultAction::none: return Result::success;
    case FaultAction::hang:
    case FaultAction::hang_half: hang();
    case FaultAction::die:
    case FaultAction::oom: fail_midway(plan); return Result::out_of_memory;
    default: return static_cast<Result>(plan.code);
    }
}

/// In the order of the real driver.
Result open_context_files(Driver& driver) noexcept {
    const bool cloexec = driver.info.cloexec != 0;
    Result result = Result::success;
    for (unsigned half = 0; half < 2 && result == Result::success; ++half) {
        result = open_event(driver.event_files, half, cloexec);
        if (result == Result::success) {
            result = open_context_devices(driver.devices, driver.info.device_path, cloexec);
        }
    }
    return result == Result::success ? open_event_pipe(driver.event_files, cloexec) : result;
}

Result initialise_locked(Driver& driver) noexcept {
    if (driver.pid.load() != 0) {
        return driver.is_usable() ? Result::success : Result::not_initialized;
    }
    if (!ask_info(driver.info)) {
        std::fprintf(
            stderr,
            "gpustasis driver emulator: no emulator of this version answers at %s: start one with "
            "`gpustasis emulator start`\n",
            daemon_path());
        return Result::no_device;
    }
    OperationPlan plan = ask_plan(Operation::init);
    while (plan.action == FaultAction::race) {
        sleep_ms(5);
        plan = ask_plan(Operation::init);
    }
    sleep_ms(driver.info.init_ms + plan.delay_ms);
    const Result fault = fail_init(plan);
    if (fault != Result::success) {
        return fault;
    }
    if (driver.info.gpu_count == 0) {
        return Result::no_device;
    }
    const bool cloexec = driver.info.cloexec != 0;
    Result result = open_channel(driver.channel, cloexec);
    if (result == Result::success) {
        result = open_init_devices(driver.devices, driver.info.device_path, cloexec);
    }
    if (result == Result::success) {
        result = open_listener(driver.channel, cloexec);
    }
    if (result == Result::success) {
        map_registers(driver.devices);
        open_named_devices(driver.devices, driver.info, device_directory(), 0);
        fill_devices(driver);
        result = start_restore_thread(driver);
    }
    if (result != Result::success) {
        close_devices(driver.devices);
        close_channel(driver.channel);
        return result;
    }
    reserve_addresses();
    if (!is_quiet()) {
        std::fprintf(stderr, "gpustasis driver emulator: %u emulated GPU%s, no real GPU is used\n",
                     driver.info.gpu_count, driver.info.gpu_count == 1 ? "" : "s");
    }
    driver.pid = getpid();
    return Result::success;
}

} // namespace

bool Driver::is_usable() const noexcept {
    return pid.load() == getpid();
}

Driver& driver() noexcept {
    alignas(Driver) static unsigned char memory[sizeof(Driver)];
    static Driver* const instance = new (memory) Driver;
    return *instance;
}

Result synchronise(Driver& driver) {
    std::vector<LanePoint> points;
    if (driver.lanes_pending.load() != 0) {
        const std::lock_guard lock(driver.mutex);
        for (const std::weak_ptr<Lane>& known : driver.lanes) {
            if (const std::shared_ptr<Lane> lane = known.lock()) {
                points.push_back({lane, lane->submitted()});
            }
        }
    }
    for (const LanePoint& point : points) {
        point.wait();
    }
    return driver.link.wait(driver.link.submitted());
}

Result initialise(Driver& driver) noexcept {
    const std::lock_guard lock(driver.init_mutex);
    return initialise_locked(driver);
}

void map_uvm(Driver& driver) noexcept {
    DaemonInfo no_gpus = driver.info;
    no_gpus.gpu_count = 0; // their files are open since cuInit
    open_named_devices(driver.devices, no_gpus, device_directory(),
                       driver.info.managed_memory != 0 ? 2 : 1);
}

Result start_first_context(Driver& driver, Device& device) {
    if (!driver.link.is_open()) {
        Result result = open_context_files(driver);
        map_uvm(driver);
        if (result == Result::success) {
            result = driver.link.open(driver.devices.device, driver.devices.mapping_kind);
        }
        if (result == Result::success) {
            result = map_system_memory();
        }
        if (result == Result::success) {
            result = start_context_threads(driver);
        }
        if (result != Result::success) {
            return result;
        }
        driver.had_context = true;
    }
    if (device.vram.is_attached()) {
        return Result::success;
    }
    const auto index = static_cast<unsigned>(device.ordinal);
    return device.vram.attach(driver.link, device.gpu, driver.info.gpus[index].memory);
}

} // namespace gpustasis::emulator
