// SPDX-License-Identifier: Apache-2.0
// Primary and other contexts, and the calling thread's stack of them.
#include "driver_emulator/driver/api.hpp"
#include "driver_emulator/driver/driver.hpp"

using namespace gpustasis::emulator;

namespace {

Device* find_ordinal(Driver& driver, DeviceOrdinal ordinal) {
    const auto index = static_cast<unsigned>(ordinal);
    return index < driver.objects.device_count ? &driver.objects.devices[index] : nullptr;
}

std::unique_ptr<Context> make_context(Device& device, unsigned flags) {
    auto context = std::make_unique<Context>();
    context->device = &device;
    context->flags = flags;
    context->null_stream.context = context.get();
    return context;
}

int create_context(Context** handle, unsigned flags, DeviceOrdinal ordinal) {
    return call([=](Driver& driver) {
        const std::lock_guard lock(driver.mutex);
        Device* device = find_ordinal(driver, ordinal);
        if (handle == nullptr || device == nullptr) {
            return handle == nullptr ? Result::invalid_value : Result::invalid_device;
        }
        const Result result = start_first_context(driver, *device);
        if (result != Result::success) {
            return result;
        }
        auto context = make_context(*device, flags);
        *handle = context.get();
        driver.objects.contexts.emplace(*handle, std::move(context));
        return push_context(*handle);
    });
}

/// Runs a body on a device, behind the lock.
template <typename Body>
int with_device(DeviceOrdinal ordinal, Body body) {
    return call([=, &body](Driver& driver) {
        const std::lock_guard lock(driver.mutex);
        Device* device = find_ordinal(driver, ordinal);
        return device == nullptr ? Result::invalid_device : body(driver, *device);
    });
}

void end_primary(Driver& driver, Device& device) {
    if (device.primary != nullptr) {
        empty_context(driver.objects, driver.link, *device.primary);
        device.primary.reset();
    }
    device.primary_users = 0;
}

template <typename T>
Result give(T* to, T value) {
    if (to == nullptr) {
        return Result::invalid_value;
    }
    *to = value;
    return Result::success;
}

} // namespace

GPUSTASIS_API(cuDevicePrimaryCtxRetain)(Context** handle, DeviceOrdinal ordinal) {
    return with_device(ordinal, [=](Driver& driver, Device& device) {
        if (handle == nullptr) {
            return Result::invalid_value;
        }
        if (device.primary == nullptr) {
            const Result result = start_first_context(driver, device);
            if (result != Result::success) {
                return result;
            }
            device.primary = make_context(device, device.primary_flags);
            device.primary->primary = true;
        }
        ++device.primary_users;
        *handle = device.primary.get();
        return Result::success;
    });
}

GPUSTASIS_API(cuDevicePrimaryCtxRelease_v2)(DeviceOrdinal ordinal) {
    return call([=](Driver& driver) {
        const Result done = synchronise(driver);
        const std::lock_guard lock(driver.mutex);
        Device* device = find_ordinal(driver, ordinal);
        if (device == nullptr) {
            return Result::invalid_device;
        }
        if (device->primary_users == 0) {
            return Result::invalid_context;
        }
        if (--device->primary_users == 0) {
            end_primary(driver, *device);
        }
        return done;
    });
}

GPUSTASIS_API(cuDevicePrimaryCtxReset_v2)(DeviceOrdinal ordinal) {
    return call([=](Driver& driver) {
        const Result done = synchronise(driver);
        const std::lock_guard lock(driver.mutex);
        Device* device = find_ordinal(driver, ordinal);
        if (device == nullptr) {
            return Result::invalid_device;
        }
        end_primary(driver, *device);
        return done;
    });
}

GPUSTASIS_API(cuDevicePrimaryCtxSetFlags_v2)(DeviceOrdinal ordinal, unsigned flags) {
    return with_device(ordinal, [=](Driver&, Device& device) {
        device.primary_flags = flags;
        if (device.primary != nullptr) {
            device.primary->flags = flags;
        }
        return Result::success;
    });
}

GPUSTASIS_API(cuDevicePrimaryCtxGetState)(DeviceOrdinal ordinal, unsigned* flags, int* active) {
    return with_device(ordinal, [=](Driver&, Device& device) {
        const Result result = give(flags, device.primary_flags);
        return result != Result::success ? result : give(active, device.primary != nullptr ? 1 : 0);
    });
}

GPUSTASIS_API(cuCtxCreate_v2)(Context** handle, unsigned flags, DeviceOrdinal ordinal) {
    return create_context(handle, flags, ordinal);
}

GPUSTASIS_API(cuCtxCreate_v3)
(Context** handle, void*, int affinities, unsigned flags, DeviceOrdinal ordinal) {
    return affinities != 0 ? code(Result::not_supported) : create_context(handle, flags, ordinal);
}

GPUSTASIS_API(cuCtxCreate_v4)
(Context** handle, void* params, unsigned flags, DeviceOrdinal ordinal) {
    return params != nullptr ? code(Result::not_supported) : create_context(handle, flags, ordinal);
}

GPUSTASIS_API(cuCtxDestroy_v2)(Context* handle) {
    return call([=](Driver& driver) {
        const Result done = synchronise(driver);
        const bool is_top = current_context() == handle;
        const std::lock_guard lock(driver.mutex);
        const auto found = driver.objects.contexts.find(handle);
        if (found == driver.objects.contexts.end()) {
            return Result::invalid_context;
        }
        if (is_top) {
            set_context(nullptr);
        }
        empty_context(driver.objects, driver.link, *handle);
        driver.objects.contexts.erase(found);
        return done;
    });
}

GPUSTASIS_API(cuCtxSetCurrent)(Context* handle) {
    return call([=](Driver& driver) {
        const std::lock_guard lock(driver.mutex);
        if (handle != nullptr && !driver.objects.has_context(handle)) {
            return Result::invalid_context;
        }
        set_context(handle);
        return Result::success;
    });
}

GPUSTASIS_API(cuCtxGetCurrent)(Context** handle) {
    return call([=](Driver&) { return give(handle, current_context()); });
}

GPUSTASIS_API(cuCtxPushCurrent_v2)(Context* handle) {
    return call([=](Driver& driver) {
        const std::lock_guard lock(driver.mutex);
        return driver.objects.has_context(handle) ? push_context(handle) : Result::invalid_context;
    });
}

GPUSTASIS_API(cuCtxPopCurrent_v2)(Context** handle) {
    return call([=](Driver&) {
        Context* popped = pop_context();
        if (handle != nullptr) {
            *handle = popped;
        }
        return popped == nullptr ? Result::invalid_context : Result::success;
    });
}

GPUSTASIS_API(cuCtxSynchronize)() {
    return call_in_context([](Driver& driver, Context&) { return synchronise(driver); });
}

GPUSTASIS_API(cuCtxSynchronize_v2)(Context*) {
    return cuCtxSynchronize();
}

GPUSTASIS_API(cuCtxGetDevice)(DeviceOrdinal* device) {
    return call_in_context(
        [=](Driver&, Context& context) { return give(device, context.device->ordinal); });
}

GPUSTASIS_API(cuCtxGetDevice_v2)(DeviceOrdinal* device, Context* handle) {
    return call([=](Driver& driver) {
        const std::lock_guard lock(driver.mutex);
        return driver.objects.has_context(handle) ? give(device, handle->device->ordinal)
                                                  : Result::invalid_context;
    });
}

GPUSTASIS_API(cuCtxGetFlags)(unsigned* flags) {
    return call_in_context([=](Driver&, Context& context) { return give(flags, context.flags); });
}

GPUSTASIS_API(cuCtxGetId)(Context*, unsigned long long* id) {
    return call_in_context([=](Driver&, Context& context) {
        return give(id,
                    static_cast<unsigned long long>(reinterpret_cast<std::uintptr_t>(&context)));
    });
}

GPUSTASIS_API(cuCtxGetApiVersion)(Context*, unsigned* version) {
    return call_in_context([=](Driver& driver, Context&) {
        return give(version, static_cast<unsigned>(driver.info.api_version));
    });
}

GPUSTASIS_API(cuCtxGetLimit)(std::size_t*, int) {
    return call_in_context([](Driver&, Context&) { return Result::unsupported_limit; });
}

GPUSTASIS_API(cuCtxSetLimit)(int, std::size_t) {
    return call_in_context([](Driver&, Context&) { return Result::unsupported_limit; });
}
