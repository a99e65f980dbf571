// SPDX-License-Identifier: Apache-2.0
// cuCheckpointProcess*: see cuda.h, group CUDA_CHECKPOINT.
#include "driver_emulator/driver/api.hpp"
#include "driver_emulator/driver/caller.hpp"
#include "driver_emulator/driver/driver.hpp"

#include <algorithm>
#include <cstring>

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

Result request(int pid, Operation operation, std::uint32_t timeout_ms = 0,
               const GpuPair* pairs = nullptr, unsigned pair_count = 0) {
    ProcessState state{};
    return request_operation(pid, operation, timeout_ms, pairs, pair_count, state);
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
    return code(request_operation(pid, Operation::get_state, 0, nullptr, 0, *state));
}

GPUSTASIS_API(cuCheckpointProcessLock)(int pid, const LockArgs* args) {
    if (args != nullptr && (args->reserved0 != 0 || !is_zeroed(args->reserved1))) {
        return code(Result::invalid_value);
    }
    return code(request(pid, Operation::lock, args == nullptr ? 0 : args->timeout_ms));
}

GPUSTASIS_API(cuCheckpointProcessCheckpoint)(int pid, const CheckpointArgs* args) {
    if (args != nullptr && !is_zeroed(*args)) {
        CheckpointArgs rest = *args;
        rest.reserved[0] = 0; // customStorageInfo_out, where there is one
        const bool custom = is_zeroed(rest) && has_custom_storage();
        return code(custom ? Result::not_supported : Result::invalid_value);
    }
    return code(request(pid, Operation::checkpoint));
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
    if (args == nullptr) {
        return code(request(pid, Operation::restore));
    }
    std::uint64_t custom_storage = 0; // customStorageInfo_out, where there is one: at offset 16
    std::memcpy(&custom_storage, args->reserved + 4, sizeof custom_storage);
    if (custom_storage != 0 && info.api_version >= kVersionWithCustomStorage) {
        return code(Result::not_supported);
    }
    const bool pairs_known = info.api_version >= kVersionWithGpuPairs;
    if (!is_zeroed(args->reserved) || args->reserved1 != 0 ||
        (args->gpu_pairs == nullptr) != (args->gpu_pair_count == 0) ||
        args->gpu_pair_count > kMaxGpus || (!pairs_known && args->gpu_pairs != nullptr)) {
        return code(Result::invalid_value);
    }
    return code(request(pid, Operation::restore, 0, args->gpu_pairs, args->gpu_pair_count));
}

GPUSTASIS_API(cuCheckpointProcessUnlock)(int pid, const UnlockArgs* args) {
    if (args != nullptr && !is_zeroed(*args)) {
        return code(Result::invalid_value);
    }
    return code(request(pid, Operation::unlock));
}

GPUSTASIS_API(cuCheckpointOperationComplete)(void*) {
    return code(Result::invalid_value); // no operation is ever handed out: see custom storage
}
