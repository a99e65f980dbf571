// SPDX-License-Identifier: Apache-2.0
/// The driver, called from one disposable process.
///
/// libcuda can hang, crash, and leave threads and descriptors behind, so criu never loads it. The
/// worker is made by clone() without exec and lives beside criu. It is also what is left when
/// criu dies: it then does what TaskTable::on_orphaned says, because a job must not stay locked
/// for want of a criu (worker_process.hpp).
#pragma once

#include "core/unique_fd.hpp"
#include "cuda_plugin/config.hpp"
#include "cuda_plugin/driver.hpp"
#include "cuda_plugin/task_table.hpp"
#include "cuda_plugin/undo_images.hpp"
#include "cuda_plugin/worker_protocol.hpp"

#include <sys/types.h>

#include <chrono>
#include <optional>

namespace gpustasis {

/// Starts the process with the first call. Every call has a deadline: when it passes, or when the
/// watched thread dies or stops in a signal, the worker is killed and Error: io thrown; the next
/// call starts a new worker. Call from one thread, while no other thread of this process runs.
class Worker final : public Driver {
public:
    /// All three must outlive the worker. `images`: for an undo; what their lineage has open when the
    /// process starts, and the key that they have then, is what the process can use.
    Worker(const Config& config, SharedTaskTable& table, UndoImages& images) noexcept
        : config_(config), table_(table), images_(images) {}
    Worker(const Worker&) = delete;
    Worker& operator=(const Worker&) = delete;
    /// As if this process had died: whoever knows that all is well says so by stop().
    ~Worker() override = default;

    bool is_emulator() override;
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

    /// Send initialize() without waiting for it; a later initialize() collects the answer. Other
    /// calls wait until it has come, at most driver_timeout_ms; a refusal is told by initialize().
    void begin_initialize();

    /// From now on give up a call when thread `tid`, a tracee, dies or stops; 0: watch none.
    void watch(pid_t tid) noexcept { watched_ = tid; }

    /// Tell the worker that all is well and wait for its end.
    void stop() noexcept;

    /// Leave a worker (a new one if need be) to itself, as if this process had died: it waits
    /// for what becomes of the tasks. Throws Error: io if there is none and none can be made.
    void leave();

private:
    using Clock = std::chrono::steady_clock;

    void start();
    void kill() noexcept;
    bool wait_for_end(int timeout_ms) noexcept;
    void await_initialize();
    void send(worker_protocol::Request& request);
    worker_protocol::Reply receive(std::uint64_t id, const char* call, int pid,
                                   std::uint32_t timeout_ms);
    worker_protocol::Reply call(worker_protocol::Op op, const char* name, int pid,
                                std::uint32_t timeout_ms);
    worker_protocol::Reply call(worker_protocol::Request& request, const char* name,
                                std::uint32_t timeout_ms);

    const Config& config_;
    SharedTaskTable& table_;
    UndoImages& images_;
    UniqueFd process_; ///< pidfd of the worker; none: there is no worker
    UniqueFd socket_;
    std::uint64_t last_id_ = 0;
    std::uint64_t initialize_id_ = 0; ///< of a begin_initialize() without an answer; 0: none
    std::optional<worker_protocol::Reply> initialized_; ///< that answer, until initialize()
    pid_t watched_ = 0;
};

} // namespace gpustasis
