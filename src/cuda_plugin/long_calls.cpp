// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/long_calls.hpp"

#include <algorithm>
#include <thread>
#include <utility>

namespace gpustasis {

using Clock = std::chrono::steady_clock;

void LongCalls::begin(pid_t pid, std::chrono::milliseconds limit, std::function<void()> work) {
    std::erase_if(calls_, [](const Call& call) { return call.has_ended->load(); });
    auto has_ended = std::make_shared<std::atomic<bool>>(false);
    calls_.push_back({.pid = pid, .until = Clock::now() + limit, .has_ended = has_ended});
    try {
        std::thread([work = std::move(work), has_ended] {
            work();
            *has_ended = true;
        }).detach();
    } catch (...) {
        calls_.pop_back();
        throw;
    }
}

bool LongCalls::hangs(pid_t pid) const noexcept {
    return std::ranges::any_of(calls_, [&](const Call& call) {
        return call.pid == pid && !call.has_ended->load() && Clock::now() >= call.until;
    });
}

bool LongCalls::any_works() const noexcept {
    return std::ranges::any_of(calls_, [](const Call& call) {
        return !call.has_ended->load() && Clock::now() < call.until;
    });
}

} // namespace gpustasis
