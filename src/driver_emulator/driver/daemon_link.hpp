// SPDX-License-Identifier: Apache-2.0
/// The client's end of its connection to the daemon.
#pragma once

#include "driver_emulator/wire.hpp"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <vector>

namespace gpustasis::emulator {

/// Where the daemon listens: $GPUSTASIS_EMULATOR, else the default instance. Copied once; the path
/// in memory is what a restored process uses.
[[nodiscard]] const char* daemon_path() noexcept;

/// Where files stand for the device files of the GPUs ("nvidia0", ...) and for "nvidia-uvm":
/// $GPUSTASIS_EMULATOR_DEV, as a container has a /dev of its own, else "dev" beside the daemon's
/// socket. Copied once, as daemon_path().
[[nodiscard]] const char* device_directory() noexcept;

/// Asks what the machine is; of its GPUs, those whose files are in device_directory(). Needs no
/// client. Returns false if no daemon answers.
[[nodiscard]] bool ask_info(DaemonInfo& info) noexcept;

/// Asks who uses a GPU, named by its minor number. Returns false if no daemon answers.
[[nodiscard]] bool ask_processes(unsigned gpu, ProcessList& list) noexcept;

/// Asks what shall happen in an operation; without a daemon nothing special does.
[[nodiscard]] OperationPlan ask_plan(Operation operation) noexcept;

/// Asks for the file of the LinkPage, which is the caller's to close. -1 if no daemon answers.
[[nodiscard]] int ask_links() noexcept;

/// Thread-safe. Allocates no memory, but where it says so.
class DaemonLink {
public:
    /// Becomes a client: a worker now holds this process's VRAM. `device` and `mapping` are for
    /// `gpustasis emulator status`.
    Result open(const char* device, const char* mapping) noexcept;

    /// Leaves: the VRAM is gone. Call with no launch pending.
    void close() noexcept;

    [[nodiscard]] bool is_open() const noexcept { return socket_ >= 0; }

    /// On success *memory is the file of this client's VRAM on the GPU: offset 0 is window_base.
    Result attach_device(unsigned gpu, std::uint64_t window_base, std::uint64_t window_size,
                         int* memory) noexcept;
    Result map_segment(unsigned gpu, std::uint64_t offset, std::uint64_t size) noexcept;
    Result unmap_segment(unsigned gpu, std::uint64_t offset, std::uint64_t size) noexcept;
    Result memory_info(unsigned gpu, std::uint64_t* free, std::uint64_t* total) noexcept;

    Result load_module(std::uint64_t module, const void* image, std::size_t size) noexcept;
    Result unload_module(std::uint64_t module) noexcept;
    Result find_function(std::uint64_t module, const char* name, FunctionReply& reply) noexcept;

    /// Queues a launch; *sequence is its number. Throws std::bad_alloc.
    Result launch(LaunchRequest& request, const void* params, std::uint64_t* sequence);

    /// Queues work that is not the GPU's: in its turn the driver's thread calls `body` with success,
    /// or with the error that the context has died of. What it returns, if not success, is what the
    /// context dies of. Throws std::bad_alloc.
    void defer(std::function<Result(Result)> body, std::uint64_t* sequence);

    /// Whether that queue is empty and the driver's thread holds no lock.
    [[nodiscard]] bool is_idle() const noexcept { return pending_.load() == 0; }

    /// Does what comes next in that queue, or sleeps for a moment. For the driver's thread alone.
    void do_deferred() noexcept;

    [[nodiscard]] std::uint64_t submitted() const noexcept { return submitted_.load(); }
    [[nodiscard]] bool is_done(std::uint64_t sequence) const noexcept;

    /// When a launch that is done ended; 0 if that is too long ago to be known.
    [[nodiscard]] std::uint64_t done_ns(std::uint64_t sequence) const noexcept;

    /// Waits for a launch, at most `milliseconds` (0 = for ever). Returns not_ready if that was not
    /// enough, or the sticky error.
    Result wait(std::uint64_t sequence, std::uint32_t milliseconds = 0) noexcept;

    /// From now on every call answers `error`: the context is dead.
    void lose(Result error) noexcept { lost_ = static_cast<int>(error); }

    /// The error that a launch left behind, which every later call answers.
    [[nodiscard]] Result sticky_error() const noexcept;

private:
    Result exchange(const void* request, std::size_t size, WireReply& reply, int send_fd = -1,
                    int* receive_fd = nullptr) noexcept;
    [[nodiscard]] bool is_worker_gone() const noexcept;

    /// A launch, or a body; in the queue because a body stands before it.
    struct Deferred {
        std::uint64_t sequence = 0;
        std::function<Result(Result)> body;
        LaunchRequest request{};
        std::vector<unsigned char> params;
    };

    void finish(std::uint64_t sequence) noexcept;

    std::mutex mutex_;
    std::deque<Deferred> deferred_;           ///< guarded by mutex_; the front one may be under way
    std::atomic<std::uint32_t> deferrals_{0}; ///< futex
    std::atomic<std::uint32_t> pending_{0};   ///< of deferred_
    int socket_ = -1;
    CompletionPage* page_ = nullptr;
    std::atomic<std::uint64_t> submitted_{0};
    std::atomic<int> lost_{0}; ///< the sticky error when the worker is gone
};

} // namespace gpustasis::emulator
