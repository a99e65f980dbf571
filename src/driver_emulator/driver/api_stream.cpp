// SPDX-License-Identifier: Apache-2.0
// Streams.
#include "driver_emulator/driver/api.hpp"
#include "driver_emulator/driver/stream_order.hpp"

using namespace gpustasis::emulator;

namespace {

constexpr int kLowestPriority = 0;
constexpr int kHighestPriority = -5;

/// Answers something about a stream, without waiting for it.
template <typename Body>
int ask_stream(void* handle, Body body) {
    return call_in_context([=, &body](Driver& driver, Context& context) {
        Stream* stream = find_stream(driver, context, handle);
        return stream == nullptr ? Result::invalid_handle : body(driver, *stream);
    });
}

template <typename T>
Result give(T* to, T value) {
    if (to == nullptr) {
        return Result::invalid_value;
    }
    *to = value;
    return Result::success;
}

int create_stream(Stream** handle, unsigned flags, int priority) {
    return call_in_context([=](Driver& driver, Context& context) {
        if (handle == nullptr || (flags & ~kStreamNonBlocking) != 0) {
            return Result::invalid_value;
        }
        auto stream = std::make_unique<Stream>();
        stream->context = &context;
        stream->flags = flags;
        stream->priority = priority;
        *handle = stream.get();
        const std::lock_guard lock(driver.mutex);
        driver.objects.streams.emplace(*handle, std::move(stream));
        return Result::success;
    });
}

} // namespace

GPUSTASIS_API(cuStreamCreate)(Stream** handle, unsigned flags) {
    return create_stream(handle, flags, kLowestPriority);
}

GPUSTASIS_API(cuStreamCreateWithPriority)(Stream** handle, unsigned flags, int priority) {
    const int highest = priority > kLowestPriority ? kLowestPriority : priority;
    return create_stream(handle, flags, highest < kHighestPriority ? kHighestPriority : highest);
}

GPUSTASIS_API(cuStreamDestroy_v2)(Stream* handle) {
    return call([=](Driver& driver) {
        const std::lock_guard lock(driver.mutex);
        // Work that is still in it goes on, and is waited for by whoever waits for everything.
        return driver.objects.streams.erase(handle) == 1 ? Result::success : Result::invalid_handle;
    });
}

GPUSTASIS_API(cuStreamSynchronize)(void* handle) {
    return call_in_stream(handle, [](Driver&, Stream&) { return Result::success; });
}

GPUSTASIS_API(cuStreamQuery)(void* handle) {
    return ask_stream(handle, [](Driver& driver, Stream& stream) {
        const Result refused = refuse_capture(driver, stream);
        if (refused != Result::success) {
            return refused;
        }
        bool done = driver.link.is_done(last_before(driver, stream));
        for (const LanePoint& point : lanes_before(driver, stream)) {
            done = done && point.is_reached();
        }
        return done ? Result::success : Result::not_ready;
    });
}

GPUSTASIS_API(cuStreamWaitEvent)(void* handle, Event* event, unsigned) {
    return ask_stream(handle, [=](Driver& driver, Stream& stream) {
        LanePoint point;
        {
            const std::lock_guard lock(driver.mutex);
            if (!driver.objects.events.contains(event)) {
                return Result::invalid_handle;
            }
            point = event->point;
        }
        if (point.is_reached()) {
            return Result::success; // or of the one order
        }
        return submit_direct(driver, stream, [point](Result before) {
            point.wait();
            return before;
        });
    });
}

GPUSTASIS_API(cuStreamAddCallback)
(void* handle, void (*callback)(void*, int, void*), void* data, unsigned flags) {
    if (callback == nullptr || flags != 0) {
        return code(Result::invalid_value);
    }
    return ask_stream(handle, [=](Driver& driver, Stream& stream) {
        return defer(driver, stream, [=](Result before) {
            callback(handle, code(before), data);
            return Result::success;
        });
    });
}

GPUSTASIS_API(cuLaunchHostFunc)(void* handle, void (*function)(void*), void* data) {
    if (function == nullptr) {
        return code(Result::invalid_value);
    }
    return ask_stream(handle, [=](Driver& driver, Stream& stream) {
        return defer(driver, stream, [=](Result before) {
            if (before == Result::success) {
                function(data);
            }
            return Result::success;
        });
    });
}

GPUSTASIS_API(cuStreamGetFlags)(void* handle, unsigned* flags) {
    return ask_stream(handle, [=](Driver&, Stream& stream) { return give(flags, stream.flags); });
}

GPUSTASIS_API(cuStreamGetPriority)(void* handle, int* priority) {
    return ask_stream(handle,
                      [=](Driver&, Stream& stream) { return give(priority, stream.priority); });
}

GPUSTASIS_API(cuStreamGetId)(void* handle, unsigned long long* id) {
    return ask_stream(handle, [=](Driver&, Stream& stream) {
        return give(id, static_cast<unsigned long long>(reinterpret_cast<std::uintptr_t>(&stream)));
    });
}

GPUSTASIS_API(cuStreamGetCtx)(void* handle, Context** context) {
    return ask_stream(handle,
                      [=](Driver&, Stream& stream) { return give(context, stream.context); });
}

GPUSTASIS_API(cuStreamGetCtx_v2)(void* handle, Context** context, void** green_context) {
    if (green_context != nullptr) {
        *green_context = nullptr;
    }
    return cuStreamGetCtx(handle, context);
}

GPUSTASIS_API(cuStreamGetDevice)(void* handle, DeviceOrdinal* device) {
    return ask_stream(handle, [=](Driver&, Stream& stream) {
        return give(device, stream.context->device->ordinal);
    });
}

GPUSTASIS_API(cuCtxGetStreamPriorityRange)(int* lowest, int* highest) {
    return call_in_context([=](Driver&, Context&) {
        if (lowest != nullptr) {
            *lowest = kLowestPriority;
        }
        if (highest != nullptr) {
            *highest = kHighestPriority;
        }
        return Result::success;
    });
}
