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
#include "cuda_plugin/direct_work.hpp"
#include "cuda_plugin/driver.hpp"
#include "cuda_plugin/task_table.hpp"
#include "cuda_plugin/undo_images.hpp"
#include "cuda_plugin/worker_protocol.hpp"

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

namespace gpustasis {

/// Starts the process with the first call. Every call has a deadline: when it passes, or when the
/// watched thread dies or stops in a signal, Error: io is thrown and the worker killed, once no other
/// call is under way; the next call starts a new worker. Calls that are begun, and not waited for, are made side by side.
/// Call from one thread, while no other thread of this process runs.
class Worker final : public Driver {
public:
    /// All three must outlive the worker. `images`: for an undo; what their lineage has open when the
    /// process starts, and the key that they have then, is what the process can use.
    /// `store`: outlives it, too; what it is when the process starts is used there. None in a restore.
    Worker(const Config& config, SharedTaskTable& table, UndoImages& images,
           DirectStore* store = nullptr) noexcept
        : config_(config), table_(table), images_(images), store_(store) {}
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
    void restore_direct(const TaskRecord& record) override;

    /// DirectWork::prepare().
    void prepare_direct(const TaskRecord& record, const std::vector<Id>& gpus, std::size_t used);

    /// Send initialize() without waiting for it, and DirectWork::prepare_ahead() with `gpus`, if there are any; a later
    /// initialize() collects the answer. Other calls wait until it has come, at most driver_timeout_ms for each of both; a
    /// refusal of initialize() is told by that.
    void begin_initialize(const std::vector<Id>& gpus, std::size_t used);

    /// From now on give up a call when thread `tid`, a tracee, dies or stops; 0: watch none.
    void watch(pid_t tid) noexcept { watched_ = tid; }

    using Clock = std::chrono::steady_clock;

    /// A call that was begun.
    struct Call {
        std::uint64_t id = 0;
        std::uint64_t worker = 0; ///< number of the process that was asked
        const char* name = "";
        int pid = 0;
        pid_t watched = 0; ///< as of watch(), for this call
        std::uint32_t timeout_ms = 0;
        Clock::time_point deadline;
        const DirectRecord* direct =
            nullptr;         ///< of a task whose memory the worker may hold alone meanwhile
        bool undoes = false; ///< in it a task is brought back, while the others of its tree wait
    };
    /// What came of one. error: as the call would have thrown it; none: it is done.
    struct Answer {
        std::size_t index = 0; ///< among the calls that were waited for
        std::exception_ptr error;
        bool lost = false; ///< nobody knows: the process was killed for the sake of another call
    };

    /// Begin a call and do not wait for it. `tid`: as of watch(). Throw Error: io if the worker cannot be
    /// asked.
    Call begin_lock(int pid, std::uint32_t timeout_ms);
    Call begin_checkpoint(int pid, pid_t tid);
    Call begin_restore(int pid, const std::vector<GpuMove>& moves, pid_t tid);
    Call begin_unlock(int pid, pid_t tid);
    /// DirectWork::checkpoint() and restore(). `record`: of the table of the process.
    Call begin_checkpoint_direct(const TaskRecord& record, pid_t tid);
    Call begin_restore_direct(const TaskRecord& record, const std::vector<GpuMove>& moves,
                              pid_t tid);
    /// undo_restore() and undo_unlock() of undo.hpp, done by the process. `record`: of its table.
    Call begin_undo_restore(const TaskRecord& record, pid_t tid);
    Call begin_undo_unlock(const TaskRecord& record, pid_t tid);

    /// Wait for one of `calls`, which is not empty: the first that is answered, or is given up. Then the process is
    /// killed, as soon as no other call is under way: a driver is not broken off in one task because of another.
    /// All are lost when the process dies.
    Answer wait(std::span<const Call> calls);
    /// Have a process, should this one die: it undoes what was begun. Throws Error: io.
    void be_there() {
        if (!process_)
            start();
    }
    /// Whether there is none, as one that was killed because of a call.
    bool is_gone() const noexcept { return !process_; }
    /// Whether there is a process that answers.
    bool is_there() const noexcept { return process_ && !hangs_; }

    /// Tell the worker that all is well and wait for its end.
    void stop() noexcept;

    /// Leave a worker (a new one if need be) to itself, as if this process had died: it waits
    /// for what becomes of the tasks. Throws Error: io if there is none and none can be made.
    void leave();

private:
    struct Received {
        std::size_t index = 0;
        worker_protocol::Reply reply;
        std::exception_ptr error; ///< there is no reply
        bool lost = false;
    };

    void start();
    void kill() noexcept;
    bool is_dead(const DirectRecord* direct) const noexcept; ///< the task of that record
    bool may_be_killed() noexcept;
    bool kill_unless_needed() noexcept; ///< Whether it was killed
    bool wait_for_end(int timeout_ms) noexcept;
    void await_initialize();
    void require_listening() const;
    void send(worker_protocol::Request& request);
    Received receive(std::span<const Call> calls);
    Received give_up(std::size_t index, const Call& call, const std::string& why);
    Received lose(std::size_t index, const Call& call, const std::string& why, bool is_dead);
    bool take_reply(std::span<const Call> calls, Received& received);
    worker_protocol::Reply receive(std::uint64_t id, const char* call, int pid,
                                   std::uint32_t timeout_ms);
    Clock::time_point last_sign() const noexcept; ///< of life, by any call
    static Clock::time_point deadline_of(const Call& call, Clock::time_point last_sign) noexcept;
    void finish(const Call& call);
    Call call_of(std::uint64_t id, const char* name, int pid, std::uint32_t timeout_ms,
                 pid_t tid) const noexcept;
    Call begin(worker_protocol::Request& request, const char* name, std::uint32_t timeout_ms,
               pid_t tid);
    Call begin_of_record(worker_protocol::Request& request, const char* name,
                         const TaskRecord& record, pid_t tid, std::uint32_t timeout_ms);
    worker_protocol::Reply call(worker_protocol::Op op, const char* name, int pid,
                                std::uint32_t timeout_ms);
    worker_protocol::Reply call(worker_protocol::Request& request, const char* name,
                                std::uint32_t timeout_ms);

    const Config& config_;
    SharedTaskTable& table_;
    UndoImages& images_;
    DirectStore* store_;
    UniqueFd process_; ///< pidfd of the worker; none: there is no worker
    UniqueFd socket_;
    std::uint64_t last_id_ = 0;
    std::uint64_t number_ = 0; ///< of the process, of all that were started
    struct UnderWay {
        std::optional<worker_protocol::Reply> reply; ///< that came while another was waited for
        const DirectRecord* direct = nullptr; ///< as of its Call; none: no quick call waits for it
    };
    std::map<std::uint64_t, UnderWay> under_way_; ///< calls that were begun, by id
    std::set<std::uint64_t> given_up_;            ///< calls whose replies nobody waits for
    Clock::time_point
        patient_until_{};             ///< it may be handed memory by a call that was given up early
    std::uint64_t initialize_id_ = 0; ///< of a begin_initialize() without an answer; 0: none
    bool prepares_ahead_ = false;     ///< that one: it has twice the time
    std::optional<worker_protocol::Reply> initialized_; ///< that answer, until initialize()
    std::uint32_t most_ms_ = 0;  ///< the longest timeout of calls that were begun
    Clock::time_point answered_; ///< when the last reply came
    bool hangs_ = false;         ///< a quick call was given up: the driver is asked nothing more
    pid_t watched_ = 0;
};

} // namespace gpustasis
