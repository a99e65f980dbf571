// SPDX-License-Identifier: Apache-2.0
#include "driver_emulator/driver/driver_threads.hpp"

#include "driver_emulator/driver/checkpoint.hpp"
#include "driver_emulator/driver/driver.hpp"
#include "driver_emulator/driver/futex.hpp"

#include <csignal>
#include <poll.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <utility>

namespace gpustasis::emulator {
namespace {

constexpr std::size_t kStackBytes = std::size_t{1} << 20;

std::atomic<std::uint32_t> event_thread_held{0}; // futex
bool context_threads_started = false;
std::atomic<std::uint32_t> restore_thread_started{0};

void* run_restore_thread(void* argument) {
    Driver& driver = *static_cast<Driver*>(argument);
    char name[kThreadNameLength + 1];
    format_thread_name(driver.channel.ends(), name);
    prctl(PR_SET_NAME, name);
    driver.restore_thread = static_cast<pid_t>(syscall(SYS_gettid));
    restore_thread_started = 1;
    futex_wake(restore_thread_started);
    while (true) {
        pollfd events[] = {{driver.channel.request[0], POLLIN, 0},
                           {driver.channel.event, POLLIN, 0},
                           {driver.channel.later_event, POLLIN, 0}};
        if (poll(events, 3, -1) > 0 && (events[0].revents & POLLIN) != 0) {
            answer_request(driver);
        }
    }
    return nullptr;
}

/// Waits for events that the emulated GPUs never have.
void* run_event_thread(void* argument) {
    const EventFiles& files = static_cast<Driver*>(argument)->event_files;
    while (true) {
        if (event_thread_held.load() != 0) {
            futex_wait(event_thread_held, 1, 0);
            continue;
        }
        pollfd events[] = {
            {files.events[0], POLLIN, 0}, {files.events[1], POLLIN, 0}, {files.pipe[0], POLLIN, 0}};
        std::uint64_t count = 0;
        if (poll(events, 3, -1) > 0) {
            static_cast<void>(read(files.events[0], &count, sizeof count) == 0);
        }
    }
    return nullptr;
}

/// Of an NCCL process group: PyTorch's threads that watch it.
void* run_nccl_thread(void*) {
    static const std::atomic<std::uint32_t> never{0};
    while (true) {
        futex_wait(never, 0, 0);
    }
    return nullptr;
}

/// Does copies and host functions of streams, in their turn.
void* run_stream_thread(void* argument) {
    while (true) {
        static_cast<Driver*>(argument)->link.do_deferred();
    }
    return nullptr;
}

struct Named {
    const char* name;
    void* (*body)(void*);
    void* argument;
    std::atomic<std::uint32_t> has_begun; // futex
};

/// Names itself: of another thread /proc may not know, as in a pid namespace without one of its own.
void* run_named_thread(void* argument) {
    Named& named = *static_cast<Named*>(argument);
    const auto [body, of_body] = std::pair(named.body, named.argument);
    if (named.name != nullptr) {
        prctl(PR_SET_NAME, named.name);
    }
    named.has_begun = 1;
    futex_wake(named.has_begun); // if nobody is there any more, it wakes nobody
    return body(of_body);
}

} // namespace

bool start_driver_thread(void* (*body)(void*), void* argument, const char* name) noexcept {
    Named named{name, body, argument, {}};
    sigset_t all;
    sigset_t old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, kStackBytes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_t thread{};
    const int error = pthread_create(&thread, &attributes, run_named_thread, &named);
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &old, nullptr);
    while (error == 0 && named.has_begun.load() == 0) {
        futex_wait(named.has_begun, 0, 0);
    }
    return error == 0;
}

Result start_restore_thread(Driver& driver) noexcept {
    restore_thread_started = 0;
    if (!start_driver_thread(run_restore_thread, &driver)) {
        return Result::operating_system;
    }
    while (restore_thread_started.load() == 0) {
        futex_wait(restore_thread_started, 0, 0);
    }
    return Result::success;
}

Result start_context_threads(Driver& driver) noexcept {
    if (context_threads_started) {
        return Result::success;
    }
    if (!start_driver_thread(run_event_thread, &driver, "cuda-EvtHandlr") ||
        !start_driver_thread(run_stream_thread, &driver)) {
        return Result::operating_system;
    }
    for (const char* name : {"pt_nccl_watchdg", "pt_nccl_heartbt"}) {
        if (driver.info.nccl != 0 && !start_driver_thread(run_nccl_thread, nullptr, name)) {
            return Result::operating_system;
        }
    }
    context_threads_started = true;
    return Result::success;
}

void hold_event_thread(Driver& driver) noexcept {
    const std::uint64_t one = 1;
    event_thread_held = 1;
    static_cast<void>(write(driver.event_files.events[0], &one, sizeof one) == 0);
}

void resume_event_thread() noexcept {
    event_thread_held = 0;
    futex_wake(event_thread_held);
}

} // namespace gpustasis::emulator
