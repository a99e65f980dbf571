// SPDX-License-Identifier: Apache-2.0
#include "driver_emulator/daemon/module_table.hpp"

#include "driver_emulator/include/gpustasis_emulator.h"

#include <cstdio>
#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

namespace gpustasis::emulator {

Result ModuleTable::load(std::uint64_t module, int image) {
    // dlopen takes equal paths for the same file, even one that stayed after dlclose: no number
    // twice.
    const int fd = fcntl(image, F_DUPFD_CLOEXEC, next_fd_);
    if (fd < 0) {
        return Result::operating_system;
    }
    next_fd_ = fd + 1;
    const std::string path = "/proc/self/fd/" + std::to_string(fd);
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    close(fd);
    if (handle == nullptr) {
        std::fprintf(stderr, "gpustasis driver emulator: module: %s\n", dlerror());
        return Result::invalid_image;
    }
    handles_[module] = handle;
    return Result::success;
}

Result ModuleTable::unload(std::uint64_t module) {
    const auto found = handles_.find(module);
    if (found == handles_.end()) {
        return Result::invalid_handle;
    }
    dlclose(found->second);
    handles_.erase(found);
    return Result::success;
}

const gpustasis_emulator::Kernel* ModuleTable::find(std::uint64_t module,
                                                    const std::string& name) const {
    const auto found = handles_.find(module);
    if (found == handles_.end()) {
        return nullptr;
    }
    return static_cast<const gpustasis_emulator::Kernel*>(
        dlsym(found->second, ("gpustasis_kernel_" + name).c_str()));
}

FunctionReply describe(const gpustasis_emulator::Kernel* kernel) {
    FunctionReply reply{};
    reply.reply.magic = kWireMagic;
    if (kernel == nullptr) {
        reply.reply.result = Result::not_found;
        return reply;
    }
    if (kernel->magic != gpustasis_emulator::kKernelMagic || kernel->param_count > kMaxParams ||
        kernel->param_bytes > kMaxParamBytes) {
        reply.reply.result = Result::invalid_image;
        return reply;
    }
    reply.param_count = kernel->param_count;
    reply.param_bytes = kernel->param_bytes;
    for (unsigned i = 0; i < kernel->param_count; ++i) {
        reply.sizes[i] = kernel->param_sizes[i];
        reply.offsets[i] = kernel->param_offsets[i];
    }
    return reply;
}

} // namespace gpustasis::emulator
