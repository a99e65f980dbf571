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

using worker_protocol::Op;
using worker_protocol::Reply;
using worker_protocol::Request;
using worker_protocol::Status;

// Answers that need no GPU work: they come at once or not at all.
constexpr std::uint32_t kQuickTimeoutMs = 20'000;
// How long an unlock or a lock's own timeout may be late before the call counts as hung.
constexpr std::uint32_t kGraceMs = 10'000;
// It leaves by _exit: a moment is enough, or it is stuck.
constexpr int kQuitMs = 200;
constexpr int kKillMs = 2'000;
// How often the watched thread is looked at while a call is under way.
constexpr int kWatchIntervalMs = 10;

/// Why a call under way will never be answered; empty while it may.
std::string stopped_reason(pid_t tid) {
    siginfo_t info{};
    if (::waitid(P_PID, static_cast<id_t>(tid), &info,
                 WEXITED | WSTOPPED | WNOHANG | WNOWAIT | __WALL) != 0 ||
        info.si_pid == 0)
        return "";
    if (info.si_code == CLD_EXITED || info.si_code == CLD_KILLED || info.si_code == CLD_DUMPED)
        return "the task died";
    return "its restore thread " + std::to_string(tid) + " stopped with signal " +
           std::to_string(info.si_status & 0xff) + " inside the driver";
}

[[noreturn]] void throw_reply(const Reply& reply) {
    if (reply.status == Status::driver_refused)
        throw DriverError(reply.result, reply.text);
    throw Error(Errc::unsupported, reply.text);
}

} // namespace

void Worker::start() {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0)
        throw io_error("cannot make a socket pair for the driver worker", errno);
    UniqueFd ours(ends[0]);
    UniqueFd theirs(ends[1]);
    KeyHandover key(images_);
    fork_orphan("the driver worker", [&] {
        ours.reset();
        run_worker(config_, *table_, images_, key, theirs.get());
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

void Worker::send(Request& request) {
    if (!process_)
        start();
    request.id = ++last_id_;
    if (::send(socket_.get(), &request, sizeof(request), MSG_NOSIGNAL) < 0) {
        const int error = errno;
        kill();
        throw io_error("the driver worker does not listen", error);
    }
}

Reply Worker::receive(std::uint64_t id, const char* call, int pid, std::uint32_t timeout_ms) {
    const auto deadline = Clock::now() + std::chrono::milliseconds(timeout_ms);
    const auto fail = [&](const std::string& why) {
        kill();
        return Error(Errc::io, std::string(call) + " for pid " + std::to_string(pid) + ": " + why);
    };
    for (;;) {
        pollfd poll{.fd = socket_.get(), .events = POLLIN, .revents = 0};
        const auto left =
            std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
        const int wait = static_cast<int>(std::clamp<long long>(left, 0, timeout_ms));
        const int ready = ::poll(&poll, 1, watched_ != 0 ? std::min(wait, kWatchIntervalMs) : wait);
        if (ready < 0 && errno != EINTR)
            throw fail(io_error("poll", errno).what());
        if (ready > 0) {
            Reply reply;
            const ssize_t got = ::recv(socket_.get(), &reply, sizeof(reply), 0);
            if (got != static_cast<ssize_t>(sizeof(reply)))
                throw fail("the driver worker died");
            if (reply.id != id)
                throw fail("the driver worker answered another request");
            reply.text[sizeof(reply.text) - 1] = '\0';
            return reply;
        }
        if (watched_ != 0)
            if (const std::string why = stopped_reason(watched_); !why.empty())
                throw fail(why);
        if (Clock::now() >= deadline)
            throw fail("no answer from the driver within " + std::to_string(timeout_ms) + " ms");
    }
}

// The worker answers one request after the other: what is asked behind an initialize() that is under
// way waits for that first, and then has its own time.
void Worker::await_initialize() {
    if (initialize_id_ == 0)
        return;
    const std::uint64_t id = std::exchange(initialize_id_, 0);
    initialized_ = receive(id, "cuInit", 0, config_.driver_timeout_ms);
}

Reply Worker::call(Request& request, const char* name, std::uint32_t timeout_ms) {
    await_initialize();
    send(request);
    Reply reply = receive(request.id, name, request.pid, timeout_ms);
    if (reply.status != Status::done && reply.status != Status::nothing)
        throw_reply(reply);
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

void Worker::begin_initialize() {
    Request request;
    request.op = Op::initialize;
    await_initialize();
    send(request);
    initialize_id_ = request.id;
}

void Worker::initialize() {
    await_initialize();
    // A failure that came early is told now, to the one who needs the GPUs.
    if (const std::optional<Reply> early = std::exchange(initialized_, std::nullopt)) {
        if (early->status != Status::done)
            throw_reply(*early);
        return;
    }
    call(Op::initialize, "cuInit", 0, config_.driver_timeout_ms);
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

void Worker::lock(int pid, std::uint32_t timeout_ms) {
    Request request;
    request.op = Op::lock;
    request.pid = pid;
    request.timeout_ms = timeout_ms;
    call(request, "cuCheckpointProcessLock", timeout_ms + kGraceMs);
}

void Worker::checkpoint(int pid) {
    call(Op::checkpoint, "cuCheckpointProcessCheckpoint", pid, config_.driver_timeout_ms);
}

void Worker::restore(int pid, const std::vector<GpuMove>& moves) {
    Request request;
    request.op = Op::restore;
    request.pid = pid;
    if (moves.size() > worker_protocol::kMaxGpus)
        throw Error(Errc::unsupported,
                    "more than " + std::to_string(worker_protocol::kMaxGpus) + " GPUs to map");
    for (const GpuMove& move : moves) {
        request.move_from[request.move_count] = move.from;
        request.move_to[request.move_count] = move.to;
        ++request.move_count;
    }
    call(request, "cuCheckpointProcessRestore", config_.driver_timeout_ms);
}

void Worker::unlock(int pid) {
    call(Op::unlock, "cuCheckpointProcessUnlock", pid, kQuickTimeoutMs);
}

} // namespace gpustasis
