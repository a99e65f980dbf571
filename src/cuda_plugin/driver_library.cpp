// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/driver_library.hpp"

#include "cuda_plugin/direct_work.hpp"
#include "cuda_plugin/nvml.hpp"
#include "cuda_plugin/proc.hpp"
#include "device_memory/driver_error.hpp"

#include <dlfcn.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <set>

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

// "NVIDIA-frontend": /dev/nvidia0 is 195:0; 195:254 and 195:255 are nvidia-modeset and nvidiactl.
constexpr unsigned kDeviceMajor = 195;
constexpr unsigned kDeviceMinors = 254;
// PROC_PID_INIT_INO of the kernel's include/linux/proc_ns.h
constexpr ino_t kInitialPidNamespace = 0xEFFFFFFC;

/// The number in ".../nvidia<number>"; nullopt: it is another file.
std::optional<unsigned> number_in_name(const std::string& path) {
    const std::string name = path.substr(path.rfind('/') + 1);
    const std::string prefix = "nvidia";
    unsigned number = 0;
    if (!name.starts_with(prefix))
        return std::nullopt;
    const char* end = name.data() + name.size();
    const auto [at, error] = std::from_chars(name.data() + prefix.size(), end, number);
    return error == std::errc{} && at == end ? std::optional(number) : std::nullopt;
}

/// Minor numbers of the GPUs whose device files `pid` has open. Of the emulator's, which are no
/// devices, the names count.
std::set<unsigned> open_gpus(int pid, bool emulated) {
    const std::string directory = "/proc/" + std::to_string(pid) + "/fd";
    std::set<unsigned> minors;
    for (const auto& entry : std::filesystem::directory_iterator(directory)) {
        struct stat status {};
        if (::stat(entry.path().c_str(), &status) != 0)
            continue; // closed meanwhile
        if (S_ISCHR(status.st_mode) && major(status.st_rdev) == kDeviceMajor &&
            minor(status.st_rdev) < kDeviceMinors)
            minors.insert(minor(status.st_rdev));
        std::error_code gone;
        if (emulated && S_ISREG(status.st_mode))
            if (const auto number = number_in_name(std::filesystem::read_symlink(entry, gone)))
                minors.insert(*number);
    }
    return minors;
}

/// NVML names processes by their ids there.
bool in_initial_pid_namespace() {
    struct stat status {};
    return ::stat("/proc/self/ns/pid", &status) == 0 && status.st_ino == kInitialPidNamespace;
}

void check(driver::Result result, const char* call, int pid) {
    driver::require(result, call, " for pid " + std::to_string(pid));
}

} // namespace

DriverLibrary::DriverLibrary(const std::string& cuda, const std::string& nvml) : nvml_(nvml) {
    // Never closed, and RTLD_NODELETE should anybody try: the driver's threads outlive us.
    library_ = ::dlopen(cuda.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (library_ == nullptr)
        throw Error(Errc::unsupported, "cannot load the CUDA driver: " + std::string(::dlerror()));
#define GPUSTASIS_RESOLVE(member, symbol, params) resolve(library_, cuda, #symbol, api_.member);
    GPUSTASIS_DRIVER_SYMBOLS(GPUSTASIS_RESOLVE)
#undef GPUSTASIS_RESOLVE
    is_emulator_ = ::dlsym(library_, kEmulatorMark) != nullptr;
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

ProcessGpus DriverLibrary::gpus_of(int pid) {
    try {
        return look_at_gpus(pid);
    } catch (const std::exception& e) {
        return {GpuSource::unknown, {}, e.what()};
    }
}

ProcessGpus DriverLibrary::look_at_gpus(int pid) const {
    const auto nvml = Nvml::find(nvml_);
    if (!nvml)
        return {GpuSource::unknown, {}, "there is no NVML"};
    std::set<unsigned> minors = open_gpus(pid, is_emulator_);
    if (minors.empty())
        return {GpuSource::unknown, {}, "the process has no device file of a GPU open"};
    ProcessGpus found{GpuSource::nvml, {}, ""};
    const auto only_visible = [&](const char* why) {
        found.source = GpuSource::device_files;
        found.why_not_all = why;
    };
    if (!in_initial_pid_namespace())
        only_visible("criu is in a pid namespace of its own, and NVML names processes by their ids "
                     "in the initial one");
    const std::vector<GpuStatus> gpus = nvml->gpus();
    for (unsigned i = 0; i < gpus.size(); ++i) {
        const auto minor = nvml->minor_number(i);
        std::uint64_t used = TaskGpu::kUnknownSize;
        bool told = false; // NVML may also list the process without a size
        if (found.source == GpuSource::nvml) {
            if (const auto listed = nvml->memory_of(i, pid)) {
                told = true;
                used = *listed;
            }
        }
        if (!minor || minors.erase(*minor) == 0) {
            if (told && used != 0)
                only_visible("NVML lists a process of this id on a GPU that it has not open");
            continue;
        }
        if (found.source == GpuSource::nvml && !told)
            only_visible("NVML does not say which processes use a GPU");
        found.gpus.push_back({gpus[i].info.uuid, used});
    }
    if (!minors.empty())
        return {GpuSource::unknown, {}, "the process has a GPU open that NVML does not list"};
    if (found.source == GpuSource::device_files)
        for (ProcessGpus::Gpu& gpu : found.gpus)
            gpu.memory_size = TaskGpu::kUnknownSize;
    return found;
}

void DriverLibrary::initialize() {
    const std::lock_guard once(initialize_);
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
    if (result == driver::kNotInitialized)
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

void Driver::restore_direct(const TaskRecord&) {
    throw Error(Errc::unsupported, "no GPU memory was handed over to this process");
}

void DriverLibrary::restore_direct(const TaskRecord& record) {
    if (direct_ == nullptr)
        return Driver::restore_direct(record);
    direct_->restore(*this, record, {});
}

void DriverLibrary::unlock(int pid) {
    proc::require_pipes_in_thread_names(pid);
    check(api_.unlock(pid, nullptr), "cuCheckpointProcessUnlock", pid);
}

} // namespace gpustasis
