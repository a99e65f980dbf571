// SPDX-License-Identifier: Apache-2.0
#include "driver_emulator/driver/objects.hpp"

#include "driver_emulator/driver/driver.hpp"
#include "driver_emulator/driver/storage_operation.hpp"

#include <sys/mman.h>

namespace gpustasis::emulator {
namespace {

constexpr unsigned kMaxDepth = 32;

struct ContextStack {
    Context* contexts[kMaxDepth];
    unsigned depth;
};

thread_local ContextStack stack; // trivial: no destructor, no allocation

} // namespace

Objects::Objects() = default;
Objects::~Objects() = default;

bool Objects::has_context(const Context* context) const noexcept {
    for (unsigned i = 0; i < device_count; ++i) {
        if (context != nullptr && devices[i].primary.get() == context) {
            return true;
        }
    }
    return contexts.contains(const_cast<Context*>(context));
}

Device* Objects::find_device(DevicePtr address) noexcept {
    for (unsigned i = 0; i < device_count; ++i) {
        if (devices[i].vram.owns(address)) {
            return &devices[i];
        }
    }
    return nullptr;
}

std::pair<std::uint64_t, const HostRange*> Objects::find_host(std::uint64_t address) const {
    auto found = host_ranges.upper_bound(address);
    if (found == host_ranges.begin()) {
        return {0, nullptr};
    }
    --found;
    const bool inside = address - found->first < found->second.size;
    return {found->first, inside ? &found->second : nullptr};
}

void empty_context(Objects& objects, DaemonLink& link, Context& context) {
    context.device->vram.free_all(link, &context);
    const auto is_its = [&context](const auto& entry) { return entry.second->context == &context; };
    std::erase_if(objects.streams, is_its);
    std::erase_if(objects.events, is_its);
    for (auto& [handle, module] : objects.modules) {
        if (module->context == &context) {
            for (auto& [name, function] : module->functions) {
                objects.functions.erase(function.get());
            }
            link.unload_module(module->id);
            munmap(module->image, module->image_size);
        }
    }
    std::erase_if(objects.modules, is_its);
    std::erase_if(objects.host_ranges, [&context](const auto& entry) {
        const HostRange& range = entry.second;
        if (range.context == &context && range.mapped_size != 0) {
            munmap(reinterpret_cast<void*>(entry.first), range.mapped_size);
        }
        return range.context == &context;
    });
}

Context* current_context() noexcept {
    if (stack.depth == 0) {
        return nullptr;
    }
    Context* top = stack.contexts[stack.depth - 1];
    const std::lock_guard lock(driver().mutex);
    return driver().objects.has_context(top) ? top : nullptr; // another thread may have ended it
}

Result push_context(Context* context) noexcept {
    if (stack.depth == kMaxDepth) {
        return Result::out_of_memory;
    }
    stack.contexts[stack.depth++] = context;
    return Result::success;
}

Context* pop_context() noexcept {
    return stack.depth == 0 ? nullptr : stack.contexts[--stack.depth];
}

void set_context(Context* context) noexcept {
    if (stack.depth > 0) {
        --stack.depth;
    }
    if (context != nullptr) {
        stack.contexts[stack.depth++] = context;
    }
}

} // namespace gpustasis::emulator
