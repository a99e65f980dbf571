// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/worker_process.hpp"

#include "core/error.hpp"
#include "cuda_plugin/direct_work.hpp"
#include "cuda_plugin/driver_library.hpp"
#include "cuda_plugin/guardian.hpp"
#include "cuda_plugin/long_calls.hpp"
#include "cuda_plugin/orphan.hpp"
#include "cuda_plugin/undo.hpp"
#include "cuda_plugin/undo_all.hpp"
#include "cuda_plugin/worker_protocol.hpp"
#include "tracee/proc.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <exception>
#include <iterator>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace gpustasis {
namespace {

using worker_protocol::Op;
using worker_protocol::Reply;
using worker_protocol::Request;
using worker_protocol::Status;

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

std::vector<Id> gpus_of(const Request& request) {
    return {request.move_from, request.move_from + request.move_count};
}

std::vector<GpuMove> moves_of(const Request& request) {
    std::vector<GpuMove> moves;
    moves.reserve(request.move_count);
    for (std::uint32_t i = 0; i < request.move_count; ++i)
        moves.push_back({request.move_from[i], request.move_to[i]});
    return moves;
}

void answer(DriverLibrary& driver, DirectWork& direct, TaskTable& table, const Request& request,
            Reply& reply) {
    switch (request.op) {
    case Op::is_emulator: reply.value = driver.is_emulator() ? 1 : 0; return;
    case Op::api_version: reply.value = driver.api_version(); return;
    case Op::version_text: copy_text(reply.text, sizeof(reply.text), driver.version_text()); return;
    case Op::gpus: answer_gpus(driver, reply); return;
    case Op::gpus_of: answer_gpus_of(driver, request.pid, reply); return;
    case Op::initialize:
        driver.initialize();
        if (request.move_count != 0)
            direct.prepare_ahead(driver, gpus_of(request), request.gpus_used);
        return;
    case Op::restore_thread: {
        const auto tid = driver.restore_thread(request.pid);
        reply.status = tid ? Status::done : Status::nothing;
        reply.value = tid.value_or(0);
        return;
    }
    case Op::state: reply.value = static_cast<std::int64_t>(driver.state(request.pid)); return;
    case Op::lock: driver.lock(request.pid, request.timeout_ms); return;
    case Op::checkpoint: driver.checkpoint(request.pid); return;
    case Op::restore: driver.restore(request.pid, moves_of(request)); return;
    case Op::prepare_direct:
        direct.prepare(driver, table.tasks[request.task].pid, gpus_of(request), request.gpus_used);
        return;
    case Op::checkpoint_direct: direct.checkpoint(driver, table.tasks[request.task]); return;
    case Op::restore_direct:
        direct.restore(driver, table.tasks[request.task], moves_of(request));
        return;
    case Op::unlock: driver.unlock(request.pid); return;
    case Op::undo_restore: undo_restore(table.tasks[request.task], driver); return;
    case Op::undo_unlock: undo_unlock(table.tasks[request.task], driver); return;
    case Op::quit: return;
    }
}

/// The driver, loaded when first needed: a tree without CUDA never pays for it.
class LazyDriver {
public:
    LazyDriver(const Config& config, const UndoImages& images, DirectStore* store)
        : config_(config), direct_(config, images, store) {}
    DirectWork& direct() noexcept { return direct_; }
    DriverLibrary& get() {
        const std::lock_guard lock(mutex_);
        if (!driver_) {
            auto loaded = std::make_unique<DriverLibrary>(config_.driver, config_.nvml);
            loaded->set_direct(direct_);
            loaded->api_version(); // one call is made before any are made side by side
            driver_ = std::move(loaded);
        }
        return *driver_;
    }

private:
    const Config& config_;
    DirectWork direct_;
    std::mutex mutex_;
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

/// How long the driver may take for it.
std::chrono::milliseconds limit_of(const Request& request, const Config& config) noexcept {
    using std::chrono::milliseconds;
    if (request.op == Op::lock)
        return milliseconds(request.timeout_ms) + milliseconds(worker_protocol::kGraceMs);
    if (request.op == Op::initialize && request.move_count != 0) // two things are done
        return 2 * milliseconds(config.driver_timeout_ms);
    if (worker_protocol::takes_long(request.op) || request.op == Op::initialize ||
        request.op == Op::prepare_direct)
        return milliseconds(config.driver_timeout_ms);
    return milliseconds(worker_protocol::kQuickTimeoutMs);
}

/// Returns when the other end is gone; true: it said goodbye. No call is made in this thread, which would hang with it.
bool serve(LazyDriver& driver, const Config& config, TaskTable& table, LongCalls& calls,
           int socket) {
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
        const Reply refused = reply_to(request, [&](Reply&) {
            const MovedAt& moved_at = table.tasks[request.task].direct.moved_at;
            calls.begin(
                request.pid, limit_of(request, config),
                [&driver, &table, socket, request] {
                    send_reply(socket, reply_to(request, [&](Reply& reply) {
                                   answer(driver.get(), driver.direct(), table, request, reply);
                               }));
                },
                worker_protocol::moves_memory(request.op) ? &moved_at : nullptr);
            is_begun = true;
        });
        if (!is_begun && !send_reply(socket, refused))
            return false;
    }
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
                DirectStore* store, int socket) {
    // Both are there until the end: threads that hang in the driver use them.
    LazyDriver driver(config, images, store);
    LongCalls calls;
    try {
        key.take(images);
        std::vector<int> keep = images.lineage().descriptors();
        keep.push_back(socket);
        if (store != nullptr)
            std::ranges::copy(store->descriptors(), std::back_inserter(keep));
        shed_criu(std::move(keep), "gpustasis-work");
        ::signal(SIGXFSZ, SIG_IGN); // a file that may not grow is an error of a write, as any other
        ::signal(SIGPIPE, SIG_IGN); // the driver's pipes, where a task dies
        ignore_requests_to_end();
        if (table.on_orphaned == OnOrphaned::kill)
            std::thread([&table, socket] { kill_when_orphaned(table, socket); }).detach();
        const pid_t pid = ::getpid();
        // Where criu has died meanwhile serve() sees that at once, and this process may be the only one left to undo.
        if (::send(socket, &pid, sizeof(pid), MSG_NOSIGNAL) < 0 && errno != EPIPE &&
            errno != ECONNRESET)
            ::_exit(1);
        if (!serve(driver, config, table, calls, socket)) {
            if (table.on_orphaned == OnOrphaned::kill)
                kill_when_orphaned(table, socket);
            for (std::size_t i = 0; i < table.task_count; ++i)
                table.tasks[i].direct.ending = false; // criu may have died while it decided
            undo_all([&driver]() -> Driver& { return driver.get(); }, config, table, images, calls);
            ::_exit(0); // a thread may have the key in use still
        }
        images.forget_key();
    } catch (...) {
        // Nobody is left to be told, and nothing may unwind into criu's frames.
        ::_exit(1);
    }
    ::_exit(0);
}

} // namespace gpustasis
