// SPDX-License-Identifier: Apache-2.0
// Modules: shared objects of host code, made with gpustasis_emulator.h.
#include "driver_emulator/driver/api.hpp"
#include "driver_emulator/driver/driver.hpp"
#include "driver_emulator/driver/module_image.hpp"

#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

using namespace gpustasis::emulator;

namespace {

constexpr std::size_t kMaxImage = std::size_t{1} << 30;
constexpr int kAttributeMaxThreads = 0; // CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
constexpr int kLastFunctionAttribute = 16;

/// A private mapping, unmapped at the end unless it is taken.
class Mapping {
public:
    Mapping(std::size_t size, int protection, int flags, int fd)
        : memory_(mmap(nullptr, size, protection, flags, fd, 0)), size_(size) {}
    ~Mapping() {
        if (memory_ != MAP_FAILED) {
            munmap(memory_, size_);
        }
    }
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
    bool failed() const { return memory_ == MAP_FAILED; }
    void* get() const { return memory_; }
    void* take() { return std::exchange(memory_, MAP_FAILED); }

private:
    void* memory_;
    std::size_t size_;
};

Result load(Driver& driver, Context& context, Module** handle, const void* image,
            std::size_t limit) {
    std::size_t size = 0;
    Result result = measure_image(image, limit, &size);
    if (result != Result::success) {
        return result;
    }
    Mapping copy(size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
    if (copy.failed()) {
        return Result::out_of_memory;
    }
    std::memcpy(copy.get(), image, size);
    auto module = std::make_unique<Module>();
    const std::lock_guard lock(driver.mutex);
    module->context = &context;
    module->id = driver.objects.last_module + 1;
    result = driver.link.load_module(module->id, copy.get(), size);
    if (result != Result::success) {
        return result;
    }
    driver.objects.last_module = module->id;
    *handle = module.get();
    Module& kept = *driver.objects.modules.emplace(*handle, std::move(module)).first->second;
    kept.image = copy.take();
    kept.image_size = size;
    return Result::success;
}

int load_data(Module** handle, const void* image) {
    return call_in_context([=](Driver& driver, Context& context) {
        if (handle == nullptr || image == nullptr) {
            return Result::invalid_value;
        }
        return load(driver, context, handle, image, kMaxImage);
    });
}

} // namespace

GPUSTASIS_API(cuModuleLoad)(Module** handle, const char* path) {
    return call_in_context([=](Driver& driver, Context& context) {
        if (handle == nullptr || path == nullptr) {
            return Result::invalid_value;
        }
        const int fd = open(path, O_RDONLY | O_CLOEXEC);
        struct stat file {};
        if (fd < 0 || fstat(fd, &file) != 0 || file.st_size == 0) {
            if (fd >= 0) {
                close(fd);
            }
            return Result::file_not_found;
        }
        const auto size = static_cast<std::size_t>(file.st_size);
        const Mapping mapping(size, PROT_READ, MAP_PRIVATE, fd);
        close(fd);
        return mapping.failed() ? Result::file_not_found
                                : load(driver, context, handle, mapping.get(), size);
    });
}

GPUSTASIS_API(cuModuleLoadData)(Module** handle, const void* image) {
    return load_data(handle, image);
}

GPUSTASIS_API(cuModuleLoadDataEx)(Module** handle, const void* image, unsigned, int*, void**) {
    return load_data(handle, image); // the options are those of a compiler
}

GPUSTASIS_API(cuModuleLoadFatBinary)(Module** handle, const void* image) {
    return load_data(handle, image);
}

GPUSTASIS_API(cuModuleUnload)(Module* handle) {
    return call([=](Driver& driver) {
        const Result done = synchronise(driver);
        const std::lock_guard lock(driver.mutex);
        const auto found = driver.objects.modules.find(handle);
        if (found == driver.objects.modules.end()) {
            return Result::invalid_handle;
        }
        for (auto& [name, function] : handle->functions) {
            driver.objects.functions.erase(function.get());
        }
        driver.link.unload_module(handle->id);
        munmap(handle->image, handle->image_size);
        driver.objects.modules.erase(found);
        return done;
    });
}

GPUSTASIS_API(cuModuleGetFunction)(Function** handle, Module* module, const char* name) {
    return call([=](Driver& driver) {
        if (handle == nullptr || name == nullptr || *name == '\0') {
            return Result::invalid_value;
        }
        const std::lock_guard lock(driver.mutex);
        if (!driver.objects.modules.contains(module)) {
            return Result::invalid_handle;
        }
        if (const auto known = module->functions.find(name); known != module->functions.end()) {
            *handle = known->second.get();
            return Result::success;
        }
        FunctionReply reply{};
        const Result result = driver.link.find_function(module->id, name, reply);
        if (result != Result::success) {
            return result;
        }
        auto function = std::make_unique<Function>();
        function->module = module;
        std::strcpy(function->name, name);
        function->param_count = reply.param_count;
        function->param_bytes = reply.param_bytes;
        std::memcpy(function->sizes, reply.sizes, sizeof function->sizes);
        std::memcpy(function->offsets, reply.offsets, sizeof function->offsets);
        *handle = function.get();
        driver.objects.functions.emplace(*handle, module);
        module->functions.emplace(name, std::move(function));
        return Result::success;
    });
}

GPUSTASIS_API(cuModuleGetGlobal_v2)(DevicePtr*, std::size_t*, Module* module, const char*) {
    return call([=](Driver& driver) {
        const std::lock_guard lock(driver.mutex);
        // There are no device variables: see gpustasis_emulator.h.
        return driver.objects.modules.contains(module) ? Result::not_found : Result::invalid_handle;
    });
}

GPUSTASIS_API(cuFuncGetAttribute)(int* value, int attribute, Function* function) {
    return call([=](Driver& driver) {
        const std::lock_guard lock(driver.mutex);
        if (!driver.objects.functions.contains(function)) {
            return Result::invalid_handle;
        }
        if (value == nullptr || attribute < 0 || attribute > kLastFunctionAttribute) {
            return Result::invalid_value;
        }
        *value = attribute == kAttributeMaxThreads ? 1024 : 0;
        return Result::success;
    });
}
