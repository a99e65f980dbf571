// SPDX-License-Identifier: Apache-2.0
#include "device_memory/custom_storage.hpp"

#include "core/error.hpp"
#include "device_memory/driver_error.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

namespace gpustasis {
namespace {

constexpr unsigned kNonBlocking = 1;   // CU_STREAM_NON_BLOCKING
constexpr unsigned kPortable = 1;      // CU_MEMHOSTALLOC_PORTABLE
constexpr std::size_t kUsualGpus = 64; // of one process, at most

std::string of_pid(int pid) {
    return " for pid " + std::to_string(pid);
}

std::string uuid_text(const Id& uuid) {
    std::string text = "GPU-";
    for (const std::byte byte : uuid) {
        char digits[3];
        std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned>(byte));
        text += digits;
    }
    return text;
}

} // namespace

CustomStorage::CustomStorage(void* library, const std::string& name) {
    const auto resolve = [&](const char* symbol, auto& out) {
        out = reinterpret_cast<std::remove_reference_t<decltype(out)>>(::dlsym(library, symbol));
        if (out == nullptr)
            throw Error(Errc::unsupported, name + " has no " + symbol +
                                               "; a driver with CUDA 13.4 or later is needed");
    };
#define GPUSTASIS_RESOLVE(member, symbol, params) resolve(#symbol, api_.member);
    GPUSTASIS_STORAGE_SYMBOLS(GPUSTASIS_RESOLVE)
#undef GPUSTASIS_RESOLVE
}

void CustomStorage::prepare(const std::vector<Id>& gpus, std::size_t used) {
    for (std::size_t i = 0; i < gpus.size(); ++i) {
        Gpu& gpu = gpu_of(gpus[i]);
        const std::lock_guard making(gpu.making);
        make_ready(gpu, i < used);
    }
}

CustomStorage::Gpu& CustomStorage::gpu_of(const Id& uuid) {
    const std::lock_guard lock(mutex_);
    const auto gpu = std::ranges::find(gpus_, uuid, &Gpu::uuid);
    return gpu == gpus_.end() ? gpus_.emplace_back(uuid) : *gpu;
}

// `for_copies`: with a lane more than is reserved. `gpu.making` is held. Nobody sees a context before all is there: if it
// is released, nobody has it in use.
void CustomStorage::make_ready(Gpu& gpu, bool for_copies) {
    const bool is_new = gpu.context == nullptr;
    const Retained retained = is_new ? retain_context(gpu.uuid) : Retained{gpu.context, 0};
    try {
        if (for_copies)
            make_lanes(gpu, retained.context);
    } catch (...) {
        if (is_new) // a context takes memory that the process may need for itself
            api_.context_release(retained.device);
        throw;
    }
    const std::lock_guard lock(mutex_);
    gpu.context = retained.context;
}

void CustomStorage::make_lanes(Gpu& gpu, driver::Context context) {
    const auto has_enough = [&] {
        const std::lock_guard lock(mutex_);
        return gpu.lane_count > gpu.reserved;
    };
    while (!has_enough()) {
        OwnedLane lane = make_lane(context);
        const std::lock_guard lock(mutex_);
        gpu.lanes.reserve(gpu.lane_count + 1);
        gpu.lanes.push_back(std::move(lane));
        ++gpu.lane_count;
    }
}

CustomStorage::Retained CustomStorage::retain_context(const Id& wanted) const {
    int count = 0;
    driver::require(api_.device_get_count(&count), "cuDeviceGetCount");
    for (int ordinal = 0; ordinal < count; ++ordinal) {
        Retained found;
        Id uuid{};
        driver::require(api_.device_get(&found.device, ordinal), "cuDeviceGet");
        driver::require(
            api_.device_get_uuid(reinterpret_cast<std::uint8_t*>(uuid.data()), found.device),
            "cuDeviceGetUuid");
        if (uuid != wanted)
            continue;
        const std::string where = " on " + uuid_text(wanted);
        driver::require(api_.context_retain(&found.context, found.device),
                        "cuDevicePrimaryCtxRetain", where);
        return found;
    }
    throw Error(Errc::unsupported, uuid_text(wanted) + " is not among the " +
                                       std::to_string(count) +
                                       " GPUs that CUDA lists in this process");
}

CustomStorage::OwnedLane CustomStorage::make_lane(driver::Context context) const {
    driver::require(api_.context_set(context), "cuCtxSetCurrent");
    OwnedLane lane(new CopyLane, {&api_, context});
    void* memory = nullptr;
    driver::require(api_.host_alloc(&memory, CopyLane::kSize, kPortable), "cuMemHostAlloc");
    lane->memory = static_cast<std::byte*>(memory);
    for (driver::Stream& stream : lane->streams)
        driver::require(api_.stream_create(&stream, kNonBlocking), "cuStreamCreate");
    return lane;
}

void CustomStorage::FreeLane::operator()(CopyLane* lane) const noexcept {
    api->context_set(context);
    for (driver::Stream stream : lane->streams)
        if (stream != nullptr)
            api->stream_destroy(stream);
    if (lane->memory != nullptr)
        api->host_free(lane->memory);
    delete lane;
}

// The mutex is held. nullptr: no GPU that was prepared.
CustomStorage::Gpu* CustomStorage::find(driver::Context context) noexcept {
    const auto gpu = std::ranges::find(gpus_, context, &Gpu::context);
    return context == nullptr || gpu == gpus_.end() ? nullptr : &*gpu;
}

bool CustomStorage::have_lanes(const std::vector<Id>& gpus) {
    const std::lock_guard lock(mutex_);
    return std::ranges::all_of(gpus, [this](const Id& uuid) {
        const auto gpu = std::ranges::find(gpus_, uuid, &Gpu::uuid);
        return gpu != gpus_.end() && gpu->lane_count != 0;
    });
}

void CustomStorage::reserve(const std::vector<Id>& gpus, Operation& of) {
    of.storage_ = this;
    of.reserved_.reserve(of.reserved_.size() + gpus.size());
    for (const Id& uuid : gpus) {
        Gpu& gpu = gpu_of(uuid);
        const std::lock_guard making(gpu.making); // else another would reserve the same lane
        make_ready(gpu, true);
        const std::lock_guard lock(mutex_);
        ++gpu.reserved;
        of.reserved_.push_back(gpu.context);
    }
}

CustomStorage::Operation::~Operation() {
    if (reserved_.empty())
        return;
    const std::lock_guard lock(storage_->mutex_);
    for (driver::Context context : reserved_)
        --storage_->find(context)->reserved;
}

// Also the contexts: once the driver has answered, nobody is waited for who prepares another GPU.
CustomStorage::Contexts CustomStorage::begin(int pid, Operation& into) {
    into.storage_ = this;
    into.pid_ = pid;
    into.devices_.reserve(kUsualGpus);
    Contexts contexts;
    const std::lock_guard lock(mutex_);
    for (const Gpu& gpu : gpus_)
        if (gpu.context != nullptr)
            contexts.emplace_back(gpu.uuid, gpu.context);
    return contexts;
}

// No step may fail: the process would lack its memory, and nobody could complete the operation.
void CustomStorage::take(const driver::StorageInfo* info, const Contexts& contexts,
                         Operation& into) {
    into.handle_ = info->handle;
    if (!contexts.empty()) // a thread without a current context may be told nothing of a stream
        api_.context_set(contexts.front().second);
    for (std::uint32_t i = 0; i < info->device_count; ++i) {
        const driver::StoragePerDevice& given = info->per_device[i];
        DeviceMemory& memory = into.devices_.emplace_back();
        memory.address = given.address;
        memory.size = given.size;
        memory.stream = given.stream;
        // Whatever fails here, the memory is in this process's hands: it has to be copied, from whichever GPU it is.
        if (api_.stream_context(given.stream, &memory.context) != driver::kSuccess)
            memory.context = nullptr;
        memory.stream_context = memory.context;
        const auto gpu = std::ranges::find(contexts, memory.context, &Contexts::value_type::second);
        if (gpu != contexts.end())
            memory.uuid = gpu->first;
        else if (!contexts.empty())
            memory.context = contexts.front().second;
    }
}

void CustomStorage::checkpoint(int pid, Operation& into, std::atomic<bool>& held) {
    const Contexts contexts = begin(pid, into);
    const std::string whose = of_pid(pid);
    driver::StorageInfo* info = nullptr;
    driver::CheckpointArgs args;
    args.storage = &info;
    driver::require(api_.checkpoint(pid, &args), "cuCheckpointProcessCheckpoint", whose);
    if (info == nullptr)
        throw Error(Errc::unsupported, "cuCheckpointProcessCheckpoint" + whose +
                                           ": the driver has handed over no memory");
    held = true; // before anything else: a call that hangs had a deadline until here
    take(info, contexts, into);
}

void CustomStorage::restore(int pid, std::vector<driver::GpuPair> pairs, Operation& into) {
    const Contexts contexts = begin(pid, into);
    const std::string whose = of_pid(pid);
    driver::StorageInfo* info = nullptr;
    driver::RestoreArgs args;
    args.gpu_pairs = pairs.empty() ? nullptr : pairs.data();
    args.gpu_pairs_count = static_cast<std::uint32_t>(pairs.size());
    args.storage = &info;
    driver::require(api_.restore(pid, &args), "cuCheckpointProcessRestore", whose);
    if (info == nullptr)
        throw Error(Errc::unsupported, "cuCheckpointProcessRestore" + whose +
                                           ": the driver has handed over no memory");
    take(info, contexts, into);
}

void CustomStorage::Operation::complete() {
    void* const handle = std::exchange(handle_, nullptr);
    devices_.clear();
    driver::require(storage_->api_.complete(handle), "cuCheckpointOperationComplete", of_pid(pid_));
}

// cuda.h allows copies on the driver's stream, whose order is the driver's. It does not say that nothing is under way there
// when the memory is handed over, and our streams do not wait for it.
void CustomStorage::wait_for_driver(const DeviceMemory& memory) {
    if (memory.stream_context != nullptr &&
        api_.context_set(memory.stream_context) == driver::kSuccess &&
        api_.stream_synchronize(memory.stream) == driver::kSuccess)
        return;
    // A stream that cannot be waited for makes no memory unreadable: it is of a primary context, as all of these.
    const auto wait_for = [this](driver::Context context) {
        driver::require(api_.context_set(context), "cuCtxSetCurrent");
        driver::require(api_.context_synchronize(), "cuCtxSynchronize");
    };
    if (memory.stream_context != nullptr) {
        wait_for(memory.stream_context);
        return;
    }
    wait_for(memory.context);
    std::vector<driver::Context> others;
    {
        const std::lock_guard lock(mutex_);
        for (const Gpu& gpu : gpus_)
            if (gpu.context != nullptr && gpu.context != memory.context)
                others.push_back(gpu.context);
    }
    // One may be of a GPU that has failed, which this memory is not on. Then nothing is on its way there any more.
    for (driver::Context context : others)
        if (api_.context_set(context) == driver::kSuccess)
            (void)api_.context_synchronize();
}

CustomStorage::Lane::Lane(CustomStorage& storage, const DeviceMemory& memory)
    : storage_(storage), device_(memory) {
    storage_.wait_for_driver(device_);
    {
        const std::lock_guard lock(storage_.mutex_);
        if (Gpu* gpu = storage_.find(device_.context); gpu != nullptr && !gpu->lanes.empty()) {
            lane_ = std::move(gpu->lanes.back());
            gpu->lanes.pop_back();
            return;
        }
    }
    lane_ = storage_.make_lane(device_.context);
    const std::lock_guard lock(storage_.mutex_);
    if (Gpu* gpu = storage_.find(device_.context)) {
        gpu->lanes.reserve(gpu->lane_count + 1);
        ++gpu->lane_count;
    }
}

CustomStorage::Lane::~Lane() {
    // Nothing may still be on its way into memory that others get.
    bool is_idle = storage_.api_.context_set(device_.context) == driver::kSuccess;
    for (driver::Stream stream : lane_->streams)
        is_idle = storage_.api_.stream_synchronize(stream) == driver::kSuccess && is_idle;
    const std::lock_guard lock(storage_.mutex_);
    Gpu* const gpu = storage_.find(device_.context);
    if (!is_idle)
        *lane_ = {}; // it stays where it is, for whatever the driver still does with it
    if (gpu != nullptr && is_idle)
        gpu->lanes.push_back(std::move(lane_));
    else if (gpu != nullptr)
        --gpu->lane_count;
}

void CustomStorage::Lane::use_context() const {
    driver::require(storage_.api_.context_set(device_.context), "cuCtxSetCurrent");
}

void CustomStorage::Lane::to_host(std::size_t stream, void* host, std::uint64_t offset,
                                  std::size_t size) {
    use_context();
    driver::require(
        storage_.api_.to_host(host, device_.address + offset, size, lane_->streams[stream]),
        "cuMemcpyDtoHAsync");
}

void CustomStorage::Lane::to_device(std::size_t stream, const void* host, std::uint64_t offset,
                                    std::size_t size) {
    use_context();
    driver::require(
        storage_.api_.to_device(device_.address + offset, host, size, lane_->streams[stream]),
        "cuMemcpyHtoDAsync");
}

void CustomStorage::Lane::set_zero(std::size_t stream, std::uint64_t offset, std::size_t size) {
    use_context();
    driver::require(
        storage_.api_.set_bytes(device_.address + offset, 0, size, lane_->streams[stream]),
        "cuMemsetD8Async");
}

void CustomStorage::Lane::wait(std::size_t stream) {
    use_context();
    driver::require(storage_.api_.stream_synchronize(lane_->streams[stream]),
                    "cuStreamSynchronize");
}

} // namespace gpustasis
