// SPDX-License-Identifier: Apache-2.0
#include "driver_emulator/driver/checkpoint.hpp"

#include "driver_emulator/driver/driver.hpp"
#include "driver_emulator/driver/driver_threads.hpp"
#include "driver_emulator/driver/futex.hpp"
#include "driver_emulator/driver/staging.hpp"
#include "driver_emulator/driver/target_storage.hpp"

#include <csignal>
#include <cstring>
#include <fcntl.h>
#include <poll.h>

namespace gpustasis::emulator {
namespace {

/// Callers take turns, so a new request means that the last caller has died or given up. Lock looks
/// at that when it is done: the driver, too, keeps the next caller waiting for the GPU's work.
bool is_abandoned(const Driver& driver) noexcept {
    pollfd event{driver.channel.request[0], POLLIN, 0};
    return poll(&event, 1, 0) == 1 && (event.revents & POLLIN) != 0;
}

Result lock(Driver& driver, const ChannelRequest& request, const OperationPlan& plan) noexcept {
    const std::uint64_t start = now_ns();
    const auto is_late = [&] {
        return request.timeout_ms != 0 &&
               now_ns() - start >= request.timeout_ms * std::uint64_t{1'000'000};
    };
    const auto give_up = [&](Result result) {
        driver.gate.open();
        return result;
    };
    driver.gate.close();
    for (std::uint32_t drained_ms = 0; drained_ms < plan.lock_drain_ms; ++drained_ms) {
        if (is_late()) {
            return give_up(Result::not_ready);
        }
        sleep_ms(1);
    }
    while (!driver.gate.is_empty()) {
        if (is_late()) {
            return give_up(Result::not_ready);
        }
        driver.gate.wait_for_leave();
    }
    while (!driver.link.is_done(driver.link.submitted())) {
        if (is_late()) {
            return give_up(Result::not_ready);
        }
        if (driver.link.wait(driver.link.submitted(), 10) != Result::not_ready) {
            break; // done, or the worker is gone and will never be
        }
    }
    // Their threads may be stopped from now on, with a lock in hand.
    while (!driver.link.is_idle() || driver.lanes_pending.load() != 0) {
        if (is_late()) {
            return give_up(Result::not_ready);
        }
        sleep_ms(1);
    }
    if (is_abandoned(driver)) {
        return give_up(Result::not_ready);
    }
    hold_event_thread(driver);
    driver.state = ProcessState::locked;
    return Result::success;
}

constexpr int kLast580 = 13000; // the API versions of driver branches 580, 595 and 610
constexpr int kFirst610 = 13030;
constexpr std::uint32_t kNcclFailsAfterMs = 1400;

void die(int signal) noexcept {
    OperationPlan plan{};
    plan.action = FaultAction::die;
    plan.code = signal;
    fail_midway(plan);
}

/// What Checkpoint does to programs that it cannot save (reference: measured on 580.178 and 595.84).
Result meet_unsupported(Driver& driver) noexcept {
    if (!driver.objects.operations.empty()) {
        return Result::not_supported; // it holds memory of others
    }
    const int api = driver.info.api_version;
    if (driver.info.managed_memory != 0) {
        if (api > kLast580) {
            driver.link.lose(Result::launch_failed);
        }
        return Result::not_supported;
    }
    if (driver.info.nccl != 0 && api > kLast580) {
        sleep_ms(kNcclFailsAfterMs);
        die(SIGABRT); // as the library does in its own threads
    }
    if (driver.info.cuda_ipc != 0 && api > kLast580 && api < kFirst610) {
        sleep_ms(driver.info.cuda_ipc);
        die(SIGKILL);
    }
    return Result::success;
}

Result checkpoint(Driver& driver, const ChannelRequest& request,
                  const OperationPlan& plan) noexcept {
    if (const Result refused = meet_unsupported(driver); refused != Result::success) {
        return refused;
    }
    if (request.wants_storage != 0) {
        return begin_storage_checkpoint(driver, request, plan);
    }
    const Result result = stage_device_memory(driver, plan);
    if (result == Result::success) {
        driver.state = ProcessState::checkpointed;
    }
    return result;
}

Result restore(Driver& driver, const ChannelRequest& request, const OperationPlan& plan) noexcept {
    if (driver.poisoned) {
        return Result::operating_system;
    }
    if (driver.info.cuda_ipc != 0 && driver.info.api_version <= kLast580) {
        driver.poisoned = true; // it checkpoints such programs, and never restores them
        return Result::invalid_value;
    }
    if ((request.wants_storage != 0) != driver.storage.contents_outside) {
        return Result::illegal_state; // its contents are not where the caller thinks
    }
    if (request.wants_storage != 0) {
        return begin_storage_restore(driver, request, plan, driver.poisoned);
    }
    const Result result =
        unstage_device_memory(driver, plan, request.pairs, request.pair_count, driver.poisoned);
    if (result == Result::success) {
        driver.state = ProcessState::locked;
    }
    return result;
}

Result unlock(Driver& driver) noexcept {
    driver.state = ProcessState::running;
    resume_event_thread();
    driver.gate.open();
    return Result::success;
}

Result perform(Driver& driver, const ChannelRequest& request, const OperationPlan& plan) noexcept {
    const ProcessState state = driver.state.load();
    const auto needs = [state](ProcessState wanted) { return state == wanted; };
    switch (request.operation) {
    case Operation::get_state: return Result::success;
    case Operation::lock:
        return needs(ProcessState::running) ? lock(driver, request, plan) : Result::illegal_state;
    case Operation::checkpoint:
        return needs(ProcessState::locked) ? checkpoint(driver, request, plan)
                                           : Result::illegal_state;
    case Operation::restore:
        return needs(ProcessState::checkpointed) ? restore(driver, request, plan)
                                                 : Result::illegal_state;
    case Operation::unlock:
        return needs(ProcessState::locked) ? unlock(driver) : Result::illegal_state;
    case Operation::complete: return complete_storage(driver, request);
    default: return Result::invalid_value;
    }
}

Result perform_planned(Driver& driver, const ChannelRequest& request,
                       const OperationPlan& plan) noexcept {
    const auto code = static_cast<Result>(plan.code);
    switch (plan.action) {
    case FaultAction::error: return code;
    case FaultAction::hang: hang();
    case FaultAction::failed: driver.state = ProcessState::failed; return code;
    case FaultAction::state:
    case FaultAction::lie: return Result::success;
    case FaultAction::fail_after: {
        const Result result = perform(driver, request, plan);
        return result == Result::success ? code : result;
    }
    case FaultAction::die:
    case FaultAction::oom:
    case FaultAction::hang_half:
    case FaultAction::end_thread:
        if (request.operation != Operation::checkpoint && request.operation != Operation::restore) {
            fail_midway(plan);
            return Result::out_of_memory;
        }
        [[fallthrough]]; // in these two it happens half-way
    case FaultAction::twice:
    case FaultAction::nonsense:
    case FaultAction::wrong:
    case FaultAction::close:
    case FaultAction::race: // cuInit's
    case FaultAction::none: return perform(driver, request, plan);
    }
    return Result::unknown;
}

/// The reply pipe has room for hundreds of replies that nobody took, and callers empty it first.
void send_reply(Driver& driver, ChannelReply reply, const OperationPlan& plan) noexcept {
    std::size_t size = sizeof reply;
    switch (plan.action) {
    case FaultAction::state: reply.state = static_cast<ProcessState>(plan.code); break;
    case FaultAction::nonsense: size /= 2; break;
    case FaultAction::wrong: std::memset(&reply, 0x5a, sizeof reply); break;
    case FaultAction::twice:
        static_cast<void>(write(driver.channel.reply[1], &reply, sizeof reply) == 0);
        break;
    case FaultAction::close: close(driver.channel.reply[1]); return;
    default: break;
    }
    static_cast<void>(write(driver.channel.reply[1], &reply, size) == 0);
}

/// A request is written in one piece; anything else in the pipe is garbage and is dropped.
bool read_request(const Driver& driver, ChannelRequest& request) noexcept {
    const ssize_t got = read(driver.channel.request[0], &request, sizeof request);
    return got == static_cast<ssize_t>(sizeof request) && request.magic == kChannelMagic &&
           request.pair_count <= kMaxGpus && request.context_count <= kMaxGpus;
}

} // namespace

void answer_request(Driver& driver) noexcept {
    ChannelRequest request;
    if (!read_request(driver, request)) {
        return;
    }
    if (request.operation != Operation::complete) { // whose caller is there
        end_abandoned_storage(driver);
    }
    const OperationPlan plan = ask_plan(request.operation);
    sleep_ms(plan.delay_ms);
    const Result result = perform_planned(driver, request, plan);
    const ProcessState state = driver.state.load();
    send_reply(driver, {kChannelMagic, result, request.id, state, driver.storage.table}, plan);
}

} // namespace gpustasis::emulator
