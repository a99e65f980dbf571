// SPDX-License-Identifier: Apache-2.0
#include "device_memory/driver_error.hpp"

namespace gpustasis::driver {
namespace {

struct Known {
    Result result;
    const char* name;
    const char* hint;
};

constexpr Known kKnown[] = {
    {1, "CUDA_ERROR_INVALID_VALUE", "an argument the driver does not take"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "not enough GPU or host memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "the process has no CUDA state"},
    {4, "CUDA_ERROR_DEINITIALIZED", "the driver is shutting down"},
    {100, "CUDA_ERROR_NO_DEVICE", "no GPU is visible"},
    {201, "CUDA_ERROR_INVALID_CONTEXT",
     "a GPU of the process has no primary context in the process that calls"},
    {304, "CUDA_ERROR_OPERATING_SYSTEM",
     "no such process, no permission on it, or an earlier restore failed"},
    {401, "CUDA_ERROR_ILLEGAL_STATE", "the process is not in the state this call needs"},
    {500, "CUDA_ERROR_NOT_FOUND", ""},
    {600, "CUDA_ERROR_NOT_READY", "submitted GPU work did not finish in time"},
    {800, "CUDA_ERROR_NOT_PERMITTED", "the driver may need persistence mode"},
    {801, "CUDA_ERROR_NOT_SUPPORTED",
     "the process uses something that cannot be checkpointed (UVM, MIG, MPS, IPC), or the "
     "platform cannot"},
    {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "libcuda and the kernel module differ in version"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "a stream of the operation is capturing"},
    {999, "CUDA_ERROR_UNKNOWN", ""},
};

const Known* find(Result result) {
    for (const Known& known : kKnown)
        if (known.result == result)
            return &known;
    return nullptr;
}

} // namespace

std::string result_name(Result result) {
    const Known* known = find(result);
    if (known == nullptr)
        return "CUresult " + std::to_string(result);
    return std::string(known->name) + " (" + std::to_string(result) + ")";
}

std::string result_hint(Result result) {
    const Known* known = find(result);
    return known == nullptr ? "" : known->hint;
}

void require(Result result, const char* call, const std::string& of) {
    if (result == kSuccess)
        return;
    std::string text = call + of + ": " + result_name(result);
    if (const std::string hint = result_hint(result); !hint.empty())
        text += ": " + hint;
    throw DriverError(result, text);
}

} // namespace gpustasis::driver
