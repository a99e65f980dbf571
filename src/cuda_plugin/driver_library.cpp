#include "cuda_plugin/driver_library.hpp"

#include "cuda_plugin/driver_error.hpp"
#include "cuda_plugin/nvml.hpp"
#include "cuda_plugin/proc.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>

namespace gpustasis {
namespace {

// Exported by our driver emulator and by no driver.
constexpr const char* kEmulatorMark = "gpustasis_driver_emulator";

template <class Function>
void resolve(void* library, const std::string& name, const char* symbol, Function& out) {
    out = reinterpret_cast<Function>(::dlsym(library, symbol));
    if (out == nullptr)
        throw Error(Errc::unsupported,
                    name + " has no " + symbol + "; NVIDIA driver R570 or later is needed");
}

void check(driver::Result result, const char* call, int pid) {
    if (result == driver::kSuccess)
        return;
    std::string text =
        std::string(call) + " for pid " + std::to_string(pid) + ": " + driver::result_name(result);
    if (const std::string hint = driver::result_hint(result); !hint.empty())
        text += ": " + hint;
    throw DriverError(result, text);
}

} // namespace

DriverLibrary::DriverLibrary(const std::string& cuda, const std::string& nvml) : nvml_(nvml) {
    // Never closed, and RTLD_NODELETE should anybody try: the driver's threads outlive us.
    void* library = ::dlopen(cuda.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (library == nullptr)
        throw Error(Errc::unsupported, "cannot load the CUDA driver: " + std::string(::dlerror()));
#define GPUSTASIS_RESOLVE(member, symbol, params) resolve(library, cuda, #symbol, api_.member);
    GPUSTASIS_DRIVER_SYMBOLS(GPUSTASIS_RESOLVE)
#undef GPUSTASIS_RESOLVE
    is_emulator_ = ::dlsym(library, kEmulatorMark) != nullptr;
}

std::uint32_t DriverLibrary::api_version() {
    int version = 0;
    check(api_.driver_get_version(&version), "cuDriverGetVersion", 0);
    return static_cast<std::uint32_t>(std::max(version, 0));
}

std::string DriverLibrary::version_text() {
    const auto nvml = Nvml::find(nvml_);
    return nvml ? nvml->driver_version() : "";
}

std::optional<std::vector<GpuStatus>> DriverLibrary::gpus() {
    const auto nvml = Nvml::find(nvml_);
    if (!nvml)
        return std::nullopt;
    return nvml->gpus();
}

void DriverLibrary::initialize() {
    if (initialized_)
        return;
    const driver::Result result = api_.init(0);
    if (result != driver::kSuccess)
        throw DriverError(result, "cuInit: " + driver::result_name(result) + ": " +
                                      driver::result_hint(result));
    initialized_ = true;
}

std::optional<int> DriverLibrary::restore_thread(int pid) {
    int tid = 0;
    const driver::Result result = api_.get_restore_thread(pid, &tid);
    if (result == driver::kInvalidValue || result == driver::kNotInitialized)
        return std::nullopt;
    check(result, "cuCheckpointProcessGetRestoreThreadId", pid);
    return tid;
}

ProcessState DriverLibrary::state(int pid) {
    proc::require_pipes_in_thread_names(pid);
    int state = 0;
    check(api_.get_state(pid, &state), "cuCheckpointProcessGetState", pid);
    if (state == driver::kStateCheckpointing || state == driver::kStateRestoring)
        throw DriverError(driver::kIllegalState,
                          "pid " + std::to_string(pid) +
                              " is being checkpointed or restored by somebody else");
    if (state < 0 || state > static_cast<int>(ProcessState::failed))
        throw DriverError(driver::kIllegalState,
                          "pid " + std::to_string(pid) + " is in driver state " +
                              std::to_string(state) + ", which this version does not know");
    return static_cast<ProcessState>(state);
}

void DriverLibrary::lock(int pid, std::uint32_t timeout_ms) {
    proc::require_pipes_in_thread_names(pid);
    driver::LockArgs args;
    args.timeout_ms = timeout_ms;
    check(api_.lock(pid, &args), "cuCheckpointProcessLock", pid);
}

void DriverLibrary::checkpoint(int pid) {
    proc::require_pipes_in_thread_names(pid);
    check(api_.checkpoint(pid, nullptr), "cuCheckpointProcessCheckpoint", pid);
}

void DriverLibrary::restore(int pid, const std::vector<GpuMove>& moves) {
    proc::require_pipes_in_thread_names(pid);
    if (moves.empty()) {
        check(api_.restore(pid, nullptr), "cuCheckpointProcessRestore", pid);
        return;
    }
    std::vector<driver::GpuPair> pairs(moves.size());
    for (std::size_t i = 0; i < moves.size(); ++i) {
        std::memcpy(pairs[i].old_uuid, moves[i].from.data(), sizeof(pairs[i].old_uuid));
        std::memcpy(pairs[i].new_uuid, moves[i].to.data(), sizeof(pairs[i].new_uuid));
    }
    driver::RestoreArgs args;
    args.gpu_pairs = pairs.data();
    args.gpu_pairs_count = static_cast<std::uint32_t>(pairs.size());
    check(api_.restore(pid, &args), "cuCheckpointProcessRestore", pid);
}

void DriverLibrary::unlock(int pid) {
    proc::require_pipes_in_thread_names(pid);
    check(api_.unlock(pid, nullptr), "cuCheckpointProcessUnlock", pid);
}

} // namespace gpustasis
