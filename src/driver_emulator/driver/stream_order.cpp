// SPDX-License-Identifier: Apache-2.0
#include "driver_emulator/driver/stream_order.hpp"

namespace gpustasis::emulator {
namespace {

LanePoint end_of(const Stream& stream) {
    return {stream.lane, stream.lane == nullptr ? 0 : stream.lane->submitted()};
}

} // namespace

Stream* find_stream(Driver& driver, Context& context, void* handle) {
    const auto number = reinterpret_cast<std::uintptr_t>(handle);
    if (number == 0 || number == kStreamLegacy || number == kStreamPerThread) {
        return &context.null_stream;
    }
    const std::lock_guard lock(driver.mutex);
    const auto found = driver.objects.streams.find(static_cast<Stream*>(handle));
    return found == driver.objects.streams.end() ? nullptr : found->first;
}

std::vector<LanePoint> lanes_before(Driver& driver, const Stream& stream) {
    std::vector<LanePoint> points;
    if (driver.lanes_pending.load() == 0) {
        return points;
    }
    const std::lock_guard lock(driver.mutex);
    points.push_back(end_of(stream));
    const Stream& null_stream = stream.context->null_stream;
    if (&stream != &null_stream) {
        if ((stream.flags & kStreamNonBlocking) == 0) {
            points.push_back(end_of(null_stream));
        }
        return points;
    }
    for (const auto& [handle, other] : driver.objects.streams) {
        if (other->context == stream.context && (other->flags & kStreamNonBlocking) == 0) {
            points.push_back(end_of(*other));
        }
    }
    return points;
}

Result enter_stream(Driver& driver, Stream& stream) {
    if (const Result refused = refuse_capture(driver, stream); refused != Result::success) {
        return refused;
    }
    for (const LanePoint& point : lanes_before(driver, stream)) {
        point.wait();
    }
    return Result::success;
}

Result refuse_capture(Driver& driver, Stream& stream) {
    const std::lock_guard lock(driver.mutex);
    if (stream.capture == Capture::none) {
        return Result::success;
    }
    stream.capture = Capture::invalidated; // no graph has nodes
    return Result::stream_capture_unsupported;
}

Result submit_direct(Driver& driver, Stream& stream, std::function<Result(Result)> body,
                     LanePoint* submitted) {
    if (const Result refused = refuse_capture(driver, stream); refused != Result::success) {
        return refused;
    }
    std::vector<LanePoint> before = lanes_before(driver, stream);
    const std::uint64_t sequence = last_before(driver, stream);
    const std::lock_guard lock(driver.mutex);
    if (stream.lane == nullptr) {
        std::erase_if(driver.lanes, [](const auto& lane) { return lane.expired(); });
        driver.lanes.reserve(driver.lanes.size() + 1);
        stream.lane = Lane::start(driver.lanes_pending);
        if (stream.lane == nullptr) {
            return Result::out_of_memory;
        }
        driver.lanes.push_back(stream.lane);
    }
    std::erase_if(before, [&stream](const LanePoint& point) { return point.lane == stream.lane; });
    const std::uint64_t number = stream.lane->submit(
        [before = std::move(before), sequence, body = std::move(body), &driver] {
            for (const LanePoint& point : before) {
                point.wait();
            }
            const Result done = driver.link.wait(sequence);
            const Result result = body(done);
            if (done == Result::success && result != Result::success) {
                driver.link.lose(result);
            }
        });
    if (submitted != nullptr) {
        *submitted = {stream.lane, number};
    }
    return Result::success;
}

} // namespace gpustasis::emulator
