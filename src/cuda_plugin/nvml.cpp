#include "cuda_plugin/nvml.hpp"

#include <dlfcn.h>

#include <array>
#include <cctype>

namespace gpustasis {
namespace {

constexpr int kSuccess = 0;
using Device = void*; ///< nvmlDevice_t

/// nvmlMemory_t
struct Memory {
    unsigned long long total = 0;
    unsigned long long free = 0;
    unsigned long long used = 0;
};

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
};

std::unique_ptr<Nvml> Nvml::find(const std::string& soname) {
    void* library = ::dlopen(soname.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (library == nullptr)
        return nullptr;
    auto api = std::make_unique<Api>();
    bool complete = true;
    const auto resolve = [&](const char* symbol, auto& out) {
        out = reinterpret_cast<std::remove_reference_t<decltype(out)>>(::dlsym(library, symbol));
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
        check(api_->memory(device, &memory), "nvmlDeviceGetMemoryInfo");
        gpu.info.memory_size = memory.total;
        gpu.free_size = memory.free;
        gpus.push_back(std::move(gpu));
    }
    return gpus;
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

} // namespace gpustasis
