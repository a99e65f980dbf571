// SPDX-License-Identifier: Apache-2.0
/// The driver's custom storage (CUDA 13.4): Checkpoint and Restore that hand the GPU memory of another process over to
/// this one, mapped on the GPUs, in place of host memory of that process. Source: cuda.h 13.5, "CUDA Checkpointing".
///
/// What the driver does not offer: a way back. Once checkpoint() has returned, the only copy of the memory is that
/// mapping, until it was copied; once restore() has, the process lacks all of it until it was filled. complete() ends
/// either, whatever was copied by then.
#pragma once

#include "core/image_info.hpp"
#include "device_memory/driver_abi.hpp"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace gpustasis {

// member, symbol in libcuda.so.1 (CUDA 13.4 or later), parameters; all return CUresult
#define GPUSTASIS_STORAGE_SYMBOLS(X)                                                               \
    X(device_get_count, cuDeviceGetCount, (int* count))                                            \
    X(device_get, cuDeviceGet, (int* device, int ordinal))                                         \
    X(device_get_uuid, cuDeviceGetUuid_v2, (std::uint8_t * uuid, int device))                      \
    X(context_retain, cuDevicePrimaryCtxRetain, (driver::Context * context, int device))           \
    X(context_release, cuDevicePrimaryCtxRelease_v2, (int device))                                 \
    X(context_set, cuCtxSetCurrent, (driver::Context context))                                     \
    X(context_synchronize, cuCtxSynchronize, ())                                                   \
    X(stream_create, cuStreamCreate, (driver::Stream * stream, unsigned flags))                    \
    X(stream_destroy, cuStreamDestroy_v2, (driver::Stream stream))                                 \
    X(stream_context, cuStreamGetCtx, (driver::Stream stream, driver::Context * context))          \
    X(stream_synchronize, cuStreamSynchronize, (driver::Stream stream))                            \
    X(host_alloc, cuMemHostAlloc, (void** memory, std::size_t size, unsigned flags))               \
    X(host_free, cuMemFreeHost, (void* memory))                                                    \
    X(to_host, cuMemcpyDtoHAsync_v2,                                                               \
      (void* to, driver::DevicePtr from, std::size_t size, driver::Stream stream))                 \
    X(to_device, cuMemcpyHtoDAsync_v2,                                                             \
      (driver::DevicePtr to, const void* from, std::size_t size, driver::Stream stream))           \
    X(set_bytes, cuMemsetD8Async,                                                                  \
      (driver::DevicePtr to, unsigned char value, std::size_t count, driver::Stream stream))       \
    X(checkpoint, cuCheckpointProcessCheckpoint, (int pid, driver::CheckpointArgs* args))          \
    X(restore, cuCheckpointProcessRestore, (int pid, driver::RestoreArgs* args))                   \
    X(complete, cuCheckpointOperationComplete, (void* handle))

/// Page-locked memory and streams for copies from and to one GPU.
struct CopyLane {
    static constexpr std::size_t kSize =
        std::size_t{64} << 20; ///< bytes: a stripe, so that all GPUs copy ahead at once
    static constexpr std::size_t kStreams =
        2; ///< more than four make copies slower (measured by others on an A100)
    std::byte* memory = nullptr;
    driver::Stream streams[kStreams] = {};
};

/// All that one GPU holds of a process whose memory is handed over.
struct DeviceMemory {
    Id uuid{}; ///< of the GPU
    driver::Context context = nullptr;
    driver::DevicePtr address = 0; ///< in this process, until the operation is complete
    std::uint64_t size = 0;        ///< bytes
    /// The driver's own, with what it may still do to that memory, and its context; nullptr: that cannot be told.
    driver::Stream stream = nullptr;
    driver::Context stream_context = nullptr;
};

/// Methods may be called from several threads at once, for different processes. Every error names the call.
class CustomStorage {
public:
    /// `library`: libcuda.so.1 as dlopen() gave it, never closed; `name`: for messages. Throws Error: unsupported if it
    /// lacks a symbol, which it names.
    CustomStorage(void* library, const std::string& name);

    /// cuInit must have been called. Have a primary context on each of `gpus`, for the rest of this process: the driver
    /// refuses an operation of a process one of whose GPUs has none here. On the first `used` of them, which hold memory of
    /// the process, have page-locked memory and streams as well. No GPU of the process has been touched yet. Throws Error:
    /// unsupported for a GPU that CUDA does not list; DriverError, as where a GPU has no memory left for a context.
    void prepare(const std::vector<Id>& gpus, std::size_t used);

    /// Whether each of `gpus` was prepared and has page-locked memory, in use or not.
    bool have_lanes(const std::vector<Id>& gpus);

    /// One operation in flight. If it is destroyed before complete(), the process stays as it is.
    class Operation {
    public:
        Operation() = default;
        Operation(const Operation&) = delete;
        Operation& operator=(const Operation&) = delete;
        ~Operation();
        /// In the driver's order.
        const std::vector<DeviceMemory>& devices() const noexcept { return devices_; }
        /// Once: the driver frees its own record even when it fails. The mapping is gone on return. Throws DriverError.
        void complete();

    private:
        friend class CustomStorage;
        CustomStorage* storage_ = nullptr;
        void* handle_ = nullptr;
        int pid_ = 0;
        std::vector<DeviceMemory> devices_;
        std::vector<driver::Context> reserved_; ///< where a lane is kept for it
    };

    /// Have page-locked memory and streams on each of `gpus`, each once, for one Lane of `of` as long as that is there,
    /// whatever other operations use that are at work on the same GPU. Before checkpoint(), after which nothing may fail.
    /// Throws as prepare().
    void reserve(const std::vector<Id>& gpus, Operation& of);

    /// LOCKED to CHECKPOINTING, which complete() makes CHECKPOINTED. `into`: one that is in no use; nothing that can fail
    /// stands between the driver's answer and it. `held`: set as soon as the driver has answered. Throws DriverError: nothing
    /// was done.
    void checkpoint(int pid, Operation& into, std::atomic<bool>& held);

    /// CHECKPOINTED to RESTORING, which complete() makes LOCKED. `pairs`: as of the driver. Throws DriverError.
    void restore(int pid, std::vector<driver::GpuPair> pairs, Operation& into);

private:
    struct Api {
// NOLINTNEXTLINE(bugprone-macro-parentheses): a declarator and its parameters
#define GPUSTASIS_MEMBER(member, symbol, params) driver::Result(*member) params = nullptr;
        GPUSTASIS_STORAGE_SYMBOLS(GPUSTASIS_MEMBER)
#undef GPUSTASIS_MEMBER
    };
    struct FreeLane {
        const Api* api;
        driver::Context context;
        void operator()(CopyLane* lane) const noexcept;
    };
    using OwnedLane = std::unique_ptr<CopyLane, FreeLane>;

public:
    /// For copies from and to the GPU of `memory`, until the lane is destroyed. Waits for the driver's own stream, and
    /// makes another lane if all are in use. Throws DriverError.
    class Lane {
    public:
        Lane(CustomStorage& storage, const DeviceMemory& memory);
        Lane(const Lane&) = delete;
        Lane& operator=(const Lane&) = delete;
        ~Lane();

        std::byte* memory() const noexcept { return lane_->memory; }
        /// Begin a copy of `size` bytes at `offset` of the GPU's memory, to or from page-locked `host`, or set them to
        /// zero. From any thread, each stream by one at a time. Throw DriverError.
        void to_host(std::size_t stream, void* host, std::uint64_t offset, std::size_t size);
        void to_device(std::size_t stream, const void* host, std::uint64_t offset,
                       std::size_t size);
        void set_zero(std::size_t stream, std::uint64_t offset, std::size_t size);
        /// All that was begun on it is done. Throws DriverError.
        void wait(std::size_t stream);

    private:
        void use_context() const;

        CustomStorage& storage_;
        DeviceMemory device_;
        OwnedLane lane_;
    };

private:
    struct Gpu {
        explicit Gpu(const Id& its_uuid) : uuid(its_uuid) {}
        const Id uuid;
        std::mutex
            making; ///< taken before mutex_, by who makes a context or a lane ahead: both take a while, and
                    ///< mutex_ is waited for while memory is handed over
        // Under mutex_.
        driver::Context context = nullptr; ///< nullptr: it has none yet. Changed under both
        std::vector<OwnedLane> lanes;      ///< not in use; has room for all
        std::size_t lane_count = 0;        ///< with those in use
        std::size_t reserved = 0;          ///< for operations
    };
    struct Retained {
        driver::Context context = nullptr;
        int device = 0;
    };

    Gpu& gpu_of(const Id& uuid);
    Retained retain_context(const Id& wanted) const;
    void make_ready(Gpu& gpu, bool for_copies);
    void make_lanes(Gpu& gpu, driver::Context context);
    using Contexts = std::vector<std::pair<Id, driver::Context>>; ///< of GPUs
    Contexts begin(int pid, Operation& into);
    void take(const driver::StorageInfo* info, const Contexts& contexts, Operation& into);
    OwnedLane make_lane(driver::Context context) const;
    void wait_for_driver(const DeviceMemory& memory);
    Gpu* find(driver::Context context) noexcept;

    Api api_;
    std::mutex mutex_;
    std::deque<Gpu> gpus_; ///< none is ever removed
};

} // namespace gpustasis
