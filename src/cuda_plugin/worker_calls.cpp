// SPDX-License-Identifier: Apache-2.0
/// Of worker.hpp: calls that take long, of which several may be under way at once.
#include "cuda_plugin/worker.hpp"

#include "tracee/proc.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <string>
#include <utility>

namespace gpustasis {
namespace {

using worker_protocol::kGraceMs;
using worker_protocol::kQuickTimeoutMs;
using worker_protocol::Op;
using worker_protocol::Reply;
using worker_protocol::Request;
using worker_protocol::Status;

// How often watched threads are looked at while calls are under way.
constexpr int kWatchIntervalMs = 10;
constexpr int kLongestPollMs = 1'000;       // a stop that falls into one is to be seen
constexpr std::chrono::seconds kStopped(3); // a turn that took so much longer

/// Why a call under way will never be answered; empty while it may.
std::string stopped_reason(pid_t tid, bool counts_stops) {
    siginfo_t info{};
    if (::waitid(P_PID, static_cast<id_t>(tid), &info,
                 WEXITED | WSTOPPED | WNOHANG | WNOWAIT | __WALL) != 0 ||
        info.si_pid == 0)
        return "";
    if (info.si_code == CLD_EXITED || info.si_code == CLD_KILLED || info.si_code == CLD_DUMPED)
        return "the task died";
    if (!counts_stops)
        return "";
    return "its restore thread " + std::to_string(tid) + " stopped with signal " +
           std::to_string(info.si_status & 0xff) + " inside the driver";
}

std::chrono::steady_clock::time_point moved_of(const DirectRecord& direct) noexcept {
    using Clock = std::chrono::steady_clock;
    return Clock::time_point(Clock::duration(direct.moved_at.load()));
}

Request request_of(Op op, int pid) noexcept {
    Request request;
    request.op = op;
    request.pid = pid;
    return request;
}

} // namespace

Worker::Received Worker::give_up(std::size_t index, const Call& call, const std::string& why) {
    if (under_way_.erase(call.id) == 0)
        hangs_ = true; // in a call that it makes between two requests
    // A task that is stopped in the middle of the driver's call goes on once it is let go; then the memory is the worker's.
    if (call.direct != nullptr && call.direct->begun) {
        const Clock::time_point deadline = deadline_of(call, last_sign());
        if (Clock::now() < deadline && !is_dead(call.direct))
            patient_until_ = std::max(patient_until_, deadline);
    }
    given_up_.insert(call.id);
    if (under_way_.empty())
        kill_unless_needed();
    return {.index = index,
            .reply = {},
            .error = std::make_exception_ptr(Error(Errc::io, std::string(call.name) + " for pid " +
                                                                 std::to_string(call.pid) + ": " +
                                                                 why))};
}

bool Worker::is_dead(const DirectRecord* direct) const noexcept {
    for (std::size_t i = 0; i < table_->task_count; ++i)
        if (const TaskRecord& record = table_->tasks[i]; &record.direct == direct)
            return proc::liveness(record.pid, record.start_time) == proc::Liveness::dead;
    return false;
}

// Not while it alone has memory of a task, owes it some, or may be about to: the task would be lost with it. What a
// restore has made is of no use anyway.
bool Worker::may_be_killed() noexcept {
    if (!process_ || table_->on_orphaned == OnOrphaned::kill)
        return true;
    const auto now = Clock::now();
    if (now < patient_until_)
        return false;
    const std::chrono::milliseconds whole_time(config_.driver_timeout_ms);
    for (std::size_t i = 0; i < table_->task_count; ++i) {
        const TaskRecord& record = table_->tasks[i];
        // In the order in which one takes the other's place: what is not seen any more here is seen there.
        // Whoever asks may wait for the driver as long as another process is at work there.
        const bool has_memory =
            record.direct.asking || record.direct.restoring || record.direct.held;
        const bool is_completing = record.direct.completing;
        const bool is_at_work =
            is_completing && now < std::max(moved_of(record.direct), answered_) + whole_time;
        if ((has_memory || is_at_work) &&
            proc::liveness(record.pid, record.start_time) != proc::Liveness::dead)
            return false;
    }
    return true;
}

// It may be about to ask the driver for memory, in a call that was given up while another one was under way.
bool Worker::kill_unless_needed() noexcept {
    const auto set_ending = [this](bool ending) {
        for (std::size_t i = 0; i < table_->task_count; ++i)
            table_->tasks[i].direct.ending = ending;
    };
    set_ending(true);
    const bool is_killed = may_be_killed();
    if (is_killed)
        kill();
    set_ending(false);
    return is_killed;
}

// Whatever it was asked, nobody knows what came of it.
Worker::Received Worker::lose(std::size_t index, const Call& call, const std::string& why,
                              bool is_dead) {
    if (is_dead)
        kill();
    else if (!kill_unless_needed())
        hangs_ = true; // it cannot be spoken to, and does by itself what is left to do
    Received received = give_up(index, call, why);
    received.lost = true;
    return received;
}

// False: it was the reply to another call, which is waited for later.
bool Worker::take_reply(std::span<const Call> calls, Received& received) {
    Reply& reply = received.reply;
    const ssize_t got = ::recv(socket_.get(), &reply, sizeof(reply), 0);
    if (got != static_cast<ssize_t>(sizeof(reply))) {
        const bool is_dead = got == 0 || (got < 0 && errno == ECONNRESET); // it has no other end
        received = lose(0, calls.front(), "the driver worker died", is_dead);
        return true;
    }
    reply.text[sizeof(reply.text) - 1] = '\0';
    const auto known = under_way_.find(reply.id);
    const auto call = std::ranges::find(calls, reply.id, &Call::id);
    if (given_up_.contains(reply.id) || known != under_way_.end()) // and no quick call's
        answered_ = Clock::now();
    if (given_up_.contains(reply.id))
        return false;
    if (call == calls.end() && known == under_way_.end()) {
        received = lose(0, calls.front(), "the driver worker answered another request", false);
        return true;
    }
    if (call == calls.end()) {
        known->second.reply = reply;
        return false;
    }
    if (known != under_way_.end())
        under_way_.erase(known);
    received.index = static_cast<std::size_t>(call - calls.begin());
    return true;
}

Worker::Received Worker::receive(std::span<const Call> calls) {
    Received received;
    for (std::size_t i = 0; i < calls.size(); ++i) {
        received.index = i;
        if (calls[i].worker != number_ || !process_) {
            received.lost = true;
            received.error = std::make_exception_ptr(Error(
                Errc::io, std::string(calls[i].name) + " for pid " + std::to_string(calls[i].pid) +
                              ": the driver worker was ended, because of another call"));
            return received;
        }
        const auto early = under_way_.find(calls[i].id);
        if (early == under_way_.end())
            continue;
        if (const std::optional<Reply>& reply = early->second.reply) {
            received.reply = *reply;
            under_way_.erase(early);
            return received;
        }
    }
    const auto holds = [this](const DirectRecord* direct) {
        return direct != nullptr && direct->held && !direct->completing &&
               table_->on_orphaned != OnOrphaned::kill;
    };
    const auto is_held = [&holds](const Call& call) { return holds(call.direct); };
    const bool watches = std::ranges::any_of(calls, [](const Call& c) { return c.watched != 0; });
    for (Clock::time_point looked = Clock::now();;) {
        const Clock::time_point before = last_sign();
        const auto first =
            std::ranges::min(calls, {}, [&](const Call& one) { return deadline_of(one, before); });
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
                              deadline_of(first, before) - Clock::now())
                              .count();
        const int wait =
            static_cast<int>(std::clamp<long long>(left, kWatchIntervalMs, kLongestPollMs));
        pollfd poll{.fd = socket_.get(), .events = POLLIN, .revents = 0};
        const int poll_ms = watches ? std::min(wait, kWatchIntervalMs) : wait;
        const int ready = ::poll(&poll, 1, poll_ms);
        const auto begin = std::exchange(looked, Clock::now());
        // This process was stopped, and the worker with it, as by the freezer of their cgroup: no call's time has passed.
        if (looked - begin > std::chrono::milliseconds(poll_ms) + kStopped)
            answered_ = looked;
        if (ready < 0 && errno != EINTR)
            return lose(0, calls.front(), io_error("poll", errno).what(), false);
        if (ready > 0 && take_reply(calls, received))
            return received;
        if (ready > 0)
            continue;
        // Also in a call that is not waited for now: a quick one may wait in the driver behind it.
        const bool is_storing = std::ranges::any_of(under_way_, [&](const auto& one) {
            const auto& [reply, direct] = one.second;
            return !reply && holds(direct) && !is_dead(direct);
        });
        const Clock::time_point sign = last_sign();
        for (std::size_t i = 0; i < calls.size(); ++i) {
            if (calls[i].watched != 0)
                if (const std::string why = stopped_reason(calls[i].watched, !is_held(calls[i]));
                    !why.empty())
                    return give_up(i, calls[i], why);
            // What holds memory alone is waited for, however long the storage takes, and what may wait in the driver behind
            // it. Not in an undo, where all others wait to run on: what stands still is left to the worker, which is not
            // killed for that.
            if ((!is_storing || calls[i].undoes) && Clock::now() >= deadline_of(calls[i], sign))
                return give_up(i, calls[i],
                               "no answer from the driver within " +
                                   std::to_string(calls[i].timeout_ms) + " ms");
        }
    }
}

// A driver that does one operation after the other has only begun with it when the one before has ended: as long as memory
// of any task moves, it may not have.
Worker::Clock::time_point Worker::last_sign() const noexcept {
    Clock::time_point last = answered_;
    for (std::size_t i = 0; i < table_->task_count; ++i)
        last = std::max(last, moved_of(table_->tasks[i].direct));
    return last;
}

Worker::Clock::time_point Worker::deadline_of(const Call& call,
                                              Clock::time_point last_sign) noexcept {
    return std::max(call.deadline, last_sign + std::chrono::milliseconds(call.timeout_ms));
}

Worker::Call Worker::call_of(std::uint64_t id, const char* name, int pid, std::uint32_t timeout_ms,
                             pid_t tid) const noexcept {
    return {.id = id,
            .worker = number_,
            .name = name,
            .pid = pid,
            .watched = tid,
            .timeout_ms = timeout_ms,
            .deadline = Clock::now() + std::chrono::milliseconds(timeout_ms)};
}

Worker::Answer Worker::wait(std::span<const Call> calls) {
    Received received = receive(calls);
    if (under_way_.empty() && !given_up_.empty())
        kill_unless_needed(); // the driver does not answer it, or its task is dead
    Answer answer{.index = received.index, .error = received.error, .lost = received.lost};
    const Status status = received.reply.status;
    if (!answer.error && status != Status::done && status != Status::nothing) {
        try {
            worker_protocol::throw_refused(received.reply);
        } catch (const Error&) {
            answer.error = std::current_exception();
        }
    }
    return answer;
}

void Worker::finish(const Call& call) {
    const Answer answer = wait(std::span(&call, 1));
    if (answer.error)
        std::rethrow_exception(answer.error);
}

Worker::Call Worker::begin(Request& request, const char* name, std::uint32_t timeout_ms,
                           pid_t tid) {
    await_initialize();
    require_listening();
    send(request);
    most_ms_ = std::max(under_way_.empty() ? 0 : most_ms_, timeout_ms);
    under_way_.emplace(request.id, UnderWay{});
    return call_of(request.id, name, request.pid, timeout_ms, tid);
}

Worker::Call Worker::begin_lock(int pid, std::uint32_t timeout_ms) {
    Request request = request_of(Op::lock, pid);
    request.timeout_ms = timeout_ms;
    return begin(request, "cuCheckpointProcessLock", timeout_ms + kGraceMs, watched_);
}

Worker::Call Worker::begin_checkpoint(int pid, pid_t tid) {
    Request request = request_of(Op::checkpoint, pid);
    return begin(request, "cuCheckpointProcessCheckpoint", config_.driver_timeout_ms, tid);
}

void add_moves(Request& request, const std::vector<GpuMove>& moves) {
    if (moves.size() > worker_protocol::kMaxGpus)
        throw Error(Errc::unsupported,
                    "more than " + std::to_string(worker_protocol::kMaxGpus) + " GPUs to map");
    for (const GpuMove& move : moves) {
        request.move_from[request.move_count] = move.from;
        request.move_to[request.move_count] = move.to;
        ++request.move_count;
    }
}

Worker::Call Worker::begin_restore(int pid, const std::vector<GpuMove>& moves, pid_t tid) {
    Request request = request_of(Op::restore, pid);
    add_moves(request, moves);
    return begin(request, "cuCheckpointProcessRestore", config_.driver_timeout_ms, tid);
}

Worker::Call Worker::begin_unlock(int pid, pid_t tid) {
    Request request = request_of(Op::unlock, pid);
    return begin(request, "cuCheckpointProcessUnlock", kQuickTimeoutMs, tid);
}

Worker::Call Worker::begin_of_record(Request& request, const char* name, const TaskRecord& record,
                                     pid_t tid, std::uint32_t timeout_ms) {
    request.task = static_cast<std::uint32_t>(&record - &table_->tasks[0]);
    Call call = begin(request, name, timeout_ms, tid);
    if (worker_protocol::moves_memory(request.op))
        call.direct = &record.direct;
    if (request.op != Op::undo_restore) // in an undo all others wait to run on
        under_way_.at(call.id).direct = call.direct;
    return call;
}

Worker::Call Worker::begin_checkpoint_direct(const TaskRecord& record, pid_t tid) {
    Request request = request_of(Op::checkpoint_direct, record.pid);
    return begin_of_record(request, "cuCheckpointProcessCheckpoint", record, tid,
                           config_.driver_timeout_ms);
}

Worker::Call Worker::begin_restore_direct(const TaskRecord& record,
                                          const std::vector<GpuMove>& moves, pid_t tid) {
    Request request = request_of(Op::restore_direct, record.pid);
    add_moves(request, moves);
    return begin_of_record(request, "cuCheckpointProcessRestore", record, tid,
                           config_.driver_timeout_ms);
}

Worker::Call Worker::begin_undo_restore(const TaskRecord& record, pid_t tid) {
    Request request = request_of(Op::undo_restore, record.pid);
    Call call = begin_of_record(request, "cuCheckpointProcessRestore", record, tid,
                                config_.driver_timeout_ms);
    call.undoes = true;
    return call;
}

Worker::Call Worker::begin_undo_unlock(const TaskRecord& record, pid_t tid) {
    Request request = request_of(Op::undo_unlock, record.pid);
    return begin_of_record(request, "cuCheckpointProcessUnlock", record, tid, kQuickTimeoutMs);
}

void Worker::restore_direct(const TaskRecord& record) {
    finish(begin_undo_restore(record, watched_));
}

void Worker::lock(int pid, std::uint32_t timeout_ms) {
    finish(begin_lock(pid, timeout_ms));
}

void Worker::checkpoint(int pid) {
    finish(begin_checkpoint(pid, watched_));
}

void Worker::restore(int pid, const std::vector<GpuMove>& moves) {
    finish(begin_restore(pid, moves, watched_));
}

void Worker::unlock(int pid) {
    finish(begin_unlock(pid, watched_));
}

} // namespace gpustasis
