// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/long_calls.hpp"

#include <algorithm>
#include <thread>
#include <utility>

namespace gpustasis {

namespace {
constexpr std::chrono::seconds kOfTheDead{5};
constexpr std::chrono::seconds kStopped{3};
} // namespace

void LongCalls::begin(pid_t pid, std::chrono::milliseconds limit, std::function<void()> work,
                      const MovedAt* moved_at) {
    std::erase_if(calls_, [](const Call& call) { return call.has_ended->load(); });
    auto has_ended = std::make_shared<std::atomic<bool>>(false);
    calls_.push_back({.pid = pid,
                      .begin = Clock::now(),
                      .limit = limit,
                      .moved_at = moved_at,
                      .has_ended = has_ended});
    try {
        std::thread([work = std::move(work), has_ended, last_end = last_end_] {
            work();
            *last_end = Clock::now().time_since_epoch().count();
            *has_ended = true;
        }).detach();
    } catch (...) {
        calls_.pop_back();
        throw;
    }
}

bool LongCalls::hangs(Call& call) noexcept {
    if (call.has_ended->load())
        return false;
    see_stop();
    Clock::time_point last{Clock::duration(last_end_->load())};
    for (const Call& one : calls_)
        if (one.moved_at != nullptr)
            last = std::max(last, Clock::time_point(Clock::duration(one.moved_at->load())));
    call.was_found_hanging =
        call.was_found_hanging || Clock::now() - std::max(call.begin, last) >= call.limit;
    return call.was_found_hanging;
}

void LongCalls::give_up(pid_t pid) noexcept {
    for (Call& call : calls_)
        if (call.pid == pid) {
            call.begin = Clock::now();
            call.limit = std::min<Clock::duration>(call.limit, kOfTheDead);
        }
}

void LongCalls::begin_turn() noexcept {
    see_stop();
    turn_ = Clock::now();
}

void LongCalls::see_stop() noexcept {
    const auto now = Clock::now();
    if (turn_ == Clock::time_point{} || now - turn_ < kStopped)
        return;
    turn_ = now;
    *last_end_ = now.time_since_epoch().count();
}

bool LongCalls::hangs(pid_t pid) noexcept {
    return std::ranges::any_of(calls_, [&](Call& call) { return call.pid == pid && hangs(call); });
}

bool LongCalls::is_in(pid_t pid) const noexcept {
    return std::ranges::any_of(
        calls_, [&](const Call& call) { return call.pid == pid && !call.has_ended->load(); });
}

bool LongCalls::any_works() noexcept {
    bool works = false;
    for (Call& call : calls_) // each is looked at: one that hangs is to be found when it does
        works |= !call.has_ended->load() && !hangs(call);
    return works;
}

} // namespace gpustasis
