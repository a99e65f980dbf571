// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/nvml.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdio>

namespace gpustasis {
namespace {

constexpr int kSuccess = 0;
constexpr int kNotSupported = 3;
constexpr int kInsufficientSize = 7;
using Device = void*; ///< nvmlDevice_t

/// nvmlMemory_t
struct Memory {
    unsigned long long total = 0;
    unsigned long long free = 0;
    unsigned long long used = 0;
};

/// nvmlProcessInfo_t. The size is NVML_VALUE_NOT_AVAILABLE, all ones, where it is not known.
struct ProcessInfo {
    unsigned pid = 0;
    unsigned long long used = 0;
    unsigned gpu_instance = 0;
    unsigned compute_instance = 0;
};
static_assert(sizeof(ProcessInfo) == 24 && TaskGpu::kUnknownSize == ~0ULL);

// Between two calls a few processes may be added.
constexpr unsigned kMoreProcesses = 16;
constexpr int kProcessTries = 5;

// NVML_DEVICE_NAME_V2_BUFFER_SIZE, NVML_DEVICE_UUID_V2_BUFFER_SIZE,
// NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE: the largest of the three.
constexpr unsigned kTextSize = 96;

unsigned hex_digit(char c, const std::string& text) {
    if (c >= '0' && c <= '9')
        return static_cast<unsigned>(c - '0');
    if (c >= 'a' && c <= 'f')
        return static_cast<unsigned>(c - 'a') + 10;
    if (c >= 'A' && c <= 'F')
        return static_cast<unsigned>(c - 'A') + 10;
    throw Error(Errc::bad_argument, "not the UUID of a GPU: " + text);
}

} // namespace

struct Nvml::Api {
    int (*init)() = nullptr;
    int (*shutdown)() = nullptr;
    int (*driver_version)(char* text, unsigned size) = nullptr;
    int (*count)(unsigned* count) = nullptr;
    int (*handle)(unsigned index, Device* device) = nullptr;
    int (*name)(Device device, char* text, unsigned size) = nullptr;
    int (*uuid)(Device device, char* text, unsigned size) = nullptr;
    int (*memory)(Device device, Memory* memory) = nullptr;
    // Not of every driver, and not needed: what they say is then not known.
    int (*minor_number)(Device device, unsigned* minor) = nullptr;
    int (*processes)(Device device, unsigned* count, ProcessInfo* infos) = nullptr;
};

std::unique_ptr<Nvml> Nvml::find(const std::string& soname) {
    void* library = ::dlopen(soname.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (library == nullptr)
        return nullptr;
    auto api = std::make_unique<Api>();
    bool complete = true;
    const auto find_symbol = [&](const char* symbol, auto& out) {
        out = reinterpret_cast<std::remove_reference_t<decltype(out)>>(::dlsym(library, symbol));
    };
    const auto resolve = [&](const char* symbol, auto& out) {
        find_symbol(symbol, out);
        complete = complete && out != nullptr;
    };
    resolve("nvmlInit_v2", api->init);
    resolve("nvmlShutdown", api->shutdown);
    resolve("nvmlSystemGetDriverVersion", api->driver_version);
    resolve("nvmlDeviceGetCount_v2", api->count);
    resolve("nvmlDeviceGetHandleByIndex_v2", api->handle);
    resolve("nvmlDeviceGetName", api->name);
    resolve("nvmlDeviceGetUUID", api->uuid);
    resolve("nvmlDeviceGetMemoryInfo", api->memory);
    find_symbol("nvmlDeviceGetMinorNumber", api->minor_number);
    find_symbol("nvmlDeviceGetComputeRunningProcesses_v3", api->processes);
    if (!complete || api->init() != kSuccess)
        return nullptr;
    return std::unique_ptr<Nvml>(new Nvml(std::move(api)));
}

Nvml::Nvml(std::unique_ptr<Api> api) noexcept : api_(std::move(api)) {}

Nvml::~Nvml() {
    api_->shutdown();
}

std::string Nvml::driver_version() const {
    std::array<char, kTextSize> text{};
    if (api_->driver_version(text.data(), kTextSize - 1) != kSuccess)
        return "";
    return text.data();
}

std::vector<GpuStatus> Nvml::gpus() const {
    const auto check = [](int result, const char* call) {
        if (result != kSuccess)
            throw Error(Errc::io, std::string(call) + ": NVML error " + std::to_string(result));
    };
    unsigned count = 0;
    check(api_->count(&count), "nvmlDeviceGetCount");
    std::vector<GpuStatus> gpus;
    for (unsigned i = 0; i < count; ++i) {
        Device device = nullptr;
        std::array<char, kTextSize> text{};
        Memory memory;
        GpuStatus gpu;
        check(api_->handle(i, &device), "nvmlDeviceGetHandleByIndex");
        check(api_->name(device, text.data(), kTextSize - 1), "nvmlDeviceGetName");
        gpu.info.name = text.data();
        text.fill('\0');
        check(api_->uuid(device, text.data(), kTextSize - 1), "nvmlDeviceGetUUID");
        gpu.info.uuid = parse_gpu_uuid(text.data());
        // Where GPU and CPU share memory there is none that is the device's own.
        if (const int result = api_->memory(device, &memory); result != kNotSupported) {
            check(result, "nvmlDeviceGetMemoryInfo");
            gpu.info.memory_size = memory.total;
            gpu.free_size = memory.free;
        }
        gpus.push_back(std::move(gpu));
    }
    return gpus;
}

std::optional<unsigned> Nvml::minor_number(unsigned index) const {
    Device device = nullptr;
    unsigned minor = 0;
    if (api_->minor_number == nullptr || api_->handle(index, &device) != kSuccess ||
        api_->minor_number(device, &minor) != kSuccess)
        return std::nullopt;
    return minor;
}

std::optional<std::uint64_t> Nvml::memory_of(unsigned index, int pid) const {
    Device device = nullptr;
    if (api_->processes == nullptr || api_->handle(index, &device) != kSuccess)
        return std::nullopt;
    std::vector<ProcessInfo> infos(kMoreProcesses);
    unsigned count = 0;
    int result = kInsufficientSize;
    for (int tries = 0; result == kInsufficientSize && tries < kProcessTries; ++tries) {
        infos.resize(count + kMoreProcesses);
        count = static_cast<unsigned>(infos.size());
        result = api_->processes(device, &count, infos.data());
    }
    if (result != kSuccess)
        return std::nullopt;
    infos.resize(std::min<std::size_t>(count, infos.size()));
    const auto found = std::ranges::find(infos, static_cast<unsigned>(pid), &ProcessInfo::pid);
    return found == infos.end() ? 0 : found->used;
}

Id parse_gpu_uuid(const std::string& text) {
    Id id{};
    std::size_t nibble = 0;
    if (!text.starts_with("GPU-"))
        throw Error(Errc::bad_argument, "not the UUID of a GPU: " + text);
    for (const char c : text.substr(4)) {
        if (c == '-')
            continue;
        if (nibble == 2 * id.size())
            throw Error(Errc::bad_argument, "not the UUID of a GPU: " + text);
        const unsigned shifted = hex_digit(c, text) << (nibble % 2 == 0 ? 4U : 0U);
        id[nibble / 2] |= static_cast<std::byte>(shifted);
        ++nibble;
    }
    if (nibble != 2 * id.size())
        throw Error(Errc::bad_argument, "not the UUID of a GPU: " + text);
    return id;
}

std::string gpu_uuid_text(const Id& id) {
    std::string text = "GPU-";
    char byte[3];
    for (std::size_t i = 0; i < id.size(); ++i) {
        if (i == 4 || i == 6 || i == 8 || i == 10)
            text += '-';
        std::snprintf(byte, sizeof(byte), "%02x", std::to_integer<unsigned>(id[i]));
        text += byte;
    }
    return text;
}

} // namespace gpustasis
