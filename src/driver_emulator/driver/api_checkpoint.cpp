// SPDX-License-Identifier: Apache-2.0
// cuCheckpointProcess*: see cuda.h, group CUDA_CHECKPOINT.
#include "driver_emulator/driver/api.hpp"
#include "driver_emulator/driver/caller.hpp"
#include "driver_emulator/driver/driver.hpp"
#include "driver_emulator/driver/storage_operation.hpp"

#include <algorithm>

using namespace gpustasis::emulator;

namespace {

constexpr int kVersionWithGpuPairs = 13000;
constexpr int kVersionWithCustomStorage = 13040;

bool has_custom_storage() {
    DaemonInfo info{};
    return ask_info(info) && info.api_version >= kVersionWithCustomStorage;
}

/// "Reserved for future use, must be zeroed": nobody documents what else happens.
template <typename T>
bool is_zeroed(const T& bytes) {
    const auto* first = reinterpret_cast<const unsigned char*>(&bytes);
    return std::all_of(first, first + sizeof bytes, [](unsigned char byte) { return byte == 0; });
}

ChannelRequest make_request(Operation operation) {
    ChannelRequest request{};
    request.operation = operation;
    return request;
}

Result send(int pid, ChannelRequest request) {
    ChannelReply reply{};
    return request_operation(pid, request, reply);
}

/// Restore is for callers that have called cuInit themselves, unless the driver stays loaded.
bool may_restore(DaemonInfo& info) {
    return ask_info(info) && (info.persistence != 0 || driver().is_usable());
}

} // namespace

GPUSTASIS_API(cuCheckpointProcessGetRestoreThreadId)(int pid, int* tid) {
    if (tid == nullptr) {
        return code(Result::invalid_value);
    }
    RestoreThread thread;
    const Result result = find_restore_thread(pid, thread);
    *tid = thread.tid;
    return code(result);
}

GPUSTASIS_API(cuCheckpointProcessGetState)(int pid, ProcessState* state) {
    if (state == nullptr) {
        return code(Result::invalid_value);
    }
    ChannelRequest request = make_request(Operation::get_state);
    ChannelReply reply{};
    const Result result = request_operation(pid, request, reply);
    *state = reply.state;
    return code(result);
}

GPUSTASIS_API(cuCheckpointProcessLock)(int pid, const LockArgs* args) {
    if (args != nullptr && (args->reserved0 != 0 || !is_zeroed(args->reserved1))) {
        return code(Result::invalid_value);
    }
    ChannelRequest request = make_request(Operation::lock);
    request.timeout_ms = args == nullptr ? 0 : args->timeout_ms;
    return code(send(pid, request));
}

GPUSTASIS_API(cuCheckpointProcessCheckpoint)(int pid, const CheckpointArgs* args) {
    if (args != nullptr && !is_zeroed(args->reserved)) {
        return code(Result::invalid_value);
    }
    const ChannelRequest request = make_request(Operation::checkpoint);
    if (args == nullptr || args->storage == nullptr) {
        return code(send(pid, request));
    }
    return has_custom_storage() ? begin_storage_operation(pid, request, args->storage)
                                : code(Result::invalid_value);
}

GPUSTASIS_API(cuCheckpointProcessRestore)(int pid, const RestoreArgs* args) {
    RestoreThread thread;
    const Result found = find_restore_thread(pid, thread);
    if (found != Result::success) {
        return code(found);
    }
    DaemonInfo info{};
    if (!may_restore(info)) {
        return code(Result::not_permitted);
    }
    ChannelRequest request = make_request(Operation::restore);
    if (args == nullptr) {
        return code(send(pid, request));
    }
    const bool pairs_known = info.api_version >= kVersionWithGpuPairs;
    const bool storage_known = info.api_version >= kVersionWithCustomStorage;
    if (!is_zeroed(args->reserved) || args->padding0 != 0 ||
        (args->gpu_pairs == nullptr) != (args->gpu_pair_count == 0) ||
        args->gpu_pair_count > kMaxGpus || (!pairs_known && args->gpu_pairs != nullptr) ||
        (!storage_known && args->storage != nullptr)) {
        return code(Result::invalid_value);
    }
    request.pair_count = args->gpu_pair_count;
    std::copy_n(args->gpu_pairs, request.pair_count, request.pairs);
    return args->storage == nullptr ? code(send(pid, request))
                                    : begin_storage_operation(pid, request, args->storage);
}

GPUSTASIS_API(cuCheckpointProcessUnlock)(int pid, const UnlockArgs* args) {
    if (args != nullptr && !is_zeroed(*args)) {
        return code(Result::invalid_value);
    }
    return code(send(pid, make_request(Operation::unlock)));
}

GPUSTASIS_API(cuCheckpointOperationComplete)(void* handle) {
    return complete_storage_operation(handle);
}
