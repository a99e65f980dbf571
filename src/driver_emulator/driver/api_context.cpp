// Primary and other contexts, and the calling thread's stack of them.
#include "driver_emulator/driver/api.hpp"
#include "driver_emulator/driver/driver.hpp"

using namespace cudackpt::emulator;

namespace {

Device* find_ordinal(Driver& state, DeviceOrdinal ordinal) {
    const auto index = static_cast<unsigned>(ordinal);
    return index < state.objects.device_count ? &state.objects.devices[index] : nullptr;
}

std::unique_ptr<Context> make_context(Device& device, unsigned flags) {
    auto context = std::make_unique<Context>();
    context->device = &device;
    context->flags = flags;
    context->null_stream.context = context.get();
    return context;
}

Result create_context(Driver& state, Context** handle, unsigned flags, DeviceOrdinal ordinal) {
    const std::lock_guard lock(state.mutex);
    Device* device = find_ordinal(state, ordinal);
    if (handle == nullptr || device == nullptr) {
        return handle == nullptr ? Result::invalid_value : Result::invalid_device;
    }
    const Result result = start_first_context(state, *device);
    if (result != Result::success) {
        return result;
    }
    auto context = make_context(*device, flags);
    *handle = context.get();
    state.objects.contexts.emplace(*handle, std::move(context));
    return push_context(*handle);
}

} // namespace

CUDACKPT_API(cuDevicePrimaryCtxRetain)(Context** handle, DeviceOrdinal ordinal) {
    return call([=](Driver& state) {
        const std::lock_guard lock(state.mutex);
        Device* device = find_ordinal(state, ordinal);
        if (handle == nullptr || device == nullptr) {
            return handle == nullptr ? Result::invalid_value : Result::invalid_device;
        }
        if (device->primary == nullptr) {
            const Result result = start_first_context(state, *device);
            if (result != Result::success) {
                return result;
            }
            device->primary = make_context(*device, device->primary_flags);
            device->primary->primary = true;
        }
        ++device->primary_users;
        *handle = device->primary.get();
        return Result::success;
    });
}

CUDACKPT_API(cuCtxCreate_v2)(Context** handle, unsigned flags, DeviceOrdinal ordinal) {
    return call([=](Driver& state) { return create_context(state, handle, flags, ordinal); });
}

CUDACKPT_API(cuCtxSetCurrent)(Context* handle) {
    return call([=](Driver& state) {
        const std::lock_guard lock(state.mutex);
        if (handle != nullptr && !state.objects.has_context(handle)) {
            return Result::invalid_context;
        }
        set_context(handle);
        return Result::success;
    });
}

CUDACKPT_API(cuCtxGetCurrent)(Context** handle) {
    return call([=](Driver&) {
        if (handle == nullptr) {
            return Result::invalid_value;
        }
        *handle = current_context();
        return Result::success;
    });
}

CUDACKPT_API(cuCtxSynchronize)() {
    return call_in_context([](Driver& state, Context&) { return synchronise(state); });
}

CUDACKPT_API(cuDevicePrimaryCtxRelease_v2)(DeviceOrdinal ordinal) {
    return call([=](Driver& state) {
        const Result done = synchronise(state);
        const std::lock_guard lock(state.mutex);
        Device* device = find_ordinal(state, ordinal);
        if (device == nullptr) {
            return Result::invalid_device;
        }
        if (device->primary_users == 0) {
            return Result::invalid_context;
        }
        if (--device->primary_users == 0) {
            empty_context(state.objects, state.link, *device->primary);
            device->primary.reset();
        }
        return done;
    });
}
