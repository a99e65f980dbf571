// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/worker.hpp"

#include "cuda_plugin/orphan.hpp"
#include "cuda_plugin/worker_process.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <utility>

namespace gpustasis {
namespace {

using worker_protocol::kQuickTimeoutMs;
using worker_protocol::Op;
using worker_protocol::Reply;
using worker_protocol::Request;
using worker_protocol::Status;

// It leaves by _exit: a moment is enough, or it is stuck.
constexpr int kQuitMs = 200;
constexpr int kKillMs = 2'000;
constexpr int kSocketBytes = 8 << 20;

} // namespace

void Worker::start() {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0)
        throw io_error("cannot make a socket pair for the driver worker", errno);
    UniqueFd ours(ends[0]);
    UniqueFd theirs(ends[1]);
    // Room for the replies to all calls that may be under way: nobody waits to be read. As much as the kernel gives.
    for (const int end : ends)
        ::setsockopt(end, SOL_SOCKET, SO_SNDBUFFORCE, &kSocketBytes, sizeof(kSocketBytes));
    for (std::size_t i = 0; i < table_->task_count; ++i) {
        table_->tasks[i].direct.held = false; // the one that had it is dead
        table_->tasks[i].direct.asking = false;
        table_->tasks[i].direct.completing = false;
        table_->tasks[i].direct.restoring = false; // `filling` stays: the task lacks memory still
    }
    KeyHandover key(images_);
    fork_orphan("the driver worker", [&] {
        ours.reset();
        run_worker(config_, *table_, images_, key, store_, theirs.get());
    });
    theirs.reset();
    // Its first word is its pid. It lives until its socket closes, so the pid is still its own.
    pid_t pid = 0;
    ssize_t got = 0;
    do
        got = ::recv(ours.get(), &pid, sizeof(pid), 0);
    while (got < 0 && errno == EINTR);
    if (got != static_cast<ssize_t>(sizeof(pid)))
        throw Error(Errc::io, "the driver worker did not start");
    UniqueFd process(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
    if (!process)
        throw io_error("pidfd_open of the driver worker", errno);
    process_ = std::move(process);
    socket_ = std::move(ours);
    ++number_;
    under_way_.clear();
    given_up_.clear();
    patient_until_ = {};
    hangs_ = false;
    initialize_id_ = 0;
    initialized_.reset();
}

bool Worker::wait_for_end(int timeout_ms) noexcept {
    const auto deadline = Clock::now() + std::chrono::milliseconds(timeout_ms);
    for (;;) {
        pollfd poll{.fd = process_.get(), .events = POLLIN, .revents = 0};
        const auto left =
            std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
        if (::poll(&poll, 1, static_cast<int>(std::clamp<long long>(left, 0, timeout_ms))) > 0)
            return true;
        if (left <= 0)
            return false;
    }
}

void Worker::kill() noexcept {
    // The signal first: a worker whose socket closes takes this process for dead and begins to undo.
    if (process_) {
        ::syscall(SYS_pidfd_send_signal, process_.get(), SIGKILL, nullptr, 0);
        // Not for ever: a thread stuck in the kernel driver does not die of SIGKILL either.
        wait_for_end(kKillMs);
    }
    socket_.reset();
    process_.reset();
    under_way_.clear();
    given_up_.clear();
    patient_until_ = {};
    hangs_ = false;
    initialize_id_ = 0; // whatever it was asked for was asked of that worker
}

void Worker::stop() noexcept {
    if (!process_)
        return;
    Request request;
    request.op = Op::quit;
    if (::send(socket_.get(), &request, sizeof(request), MSG_NOSIGNAL) < 0 ||
        !wait_for_end(kQuitMs)) {
        kill();
        return;
    }
    socket_.reset();
    process_.reset();
}

void Worker::leave() {
    if (!process_)
        start();
    socket_.reset();
    process_.reset();
}

void Worker::require_listening() const {
    if (hangs_)
        throw Error(Errc::io, "the driver worker hangs in a call that was given up");
}

void Worker::send(Request& request) {
    if (!process_)
        start();
    request.id = ++last_id_;
    if (::send(socket_.get(), &request, sizeof(request), MSG_NOSIGNAL) < 0) {
        const int error = errno;
        if (error == EPIPE || error == ECONNRESET)
            kill();
        else if (!kill_unless_needed())
            hangs_ = true;
        throw io_error("the driver worker does not listen", error);
    }
}

Reply Worker::receive(std::uint64_t id, const char* call, int pid, std::uint32_t timeout_ms) {
    const Call one = call_of(id, call, pid, timeout_ms, watched_);
    Received received = receive(std::span(&one, 1));
    if (received.error)
        std::rethrow_exception(received.error);
    return received.reply;
}

// The worker answers one request after the other: what is asked behind an initialize() that is under
// way waits for that first, and then has its own time.
void Worker::await_initialize() {
    if (initialize_id_ == 0)
        return;
    const std::uint64_t id = std::exchange(initialize_id_, 0);
    initialized_ = prepares_ahead_ ? receive(id, "cuInit, or cuDevicePrimaryCtxRetain behind it", 0,
                                             2 * config_.driver_timeout_ms)
                                   : receive(id, "cuInit", 0, config_.driver_timeout_ms);
}

Reply Worker::call(Request& request, const char* name, std::uint32_t timeout_ms) {
    await_initialize();
    require_listening();
    send(request);
    // A driver that answers one call after the other has those that are under way to answer first.
    if (!under_way_.empty())
        timeout_ms = std::max(timeout_ms, most_ms_);
    Reply reply = receive(request.id, name, request.pid, timeout_ms);
    if (reply.status != Status::done && reply.status != Status::nothing)
        worker_protocol::throw_refused(reply);
    return reply;
}

Reply Worker::call(Op op, const char* name, int pid, std::uint32_t timeout_ms) {
    Request request;
    request.op = op;
    request.pid = pid;
    return call(request, name, timeout_ms);
}

bool Worker::is_emulator() {
    return call(Op::is_emulator, "loading the driver", 0, kQuickTimeoutMs).value != 0;
}

std::uint32_t Worker::api_version() {
    const Reply reply = call(Op::api_version, "cuDriverGetVersion", 0, kQuickTimeoutMs);
    return static_cast<std::uint32_t>(reply.value);
}

std::string Worker::version_text() {
    return call(Op::version_text, "nvmlSystemGetDriverVersion", 0, kQuickTimeoutMs).text;
}

std::optional<std::vector<GpuStatus>> Worker::gpus() {
    const Reply reply = call(Op::gpus, "nvmlDeviceGetMemoryInfo", 0, kQuickTimeoutMs);
    if (reply.status == Status::nothing)
        return std::nullopt;
    std::vector<GpuStatus> gpus;
    for (std::uint32_t i = 0; i < reply.gpu_count; ++i) {
        const worker_protocol::Gpu& wire = reply.gpus[i];
        GpuStatus& gpu = gpus.emplace_back();
        gpu.info = {wire.uuid, wire.name, wire.memory_size};
        if (wire.free_size != TaskGpu::kUnknownSize)
            gpu.free_size = wire.free_size;
    }
    return gpus;
}

ProcessGpus Worker::gpus_of(int pid) {
    const Reply reply = call(Op::gpus_of, "looking for the GPUs", pid, kQuickTimeoutMs);
    ProcessGpus found{static_cast<GpuSource>(reply.value), {}, reply.text};
    for (std::uint32_t i = 0; i < reply.gpu_count; ++i)
        found.gpus.push_back({reply.gpus[i].uuid, reply.gpus[i].memory_size});
    return found;
}

void Worker::begin_initialize(const std::vector<Id>& gpus, std::size_t used) {
    Request request;
    request.op = Op::initialize;
    worker_protocol::add_gpus(request, gpus, used);
    await_initialize();
    send(request);
    initialize_id_ = request.id;
    prepares_ahead_ = !gpus.empty();
}

void Worker::initialize() {
    await_initialize();
    // A failure that came early is told now, to the one who needs the GPUs.
    if (const std::optional<Reply> early = std::exchange(initialized_, std::nullopt)) {
        if (early->status != Status::done)
            worker_protocol::throw_refused(*early);
        return;
    }
    call(Op::initialize, "cuInit", 0, config_.driver_timeout_ms);
}

void Worker::prepare_direct(const TaskRecord& record, const std::vector<Id>& gpus,
                            std::size_t used) {
    Request request;
    request.op = Op::prepare_direct; // of no pid: nothing is under way in the task yet
    request.task = static_cast<std::uint32_t>(&record - &table_->tasks[0]);
    worker_protocol::add_gpus(request, gpus, used);
    call(request, "cuDevicePrimaryCtxRetain", config_.driver_timeout_ms);
}

std::optional<int> Worker::restore_thread(int pid) {
    const Reply reply =
        call(Op::restore_thread, "cuCheckpointProcessGetRestoreThreadId", pid, kQuickTimeoutMs);
    if (reply.status == Status::nothing)
        return std::nullopt;
    return static_cast<int>(reply.value);
}

ProcessState Worker::state(int pid) {
    const Reply reply = call(Op::state, "cuCheckpointProcessGetState", pid, kQuickTimeoutMs);
    return static_cast<ProcessState>(reply.value);
}

} // namespace gpustasis
