// SPDX-License-Identifier: Apache-2.0
#include "core/workers.hpp"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <system_error>
#include <thread>
#include <vector>

namespace gpustasis {
namespace {

unsigned usable_processors() noexcept {
    cpu_set_t set;
    if (::sched_getaffinity(0, sizeof set, &set) != 0)
        return std::max(1U, std::thread::hardware_concurrency()); // more of them than the set holds
    return static_cast<unsigned>(CPU_COUNT(&set));
}

// Threads inherit the mask of the one that starts them.
class SignalsBlocked {
public:
    SignalsBlocked() noexcept {
        sigset_t all;
        ::sigfillset(&all);
        ::pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    SignalsBlocked(const SignalsBlocked&) = delete;
    SignalsBlocked& operator=(const SignalsBlocked&) = delete;
    ~SignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

private:
    sigset_t before_{};
};

void start(std::vector<std::jthread>& threads, unsigned count, const std::function<void()>& body) {
    const SignalsBlocked blocked;
    try {
        while (threads.size() < count)
            threads.emplace_back(body);
    } catch (const std::system_error&) {
        return; // a limit on threads costs speed, not the checkpoint: those there are go on
    }
}

} // namespace

unsigned worker_count(unsigned wanted, std::uint64_t jobs, Waits waits) noexcept {
    constexpr unsigned kThreadsPerProcessor = 8; // docs/performance.md
    constexpr unsigned kMostThreads = 64;
    unsigned most = wanted;
    if (wanted == 0) {
        most = usable_processors();
        if (waits == Waits::device)
            most = std::max(most, std::min(most * kThreadsPerProcessor, kMostThreads));
    }
    return static_cast<unsigned>(std::clamp<std::uint64_t>(jobs, 1, most));
}

void FirstFailure::record() noexcept {
    const std::lock_guard lock(mutex_);
    if (first_ == nullptr)
        first_ = std::current_exception();
    any_.store(true, std::memory_order_release);
}

void FirstFailure::rethrow() const {
    if (first_ != nullptr)
        std::rethrow_exception(first_);
}

void run_workers(unsigned count, FirstFailure& failure, const std::function<void()>& work) {
    const std::function<void()> body = [&] {
        try {
            work();
        } catch (...) {
            failure.record();
        }
    };
    {
        std::vector<std::jthread> others; // joined at the end of this block
        others.reserve(count - 1);
        start(others, count - 1, body);
        body();
    }
    failure.rethrow();
}

} // namespace gpustasis
