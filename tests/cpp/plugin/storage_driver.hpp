// SPDX-License-Identifier: Apache-2.0
/// A driver with custom storage and an NVML, in the test itself: CustomStorage and DriverLibrary find them there if they
/// are told to load "". GPUs are host memory, what is begun on a stream is done as late as a driver may (when the stream is
/// waited for), no stream waits for another, and a mapping is spoilt when it ends.
#pragma once

#include "sample.hpp"

#include "core/image_info.hpp"
#include "device_memory/driver_abi.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace storage_driver {

using namespace gpustasis;

inline constexpr int kGpus = 2;
inline constexpr driver::Result kRefused = driver::kOutOfMemory;
inline constexpr driver::Result kLinkFailed = 220; // CUDA_ERROR_NVLINK_UNCORRECTABLE

struct OneStream {
    struct Write {
        std::byte* to;         ///< on the GPU, or in the host's memory
        const std::byte* from; ///< nullptr: it is filled
        std::size_t size;
        unsigned char value;
    };
    int gpu = -1; ///< -1: none
    std::vector<Write> begun;
};

/// One operation in flight.
struct Handle {
    driver::StorageInfo info;
    std::array<driver::StoragePerDevice, kGpus> devices;
    int pid = 0;
    bool restores = false;
    std::array<sample::Buffer, kGpus> gathered; ///< what it copies to where it hands it over
};

struct State {
    // What it does.
    std::atomic<int> host_allocs_left = 1000; ///< the next ones fail
    std::atomic<int> streams_left = 1000;
    std::atomic<bool> synchronizes = true;
    std::atomic<int> waits_left = 1'000'000;    ///< for streams that were made; the next ones fail
    std::atomic<bool> knows_own_streams = true; ///< else those that it gives are of no use
    std::atomic<int> broken_gpu = -1;           ///< of which no context can be waited for
    std::atomic<int> full_gpu = -1;             ///< which has no room for a context
    std::atomic<int> contexts_missing = 0;      ///< the next restores want one more
    std::atomic<bool> nvml_answers = true;      ///< which GPU is which device file
    std::atomic<unsigned> nvml_lists = kGpus;
    const std::atomic<bool>* announced = nullptr; ///< what must be set when memory is asked for
    std::mutex context_gate;                      ///< a context is made while nobody holds it
    // Called, if there is one, before it does that of a restore.
    std::function<void()> on_restore, on_copy, on_complete;

    // What it has.
    std::atomic<int> contexts = 0;
    std::atomic<bool> context_waits = false; ///< somebody is about to make one
    std::atomic<int> streams = 0;
    std::atomic<int> hosts = 0; ///< blocks of page-locked memory
    // What was done.
    std::atomic<int> checkpoints = 0, restores = 0;
    std::atomic<int> waits = 0; ///< for streams
    std::atomic<int> late = 0;  ///< host_alloc while memory was handed over
    std::atomic<int> asked = 0;
    std::atomic<int> unannounced = 0;
    std::atomic<int> races = 0; ///< begun on a stream while another still had to write there

    std::mutex mutex;
    int in_flight = 0;
    std::map<const Handle*, std::unique_ptr<Handle>> handles; ///< of those
    std::map<int, std::array<sample::Buffer, kGpus>> memory;  ///< by pid
    std::map<int, int> states;
    std::array<OneStream, 256> made;
    std::array<void*, 256> blocks{};
    std::array<OneStream, kGpus> own;
};
inline State state;

inline void see_announced() {
    if (state.announced != nullptr && !*state.announced)
        ++state.unannounced;
}

inline driver::Result begin(void* on, const OneStream::Write& write) {
    const std::lock_guard lock(state.mutex);
    const auto overlaps = [&](const OneStream::Write& other) {
        return write.to < other.to + other.size && other.to < write.to + write.size;
    };
    for (const OneStream& other : state.made)
        if (&other != on && std::ranges::any_of(other.begun, overlaps))
            ++state.races;
    static_cast<OneStream*>(on)->begun.push_back(write);
    return driver::kSuccess;
}
/// All that was begun on `stream`. The mutex is held.
inline void do_all(OneStream& stream) {
    for (const OneStream::Write& write : stream.begun)
        if (write.from != nullptr)
            std::memcpy(write.to, write.from, write.size);
        else
            std::memset(write.to, write.value, write.size);
    stream.begun.clear();
}
inline thread_local int current = -1;
inline bool is_own(void* stream) {
    return std::ranges::any_of(state.own, [&](const OneStream& one) { return &one == stream; });
}
inline bool is_unknown(void* stream) {
    return !state.knows_own_streams && is_own(stream);
}
inline void call(const std::function<void()>& hook) {
    if (hook)
        hook();
}

inline Id uuid(int gpu) {
    return sample::id_of(static_cast<unsigned char>(0x30 + gpu));
}
inline driver::Context context(int gpu) {
    return reinterpret_cast<driver::Context>(static_cast<std::uintptr_t>(gpu) + 1);
}
inline int gpu_of(void* handle) {
    return static_cast<int>(reinterpret_cast<std::uintptr_t>(handle)) - 1;
}
/// Process `pid` is LOCKED, and has that on its GPUs.
inline void have(int pid, std::array<sample::Buffer, kGpus> memory) {
    state.memory[pid] = std::move(memory);
    state.states[pid] = static_cast<int>(ProcessState::locked);
}

inline driver::Result hand_over(int pid, driver::StorageInfo** info, bool restores) {
    const std::lock_guard lock(state.mutex);
    auto owned = std::make_unique<Handle>();
    Handle* const handle = owned.get();
    state.handles[handle] = std::move(owned);
    handle->pid = pid;
    handle->restores = restores;
    handle->info.handle = handle;
    handle->info.per_device = handle->devices.data();
    for (int gpu = 0; gpu < kGpus; ++gpu) {
        sample::Buffer& memory = state.memory.at(pid)[static_cast<std::size_t>(gpu)];
        if (memory.empty())
            continue;
        OneStream& stream = state.own[static_cast<std::size_t>(gpu)];
        stream.gpu = gpu;
        // Not before somebody waits for its stream.
        sample::Buffer& gathered = handle->gathered[static_cast<std::size_t>(gpu)];
        gathered = restores ? sample::Buffer(memory.size(), std::byte{0xdd}) : memory;
        stream.begun.push_back({memory.data(), gathered.data(), memory.size(), 0});
        std::ranges::fill(memory, std::byte{0x5a});
        handle->devices[handle->info.device_count++] = {
            reinterpret_cast<driver::DevicePtr>(memory.data()), memory.size(), &stream};
    }
    state.states[pid] = restores ? driver::kStateRestoring : driver::kStateCheckpointing;
    ++state.in_flight;
    *info = &handle->info;
    return driver::kSuccess;
}

} // namespace storage_driver

extern "C" {
[[gnu::used]] inline int gpustasis_driver_emulator = 1;

#define STORAGE_DRIVER_API [[gnu::used]] inline int
STORAGE_DRIVER_API cuDriverGetVersion(int* version) {
    *version = 13040;
    return 0;
}
STORAGE_DRIVER_API cuInit(unsigned) {
    return 0;
}
STORAGE_DRIVER_API cuDeviceGetCount(int* count) {
    *count = storage_driver::kGpus;
    return 0;
}
STORAGE_DRIVER_API cuDeviceGet(int* device, int ordinal) {
    *device = ordinal;
    return 0;
}
STORAGE_DRIVER_API cuDeviceGetUuid_v2(std::uint8_t* uuid, int device) {
    std::memcpy(uuid, storage_driver::uuid(device).data(), 16);
    return 0;
}
STORAGE_DRIVER_API cuDevicePrimaryCtxRetain(void** context, int device) {
    storage_driver::state.context_waits = true;
    const std::lock_guard gate(storage_driver::state.context_gate);
    if (device == storage_driver::state.full_gpu)
        return storage_driver::kRefused;
    *context = storage_driver::context(device);
    ++storage_driver::state.contexts;
    return 0;
}
STORAGE_DRIVER_API cuDevicePrimaryCtxRelease_v2(int) {
    --storage_driver::state.contexts;
    return 0;
}
STORAGE_DRIVER_API cuCtxSetCurrent(void* context) {
    storage_driver::current = storage_driver::gpu_of(context);
    return 0;
}
STORAGE_DRIVER_API cuStreamCreate(void** stream, unsigned) {
    using storage_driver::state;
    if (state.streams_left-- <= 0)
        return storage_driver::kRefused;
    const std::lock_guard lock(state.mutex);
    for (storage_driver::OneStream& one : state.made)
        if (one.gpu < 0) {
            one.gpu = storage_driver::current;
            one.begun.reserve(4096); // some tests have no memory left later
            *stream = &one;
            ++state.streams;
            return 0;
        }
    return storage_driver::kRefused;
}
STORAGE_DRIVER_API cuStreamDestroy_v2(void* stream) {
    const std::lock_guard lock(storage_driver::state.mutex);
    static_cast<storage_driver::OneStream*>(stream)->gpu = -1;
    static_cast<storage_driver::OneStream*>(stream)->begun.clear();
    --storage_driver::state.streams;
    return 0;
}
STORAGE_DRIVER_API cuStreamGetCtx(void* stream, void** context) {
    if (storage_driver::is_unknown(stream))
        return gpustasis::driver::kInvalidContext;
    *context = storage_driver::context(static_cast<storage_driver::OneStream*>(stream)->gpu);
    return 0;
}
STORAGE_DRIVER_API cuStreamSynchronize(void* stream) {
    ++storage_driver::state.waits;
    const bool is_current =
        static_cast<storage_driver::OneStream*>(stream)->gpu == storage_driver::current;
    if (storage_driver::is_unknown(stream))
        return gpustasis::driver::kInvalidContext;
    if (!storage_driver::is_own(stream) && storage_driver::state.waits_left-- <= 0) {
        const std::lock_guard lock(storage_driver::state.mutex);
        static_cast<storage_driver::OneStream*>(stream)->begun.clear(); // nor is it done later
        return storage_driver::kLinkFailed;
    }
    if (storage_driver::state.synchronizes && is_current) {
        const std::lock_guard lock(storage_driver::state.mutex);
        storage_driver::do_all(*static_cast<storage_driver::OneStream*>(stream));
    }
    return storage_driver::state.synchronizes && is_current ? 0
                                                            : gpustasis::driver::kInvalidContext;
}
STORAGE_DRIVER_API cuCtxSynchronize() {
    using storage_driver::state;
    if (!state.synchronizes || storage_driver::current == state.broken_gpu)
        return gpustasis::driver::kInvalidContext;
    const std::lock_guard lock(state.mutex);
    storage_driver::do_all(state.own[static_cast<std::size_t>(storage_driver::current)]);
    return 0;
}
STORAGE_DRIVER_API cuMemHostAlloc(void** memory, std::size_t size, unsigned) {
    using storage_driver::state;
    const std::lock_guard lock(state.mutex);
    state.late += state.in_flight != 0 ? 1 : 0;
    if (state.host_allocs_left-- <= 0)
        return storage_driver::kRefused;
    for (void*& block : state.blocks)
        if (block == nullptr) {
            block = *memory = std::aligned_alloc(4096, size);
            ++state.hosts;
            return 0;
        }
    return storage_driver::kRefused;
}
STORAGE_DRIVER_API cuMemFreeHost(void* memory) {
    const std::lock_guard lock(storage_driver::state.mutex);
    for (void*& block : storage_driver::state.blocks)
        if (block == memory)
            block = nullptr;
    std::free(memory);
    --storage_driver::state.hosts;
    return 0;
}
STORAGE_DRIVER_API cuMemcpyDtoHAsync_v2(void* to, std::uint64_t from, std::size_t size,
                                        void* stream) {
    return storage_driver::begin(
        stream, {static_cast<std::byte*>(to), reinterpret_cast<const std::byte*>(from), size, 0});
}
STORAGE_DRIVER_API cuMemcpyHtoDAsync_v2(std::uint64_t to, const void* from, std::size_t size,
                                        void* stream) {
    storage_driver::call(storage_driver::state.on_copy);
    return storage_driver::begin(
        stream, {reinterpret_cast<std::byte*>(to), static_cast<const std::byte*>(from), size, 0});
}
STORAGE_DRIVER_API cuMemsetD8Async(std::uint64_t to, unsigned char value, std::size_t size,
                                   void* stream) {
    return storage_driver::begin(stream, {reinterpret_cast<std::byte*>(to), nullptr, size, value});
}
STORAGE_DRIVER_API cuCheckpointProcessGetRestoreThreadId(int pid, int* tid) {
    *tid = pid;
    return 0;
}
STORAGE_DRIVER_API cuCheckpointProcessGetState(int pid, int* is) {
    const std::lock_guard lock(storage_driver::state.mutex);
    *is = storage_driver::state.states.at(pid);
    return 0;
}
STORAGE_DRIVER_API cuCheckpointProcessLock(int, void*) {
    return 0;
}
STORAGE_DRIVER_API cuCheckpointProcessUnlock(int, void*) {
    return 0;
}
STORAGE_DRIVER_API cuCheckpointProcessCheckpoint(int pid, gpustasis::driver::CheckpointArgs* args) {
    ++storage_driver::state.checkpoints;
    storage_driver::see_announced();
    return storage_driver::hand_over(pid, args->storage, false);
}
STORAGE_DRIVER_API cuCheckpointProcessRestore(int pid, gpustasis::driver::RestoreArgs* args) {
    ++storage_driver::state.restores;
    storage_driver::see_announced();
    storage_driver::call(storage_driver::state.on_restore);
    if (storage_driver::state.contexts_missing-- > 0)
        return gpustasis::driver::kInvalidContext;
    return storage_driver::hand_over(pid, args->storage, true);
}
STORAGE_DRIVER_API cuCheckpointOperationComplete(void* of) {
    using storage_driver::state;
    auto* handle = static_cast<storage_driver::Handle*>(of);
    if (handle->restores)
        storage_driver::call(state.on_complete);
    const std::lock_guard lock(state.mutex);
    for (storage_driver::OneStream& stream : state.own)
        storage_driver::do_all(stream);
    if (!handle->restores)
        for (sample::Buffer& memory : state.memory.at(handle->pid))
            std::ranges::fill(memory, std::byte{0xee});
    state.states[handle->pid] = static_cast<int>(
        handle->restores ? gpustasis::ProcessState::locked : gpustasis::ProcessState::checkpointed);
    --state.in_flight;
    state.handles.erase(handle);
    return 0;
}

STORAGE_DRIVER_API nvmlInit_v2() {
    return 0;
}
STORAGE_DRIVER_API nvmlShutdown() {
    return 0;
}
STORAGE_DRIVER_API nvmlSystemGetDriverVersion(char* text, unsigned size) {
    std::snprintf(text, size, "610.1");
    return 0;
}
STORAGE_DRIVER_API nvmlDeviceGetCount_v2(unsigned* count) {
    *count = storage_driver::state.nvml_lists;
    return 0;
}
STORAGE_DRIVER_API nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
    *device = storage_driver::context(static_cast<int>(index));
    return 0;
}
STORAGE_DRIVER_API nvmlDeviceGetName(void*, char* text, unsigned size) {
    std::snprintf(text, size, "a GPU of the test");
    return 0;
}
STORAGE_DRIVER_API nvmlDeviceGetUUID(void* device, char* text, unsigned size) {
    int at = std::snprintf(text, size, "GPU-");
    for (const std::byte byte : storage_driver::uuid(storage_driver::gpu_of(device)))
        at += std::snprintf(text + at, size - static_cast<unsigned>(at), "%02x",
                            static_cast<unsigned>(byte));
    return 0;
}
STORAGE_DRIVER_API nvmlDeviceGetMemoryInfo(void*, unsigned long long* memory) {
    memory[0] = memory[1] = 1ULL << 30;
    memory[2] = 0;
    return 0;
}
STORAGE_DRIVER_API nvmlDeviceGetMinorNumber(void* device, unsigned* minor) {
    ++storage_driver::state.asked;
    *minor = static_cast<unsigned>(storage_driver::gpu_of(device));
    return storage_driver::state.nvml_answers ? 0 : 999;
}
// No process uses any: as of one that NVML cannot see.
STORAGE_DRIVER_API nvmlDeviceGetComputeRunningProcesses_v3(void*, unsigned* count, void*) {
    *count = 0;
    return 0;
}
}
