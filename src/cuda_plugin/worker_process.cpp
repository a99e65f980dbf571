// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/worker_process.hpp"

#include "core/error.hpp"
#include "cuda_plugin/driver_library.hpp"
#include "cuda_plugin/guardian.hpp"
#include "cuda_plugin/orphan.hpp"
#include "cuda_plugin/undo.hpp"
#include "cuda_plugin/worker_protocol.hpp"
#include "dropped_memory/userfaultfd_setting.hpp"
#include "tracee/proc.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <set>
#include <thread>
#include <utility>
#include <vector>

namespace gpustasis {
namespace {

using worker_protocol::Op;
using worker_protocol::Reply;
using worker_protocol::Request;
using worker_protocol::Status;

// How often an orphaned worker looks whether criu's kernel side has let go of the tasks.
constexpr int kOrphanPollMs = 10;
// The same once it is known that an image cannot be read: that may last.
constexpr int kDamagedPollMs = 200;
// After this time the log says what is waited for.
constexpr std::chrono::seconds kLongDrop{10};

using Clock = std::chrono::steady_clock;

void copy_text(char* out, std::size_t size, const std::string& text) noexcept {
    const std::size_t count = std::min(text.size(), size - 1);
    std::memcpy(out, text.data(), count);
    out[count] = '\0';
}

void answer_gpus(Driver& driver, Reply& reply) {
    const auto gpus = driver.gpus();
    if (!gpus) {
        reply.status = Status::nothing;
        return;
    }
    if (gpus->size() > worker_protocol::kMaxGpus)
        throw Error(Errc::unsupported, std::to_string(gpus->size()) + " GPUs; at most " +
                                           std::to_string(worker_protocol::kMaxGpus) +
                                           " are supported");
    for (const GpuStatus& gpu : *gpus) {
        worker_protocol::Gpu& wire = reply.gpus[reply.gpu_count++];
        wire.uuid = gpu.info.uuid;
        copy_text(wire.name, sizeof(wire.name), gpu.info.name);
        wire.memory_size = gpu.info.memory_size;
        wire.free_size = gpu.free_size.value_or(TaskGpu::kUnknownSize);
    }
}

void answer_gpus_of(Driver& driver, int pid, Reply& reply) {
    const ProcessGpus found = driver.gpus_of(pid);
    reply.value = static_cast<std::int64_t>(found.source);
    copy_text(reply.text, sizeof(reply.text), found.why_not_all);
    for (const ProcessGpus::Gpu& gpu : found.gpus) {
        if (reply.gpu_count == worker_protocol::kMaxGpus)
            throw Error(Errc::unsupported, "more than " +
                                               std::to_string(worker_protocol::kMaxGpus) +
                                               " GPUs of one process");
        worker_protocol::Gpu& wire = reply.gpus[reply.gpu_count++];
        wire.uuid = gpu.uuid;
        wire.memory_size = gpu.memory_size;
    }
}

void answer(Driver& driver, const TaskTable& table, const Request& request, Reply& reply) {
    switch (request.op) {
    case Op::is_emulator: reply.value = driver.is_emulator() ? 1 : 0; return;
    case Op::api_version: reply.value = driver.api_version(); return;
    case Op::version_text: copy_text(reply.text, sizeof(reply.text), driver.version_text()); return;
    case Op::gpus: answer_gpus(driver, reply); return;
    case Op::gpus_of: answer_gpus_of(driver, request.pid, reply); return;
    case Op::initialize: driver.initialize(); return;
    case Op::restore_thread: {
        const auto tid = driver.restore_thread(request.pid);
        reply.status = tid ? Status::done : Status::nothing;
        reply.value = tid.value_or(0);
        return;
    }
    case Op::state: reply.value = static_cast<std::int64_t>(driver.state(request.pid)); return;
    case Op::lock: driver.lock(request.pid, request.timeout_ms); return;
    case Op::checkpoint: driver.checkpoint(request.pid); return;
    case Op::restore: {
        std::vector<GpuMove> moves;
        for (std::uint32_t i = 0; i < request.move_count; ++i)
            moves.push_back({request.move_from[i], request.move_to[i]});
        driver.restore(request.pid, moves);
        return;
    }
    case Op::unlock: driver.unlock(request.pid); return;
    case Op::undo_restore: undo_restore(table.tasks[request.task], driver); return;
    case Op::undo_unlock: undo_unlock(table.tasks[request.task], driver); return;
    case Op::quit: return;
    }
}

/// The driver, loaded when first needed: a tree without CUDA never pays for it.
class LazyDriver {
public:
    explicit LazyDriver(const Config& config) : config_(config) {}
    Driver& get() {
        if (!driver_) {
            auto loaded = std::make_unique<DriverLibrary>(config_.driver, config_.nvml);
            loaded->api_version(); // one call is made before any are made side by side
            driver_ = std::move(loaded);
        }
        return *driver_;
    }

private:
    const Config& config_;
    std::unique_ptr<DriverLibrary> driver_;
};

/// `work` fills it.
template <class Work>
Reply reply_to(const Request& request, Work&& work) noexcept {
    Reply reply;
    reply.id = request.id;
    reply.status = Status::done;
    try {
        std::forward<Work>(work)(reply);
    } catch (const DriverError& e) {
        reply.status = Status::driver_refused;
        reply.result = e.result();
        copy_text(reply.text, sizeof(reply.text), e.what());
    } catch (const std::exception& e) {
        reply.status = Status::failed;
        copy_text(reply.text, sizeof(reply.text), e.what());
    }
    return reply;
}

/// False: the other end is gone.
bool send_reply(int socket, const Reply& reply) noexcept {
    return ::send(socket, &reply, sizeof(reply), MSG_NOSIGNAL) >= 0;
}

/// Calls under way, each in a thread of its own. When it is gone, all have been answered: who undoes
/// asks no driver that is still at work in the task.
class LongCalls {
public:
    LongCalls(TaskTable& table, int socket) : table_(table), socket_(socket) {}
    void begin(Driver& driver, const Request& request) {
        std::erase_if(calls_, [](const Call& call) { return call.is_done->load(); });
        auto is_done = std::make_shared<std::atomic<bool>>(false);
        calls_.push_back({is_done, std::jthread([this, &driver, request, is_done] {
                              send_reply(socket_, reply_to(request, [&](Reply& reply) {
                                             answer(driver, table_, request, reply);
                                         }));
                              *is_done = true;
                          })});
    }

private:
    struct Call {
        std::shared_ptr<std::atomic<bool>> is_done;
        std::jthread thread;
    };
    TaskTable& table_;
    int socket_;
    std::vector<Call> calls_;
};

/// Returns when the other end is gone; true: it said goodbye.
bool serve(LazyDriver& driver, TaskTable& table, int socket) {
    LongCalls calls(table, socket);
    for (;;) {
        Request request;
        const ssize_t got = ::recv(socket, &request, sizeof(request), 0);
        if (got < 0 && errno == EINTR)
            continue;
        if (got != static_cast<ssize_t>(sizeof(request)))
            return false;
        if (request.op == Op::quit)
            return true;
        pollfd peer{.fd = socket, .events = POLLRDHUP, .revents = 0};
        if (::poll(&peer, 1, 0) > 0)
            return false; // what it had asked before it was gone is not begun any more
        bool is_begun = false;
        const Reply reply = reply_to(request, [&](Reply& filled) {
            Driver& loaded = driver.get();
            if (worker_protocol::takes_long(request.op)) {
                calls.begin(loaded, request);
                is_begun = true;
            } else
                answer(loaded, table, request, filled);
        });
        if (!is_begun && !send_reply(socket, reply))
            return false;
    }
}

/// An account of what was done when nobody was there to be told.
class UndoLog {
public:
    explicit UndoLog(int image_dir) {
        const int fd =
            ::openat(image_dir, kUndoLogName,
                     O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
        // Without a file (a full disk, a vanished directory) the undo still has to be done. Nor may a
        // FIFO that was put in its place hold it up.
        file_.reset(fd < 0 ? nullptr : ::fdopen(fd, "a"));
    }
    void operator()(const std::string& text) {
        if (file_) {
            std::fprintf(file_.get(), "%s\n", text.c_str());
            std::fflush(file_.get());
        }
    }

private:
    struct Close {
        void operator()(std::FILE* file) const noexcept { std::fclose(file); }
    };
    std::unique_ptr<std::FILE, Close> file_;
};

bool anything_to_undo(const TaskTable& table) noexcept {
    for (std::size_t i = 0; i < table.task_count; ++i)
        if (!table.tasks[i].settled)
            return true;
    return false;
}

/// In case criu was killed while it was raised.
void lower_setting() noexcept {
    try {
        lower_userfaultfd_setting();
    } catch (const Error&) { // NOLINT(bugprone-empty-catch): the next dump and doctor see it, too
    }
}

// All are restored before any is unlocked, but for those whose memory cannot be put back, or that do not come to
// where they can be restored: nobody waits for these.
void undo_all(LazyDriver& driver, const Config& config, TaskTable& table,
              const UndoImages& images) {
    std::unique_ptr<UndoLog> log; // made when there is something to tell
    std::set<pid_t> told;         // of whose memory it is known that some cannot be put back
    std::set<pid_t> waited_for;   // whose restore thread has not come back for long
    std::set<pid_t> restored;
    const auto begin = Clock::now();
    const auto tell = [&](const TaskRecord& record, const std::string& text) {
        if (!log)
            log = std::make_unique<UndoLog>(images.lineage().directory(0));
        (*log)("pid " + std::to_string(record.pid) + ": " + text);
    };
    lower_setting();
    while (anything_to_undo(table)) {
        bool waits = false;
        for (std::size_t i = 0; i < table.task_count; ++i) {
            TaskRecord& record = table.tasks[i];
            if (record.settled)
                continue;
            const proc::Liveness life = proc::liveness(record.pid, record.start_time);
            const bool is_late = Clock::now() - begin > kLongDrop;
            if (life == proc::Liveness::traced || life == proc::Liveness::unknown) {
                waits |= !is_late;
                continue; // criu, or the kernel on its behalf, still holds it
            }
            if (life == proc::Liveness::dead || record.gone) {
                forget_drop(record);
                forget_checkpoint(record);
                record.settled = true;
                continue;
            }
            if (restored.contains(record.pid))
                continue;
            if (record.drop_begun && !record.refilled) {
                if (is_guarded(record)) {
                    if (record.refill_failed && told.insert(record.pid).second)
                        tell(record, std::string(record.refill_error) +
                                         "; this is tried again every second");
                    waits |= !told.contains(record.pid);
                    continue;
                }
                if (record.gone) {
                    waits = true;
                    continue;
                }
                if (!is_drop_over(record.pid, record.restore_tid)) {
                    if (is_late && waited_for.insert(record.pid).second)
                        tell(record,
                             "waits until restore thread " + std::to_string(record.restore_tid) +
                                 " is back in a call of its own: is the task stopped, frozen or "
                                 "traced?");
                    waits |= !is_late;
                    continue;
                }
            }
            try {
                refill_task(record, images, config.threads, nullptr);
                reset_signal_mask(record);
                undo_restore(record, driver.get());
                restored.insert(record.pid);
            } catch (const std::exception& e) {
                tell(record, std::string(e.what()) + "; try gpustasis recover");
                record.settled = true; // only now: until here it is not undone
            }
        }
        for (std::size_t i = 0; !waits && i < table.task_count; ++i) {
            TaskRecord& record = table.tasks[i];
            if (record.settled || restored.erase(record.pid) == 0)
                continue;
            try {
                undo_unlock(record, driver.get());
                tell(record, "criu is gone; the task was brought back and runs on");
            } catch (const std::exception& e) {
                tell(record, std::string(e.what()) + "; try gpustasis recover");
            }
            record.settled = true;
        }
        if (anything_to_undo(table))
            ::poll(nullptr, 0, told.empty() ? kOrphanPollMs : kDamagedPollMs);
    }
    lower_setting(); // at the first time a dying criu may have held the lock still
}

void kill_all(const TaskTable& table) noexcept {
    if (table.complete)
        return;
    for (std::size_t i = 0; i < table.kill_count; ++i)
        proc::kill_task(table.kills[i].pid, table.kills[i].start_time);
}

/// End the restored tree, and this process, once criu is gone: at once, also while the driver is asked
/// for something and does not answer.
void kill_when_orphaned(const TaskTable& table, int socket) noexcept {
    pollfd poll{.fd = socket, .events = POLLRDHUP, .revents = 0};
    while (::poll(&poll, 1, -1) <= 0)
        continue;
    kill_all(table);
    ::_exit(0);
}

} // namespace

void run_worker(const Config& config, TaskTable& table, UndoImages& images, KeyHandover& key,
                int socket) {
    try {
        key.take(images);
        std::vector<int> keep = images.lineage().descriptors();
        keep.push_back(socket);
        shed_criu(std::move(keep), "gpustasis-work");
        LazyDriver driver(config);
        if (table.on_orphaned == OnOrphaned::kill)
            std::thread([&table, socket] { kill_when_orphaned(table, socket); }).detach();
        const pid_t pid = ::getpid();
        if (::send(socket, &pid, sizeof(pid), MSG_NOSIGNAL) < 0)
            ::_exit(1);
        if (!serve(driver, table, socket)) {
            if (table.on_orphaned == OnOrphaned::kill)
                kill_when_orphaned(table, socket);
            undo_all(driver, config, table, images);
        }
        images.forget_key();
    } catch (...) {
        // Nobody is left to be told, and nothing may unwind into criu's frames.
        ::_exit(1);
    }
    ::_exit(0);
}

} // namespace gpustasis
