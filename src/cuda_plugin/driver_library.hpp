// SPDX-License-Identifier: Apache-2.0
/// The driver's libraries, loaded into this process: libcuda.so.1 and, if there is one,
/// libnvidia-ml.so.1. The driver keeps threads that outlive every call, so a process that has
/// made one of these must end by _exit. Calls for different processes may be made side by side; before
/// the first of them one of any kind must have been made.
#pragma once

#include "cuda_plugin/driver.hpp"
#include "device_memory/driver_abi.hpp"

#include <mutex>
#include <string>

namespace gpustasis {

// member, symbol in libcuda.so.1 (driver R570 or later), parameters; all return CUresult
#define GPUSTASIS_DRIVER_SYMBOLS(X)                                                                \
    X(driver_get_version, cuDriverGetVersion, (int* version))                                      \
    X(init, cuInit, (unsigned flags))                                                              \
    X(get_restore_thread, cuCheckpointProcessGetRestoreThreadId, (int pid, int* tid))              \
    X(get_state, cuCheckpointProcessGetState, (int pid, int* state))                               \
    X(lock, cuCheckpointProcessLock, (int pid, driver::LockArgs* args))                            \
    X(checkpoint, cuCheckpointProcessCheckpoint, (int pid, void* args))                            \
    X(restore, cuCheckpointProcessRestore, (int pid, driver::RestoreArgs* args))                   \
    X(unlock, cuCheckpointProcessUnlock, (int pid, void* args))

class DirectWork;

class DriverLibrary final : public Driver {
public:
    /// Throws Error: unsupported if `cuda` or one of its symbols is missing; what() names it.
    /// A missing `nvml` is an answer, not an error: gpus() is nullopt then.
    DriverLibrary(const std::string& cuda, const std::string& nvml);

    bool is_emulator() override { return is_emulator_; }
    std::uint32_t api_version() override;
    std::string version_text() override;
    std::optional<std::vector<GpuStatus>> gpus() override;
    ProcessGpus gpus_of(int pid) override;
    void initialize() override;
    std::optional<int> restore_thread(int pid) override;
    ProcessState state(int pid) override;
    void lock(int pid, std::uint32_t timeout_ms) override;
    void checkpoint(int pid) override;
    void restore(int pid, const std::vector<GpuMove>& moves) override;
    void unlock(int pid) override;
    void restore_direct(const TaskRecord& record) override;

    /// Where restore_direct() has it done; outlives this.
    void set_direct(DirectWork& work) noexcept { direct_ = &work; }
    /// As dlopen() gave it.
    void* library() const noexcept { return library_; }

private:
    ProcessGpus look_at_gpus(int pid) const;

    struct Api {
// NOLINTNEXTLINE(bugprone-macro-parentheses): a declarator and its parameters
#define GPUSTASIS_MEMBER(member, symbol, params) driver::Result(*member) params = nullptr;
        GPUSTASIS_DRIVER_SYMBOLS(GPUSTASIS_MEMBER)
#undef GPUSTASIS_MEMBER
    };

    void* library_;
    Api api_;
    DirectWork* direct_ = nullptr;
    std::string nvml_;
    bool is_emulator_ = false;
    std::mutex initialize_;
    bool initialized_ = false;
};

} // namespace gpustasis
