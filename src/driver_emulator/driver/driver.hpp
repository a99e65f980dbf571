// SPDX-License-Identifier: Apache-2.0
/// The driver's state in one process. It lives in the process's private memory and nowhere else, so
/// it goes where CRIU takes the process.
#pragma once

#include "driver_emulator/driver/artefacts.hpp"
#include "driver_emulator/driver/daemon_link.hpp"
#include "driver_emulator/driver/device_files.hpp"
#include "driver_emulator/driver/gate.hpp"
#include "driver_emulator/driver/objects.hpp"

#include <atomic>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

namespace gpustasis::emulator {

/// Of a Checkpoint or Restore whose caller moves the memory: see target_storage.hpp.
struct StorageState {
    bool contents_outside = false; ///< CHECKPOINTED, and the memory's contents are with a caller
    int table = -1;                ///< descriptor of the StorageTable while an operation is open
    std::uint64_t operation = 0;   ///< id of the request that began it; 0 = none is open
};

struct Driver {
    std::mutex init_mutex;
    std::atomic<int> pid{0}; ///< who called cuInit with success; a forked child is somebody else
    DaemonInfo info{};       ///< as of cuInit or the last restore
    Channel channel;
    EventFiles event_files;
    DeviceFiles devices;
    pid_t restore_thread = 0;

    Gate gate;
    std::mutex mutex; ///< guards what follows, against other calls; the restore thread has the gate
    DaemonLink link;
    Objects objects;
    std::vector<std::weak_ptr<Lane>> lanes;      ///< all of them
    std::atomic<std::uint32_t> lanes_pending{0}; ///< what they have yet to do

    std::atomic<ProcessState> state{ProcessState::running};
    bool had_context = false; ///< once: there is a worker, unless checkpointed
    bool poisoned = false;    ///< a restore failed half-way: no second try
    StorageState storage;
    bool gaps = false; ///< the addresses of GPU memory are unmapped, but for staging there

    [[nodiscard]] bool is_usable() const noexcept;
};

/// Never destroyed: the restore thread uses it until the process ends.
Driver& driver() noexcept;

/// What cuInit does, once.
Result initialise(Driver& driver) noexcept;

/// What a context maps of /dev/nvidia-uvm: once, and once more with managed memory.
void map_uvm(Driver& driver) noexcept;

/// Connects to the daemon and starts what comes with a first context. Caller holds driver.mutex.
Result start_first_context(Driver& driver, Device& device);

/// Waits until everything that was launched is done, copies of custom storage too. Throws
/// std::bad_alloc.
Result synchronise(Driver& driver);

/// Runs the body of an API call: after cuInit, in the process that called it, behind the gate.
template <typename Body>
int call(Body body) noexcept {
    Driver& state = driver();
    if (!state.is_usable()) {
        return static_cast<int>(Result::not_initialized);
    }
    const GatePass pass(state.gate);
    try {
        return static_cast<int>(body(state));
    } catch (const std::bad_alloc&) {
        return static_cast<int>(Result::out_of_memory);
    } catch (...) {
        return static_cast<int>(Result::unknown);
    }
}

/// The same for calls that need a current context, and fail once a kernel has failed.
template <typename Body>
int call_in_context(Body body) noexcept {
    return call([&body](Driver& state) {
        Context* context = current_context();
        if (context == nullptr) {
            return Result::invalid_context;
        }
        const Result sticky = state.link.sticky_error();
        return sticky != Result::success ? sticky : body(state, *context);
    });
}

} // namespace gpustasis::emulator
