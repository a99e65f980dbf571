// SPDX-License-Identifier: Apache-2.0
// Events.
#include "driver_emulator/driver/api.hpp"
#include "driver_emulator/driver/futex.hpp"
#include "driver_emulator/driver/stream_order.hpp"

#include <algorithm>

using namespace gpustasis::emulator;

namespace {

constexpr unsigned kKnownFlags = 0x7; // blocking sync, no timing, interprocess
constexpr unsigned kInterprocess = 0x4;

/// Whether it is reached, and if so, when.
bool is_reached(const Driver& driver, Event& event) {
    if (!event.recorded || event.done_ns != 0) {
        return true;
    }
    if (!driver.link.is_done(event.sequence) || !event.point.is_reached()) {
        return false;
    }
    const std::uint64_t direct = event.point_ns == nullptr ? 0 : event.point_ns->load();
    event.done_ns = std::max({event.recorded_ns, driver.link.done_ns(event.sequence), direct});
    return true;
}

template <typename Body>
int with_event(Event* handle, Body body) {
    return call([=, &body](Driver& driver) {
        const std::lock_guard lock(driver.mutex);
        return driver.objects.events.contains(handle) ? body(driver, *handle)
                                                      : Result::invalid_handle;
    });
}

/// Puts a mark behind the copies of custom storage in the stream, if any are to be waited for.
Result mark_lane(Driver& driver, Stream& stream, LanePoint& point,
                 std::shared_ptr<std::atomic<std::uint64_t>>& reached_ns) {
    if (const Result refused = refuse_capture(driver, stream); refused != Result::success) {
        return refused;
    }
    const std::vector<LanePoint> before = lanes_before(driver, stream);
    if (std::all_of(before.begin(), before.end(),
                    [](const LanePoint& each) { return each.is_reached(); })) {
        return Result::success;
    }
    reached_ns = std::make_shared<std::atomic<std::uint64_t>>(0);
    return submit_direct(
        driver, stream,
        [reached_ns](Result done) {
            *reached_ns = now_ns();
            return done;
        },
        &point);
}

int record(Event* handle, void* stream_handle) {
    return call_in_context([=](Driver& driver, Context& context) {
        Stream* stream = find_stream(driver, context, stream_handle);
        if (stream == nullptr) {
            return Result::invalid_handle;
        }
        LanePoint point;
        std::shared_ptr<std::atomic<std::uint64_t>> point_ns;
        const Result marked = mark_lane(driver, *stream, point, point_ns);
        if (marked != Result::success) {
            return marked;
        }
        const std::lock_guard lock(driver.mutex);
        if (!driver.objects.events.contains(handle)) {
            return Result::invalid_handle;
        }
        handle->recorded = true;
        handle->sequence = last_before(driver, *stream);
        handle->recorded_ns = now_ns();
        handle->done_ns = 0;
        handle->point = std::move(point);
        handle->point_ns = std::move(point_ns);
        return Result::success;
    });
}

} // namespace

GPUSTASIS_API(cuEventCreate)(Event** handle, unsigned flags) {
    return call_in_context([=](Driver& driver, Context& context) {
        if (handle == nullptr || (flags & ~kKnownFlags) != 0) {
            return Result::invalid_value;
        }
        if ((flags & kInterprocess) != 0) {
            return Result::not_supported;
        }
        auto event = std::make_unique<Event>();
        event->context = &context;
        event->flags = flags;
        *handle = event.get();
        const std::lock_guard lock(driver.mutex);
        driver.objects.events.emplace(*handle, std::move(event));
        return Result::success;
    });
}

GPUSTASIS_API(cuEventRecord)(Event* handle, void* stream) {
    return record(handle, stream);
}

GPUSTASIS_API(cuEventRecordWithFlags)(Event* handle, void* stream, unsigned) {
    return record(handle, stream);
}

GPUSTASIS_API(cuEventQuery)(Event* handle) {
    return with_event(handle, [](Driver& driver, Event& event) {
        return is_reached(driver, event) ? Result::success : Result::not_ready;
    });
}

GPUSTASIS_API(cuEventSynchronize)(Event* handle) {
    return call([=](Driver& driver) {
        std::uint64_t sequence = 0;
        LanePoint point;
        {
            const std::lock_guard lock(driver.mutex);
            if (!driver.objects.events.contains(handle)) {
                return Result::invalid_handle;
            }
            sequence = handle->sequence;
            point = handle->point;
        }
        point.wait();
        return driver.link.wait(sequence);
    });
}

GPUSTASIS_API(cuEventDestroy_v2)(Event* handle) {
    return call([=](Driver& driver) {
        const std::lock_guard lock(driver.mutex);
        return driver.objects.events.erase(handle) == 1 ? Result::success : Result::invalid_handle;
    });
}

GPUSTASIS_API(cuEventElapsedTime)(float* milliseconds, Event* start, Event* end) {
    return call([=](Driver& driver) {
        const std::lock_guard lock(driver.mutex);
        if (milliseconds == nullptr) {
            return Result::invalid_value;
        }
        for (Event* event : {start, end}) {
            if (!driver.objects.events.contains(event) || !event->recorded ||
                (event->flags & kEventDisableTiming) != 0) {
                return Result::invalid_handle;
            }
            if (!is_reached(driver, *event)) {
                return Result::not_ready;
            }
        }
        const auto elapsed = static_cast<std::int64_t>(end->done_ns - start->done_ns);
        *milliseconds = static_cast<float>(static_cast<double>(elapsed) / 1e6);
        return Result::success;
    });
}

GPUSTASIS_API(cuEventElapsedTime_v2)(float* milliseconds, Event* start, Event* end) {
    return cuEventElapsedTime(milliseconds, start, end);
}
