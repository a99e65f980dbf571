// SPDX-License-Identifier: Apache-2.0
#include "driver_emulator/driver/staging.hpp"

#include "driver_emulator/driver/driver.hpp"
#include "driver_emulator/driver/driver_threads.hpp"
#include "driver_emulator/driver/futex.hpp"
#include "driver_emulator/driver/gpu_change.hpp"
#include "driver_emulator/driver/helper_threads.hpp"
#include "driver_emulator/driver/passing_fd.hpp"
#include "driver_emulator/driver/staging_memory.hpp"

#include <algorithm>
#include <csignal>
#include <cstring>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/mman.h>

namespace gpustasis::emulator {
namespace {

constexpr std::uint64_t kPieceBytes = std::uint64_t{16} << 20; // what a helper copies at a time
constexpr std::size_t kZeroCheckBytes = 65536;                 // untouched VRAM stays untouched

/// Walks the segments of all devices piece by piece, for several threads at once. To the host a piece is a part of a
/// segment; to the device it is all of a GPU, a file that one thread at a time can write to: others would spin for it.
struct CopyJob {
    Driver* driver;
    bool to_host;
    std::uint64_t bytes = ~std::uint64_t{0}; ///< how many of all are copied
    std::atomic<std::uint64_t> next_piece{0};
    std::atomic<int> result{0};
};

/// What the GPU with the most holds: each has a link of its own, and they copy side by side.
std::uint64_t most_bytes(Driver& driver) noexcept {
    std::uint64_t most = 0;
    for (unsigned i = 0; i < driver.objects.device_count; ++i) {
        std::uint64_t held = 0;
        for (const auto& [address, segment] : driver.objects.devices[i].vram.segments()) {
            held += segment.size;
        }
        most = held > most ? held : most;
    }
    return most;
}

bool is_zero(const char* bytes, std::size_t size) noexcept {
    return bytes[0] == 0 && std::memcmp(bytes, bytes + 1, size - 1) == 0;
}

Result copy_piece(Vram& vram, std::uint64_t address, char* host, std::uint64_t size,
                  bool to_host) noexcept {
    if (to_host) {
        return vram.read(address, host, size);
    }
    for (std::uint64_t done = 0; done < size; done += kZeroCheckBytes) {
        if (is_zero(host + done, kZeroCheckBytes)) {
            continue;
        }
        const Result result = vram.write(address + done, host + done, kZeroCheckBytes);
        if (result != Result::success) {
            return result;
        }
    }
    return Result::success;
}

void copy_pieces(void* argument) noexcept {
    CopyJob& job = *static_cast<CopyJob*>(argument);
    std::uint64_t mine = job.next_piece.fetch_add(1);
    std::uint64_t next = 0;   // piece
    std::uint64_t before = 0; // bytes of the segments before this one
    const Vram* last = nullptr;
    for_each_segment(*job.driver, [&](Vram& vram, std::uint64_t address, Segment& segment) {
        const std::uint64_t allowed = job.bytes - std::min(job.bytes, before);
        const std::uint64_t wanted = std::min(segment.size, allowed);
        before += segment.size;
        for (std::uint64_t offset = 0; offset < wanted; offset += kPieceBytes) {
            if (job.to_host || last != &vram) {
                last = &vram;
                if (next > mine) { // and so this one has done with its own
                    mine = job.next_piece.fetch_add(1);
                }
                ++next;
            }
            if (next - 1 != mine || job.result.load() != 0) {
                continue;
            }
            const Result result =
                copy_piece(vram, address + offset, static_cast<char*>(segment.staging) + offset,
                           std::min(wanted - offset, kPieceBytes), job.to_host);
            if (result != Result::success) {
                job.result = static_cast<int>(result);
            }
        }
    });
}

bool is_half(const OperationPlan& plan) noexcept {
    return plan.action == FaultAction::hang_half || plan.action == FaultAction::end_thread;
}

Result copy_all(Driver& driver, bool to_host, const OperationPlan& plan) noexcept {
    const std::uint32_t ms_per_gib = to_host ? plan.d2h_ms_per_gib : plan.h2d_ms_per_gib;
    const std::uint64_t start = now_ns();
    CopyJob job{&driver, to_host};
    if (is_half(plan)) {
        job.bytes = 0;
        for_each_segment(driver, [&job](Vram&, std::uint64_t, const Segment& segment) {
            job.bytes += segment.size / 2; // a multiple of what is looked at for zeros
        });
    }
    cpu_set_t cpus;
    const bool known = sched_getaffinity(0, sizeof cpus, &cpus) == 0;
    HelperThreads::run(known && CPU_COUNT(&cpus) > 2 ? HelperThreads::kMax : 2, copy_pieces, &job);
    if (plan.leftovers != 0) {
        HelperThreads::leave_memory();
    }
    const std::uint64_t wanted_ms = most_bytes(driver) * ms_per_gib >> 30;
    const std::uint64_t taken_ms = (now_ns() - start) / 1'000'000;
    if (taken_ms < wanted_ms) {
        sleep_ms(static_cast<std::uint32_t>(wanted_ms - taken_ms));
    }
    return static_cast<Result>(job.result.load());
}

} // namespace

void hang() noexcept {
    while (true) {
        sleep_ms(1000);
    }
}

void fail_midway(const OperationPlan& plan) noexcept {
    if (plan.action == FaultAction::hang_half) {
        hang();
    }
    if (plan.action == FaultAction::end_thread) {
        syscall(SYS_exit, 0);
    }
    if (plan.action != FaultAction::die) {
        return;
    }
    if (plan.code == 0) {
        syscall(SYS_exit_group, 1);
    }
    // As if the fault happened in this thread: not blocked, not handled by the program.
    struct sigaction action {};
    action.sa_handler = SIG_DFL;
    sigaction(plan.code, &action, nullptr);
    sigset_t mask;
    sigemptyset(&mask);
    sigaddset(&mask, plan.code);
    syscall(SYS_rt_sigprocmask, SIG_UNBLOCK, &mask, nullptr, std::size_t{8});
    syscall(SYS_tgkill, getpid(), syscall(SYS_gettid), plan.code);
}

Result stage_device_memory(Driver& driver, const OperationPlan& plan) noexcept {
    if (driver.link.is_open() && driver.link.sticky_error() != Result::success) {
        return driver.link.sticky_error();
    }
    open_gaps(driver, plan);
    Result result = allocate_staging(driver, plan);
    if (result == Result::success) {
        result = copy_all(driver, true, plan);
    }
    fail_midway(plan);
    if (plan.action == FaultAction::oom) {
        result = Result::out_of_memory;
    }
    const PassingFd placeholder(eventfd(0, 0));
    if (result == Result::success && placeholder.get() < 0) {
        result = Result::operating_system;
    }
    if (result == Result::success) {
        result = open_later_event(driver.channel, driver.info.cloexec != 0);
    }
    if (result != Result::success) {
        free_staging(driver);
        static_cast<void>(close_gaps(driver));
        return result;
    }
    HelperThreads::linger(plan.lingering_ms);
    settle_events(driver);
    release_gpus(driver, placeholder.get());
    return Result::success;
}

Result unstage_device_memory(Driver& driver, const OperationPlan& plan, const GpuPair* pairs,
                             unsigned pair_count, bool& poisoned) noexcept {
    DaemonInfo now{};
    if (!ask_info(now)) {
        return Result::operating_system;
    }
    unsigned gpus[kMaxGpus] = {};
    Result result = choose_gpus(driver, now, pairs, pair_count, gpus);
    if (result != Result::success) {
        return result;
    }
    const bool had_context = driver.had_context;
    result = take_gpus(driver, now, gpus, had_context);
    if (result == Result::success && is_half(plan)) {
        result = copy_all(driver, false, plan);
    }
    fail_midway(plan);
    if (result == Result::success && plan.action == FaultAction::oom) {
        result = Result::out_of_memory;
    }
    if (result == Result::success) {
        result = copy_all(driver, false, plan);
    }
    if (result == Result::success && had_context) {
        result = reload_modules(driver);
    }
    if (result != Result::success) {
        const PassingFd placeholder(eventfd(0, 0));
        release_gpus(driver, placeholder.get());
        poisoned = true;
        return result;
    }
    adopt_gpus(driver, now, gpus);
    free_staging(driver);
    poisoned = close_gaps(driver) != Result::success;
    return poisoned ? Result::out_of_memory : Result::success;
}

} // namespace gpustasis::emulator
