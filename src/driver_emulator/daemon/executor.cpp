// SPDX-License-Identifier: Apache-2.0
#include "driver_emulator/daemon/executor.hpp"

#include <climits>
#include <csignal>
#include <ctime>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace gpustasis::emulator {
namespace {

CompletionPage* crash_page = nullptr; // for the signal handler

std::uint64_t now_ns() {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000 +
           static_cast<std::uint64_t>(time.tv_nsec);
}

void wake_client(CompletionPage& page) {
    page.ticks.fetch_add(1);
    syscall(SYS_futex, &page.ticks, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

/// A kernel that touches what is not its own takes the worker with it, and the client is told why.
void report_crash(int) {
    crash_page->error = static_cast<int>(Result::illegal_address);
    wake_client(*crash_page);
    _exit(1);
}

} // namespace

Executor::Executor(CompletionPage& page) : page_(page) {
    crash_page = &page;
    struct sigaction action {};
    action.sa_handler = report_crash;
    for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) {
        sigaction(signal, &action, nullptr);
    }
    thread_ = std::thread([this] { run_all(); });
}

void Executor::submit(Launch launch) {
    {
        const std::lock_guard lock(mutex_);
        queue_.push_back(std::move(launch));
    }
    arrived_.notify_one();
}

void Executor::run_all() {
    while (true) {
        Launch launch;
        {
            std::unique_lock lock(mutex_);
            arrived_.wait(lock, [this] { return !queue_.empty(); });
            launch = std::move(queue_.front());
            queue_.pop_front();
        }
        if (launch.refused != Result::success) {
            page_.error = static_cast<int>(launch.refused);
        } else if (page_.error == 0) { // after an error a context is dead, as on a real GPU
            launch.run(launch.params.data(), launch.grid, launch.block);
        }
        finish(launch.sequence);
    }
}

void Executor::finish(std::uint64_t sequence) {
    page_.done_ns[sequence % CompletionPage::kTimes] = now_ns();
    page_.completed = sequence;
    wake_client(page_);
}

} // namespace gpustasis::emulator
