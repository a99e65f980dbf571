// SPDX-License-Identifier: Apache-2.0
// Stream capture, as far as to say that a stream captures. There are no graph nodes: what is made in
// a capturing stream fails and ends its capture.
#include "driver_emulator/driver/api.hpp"
#include "driver_emulator/driver/stream_order.hpp"

using namespace gpustasis::emulator;

namespace {

constexpr int kLastCaptureMode = 2; // CU_STREAM_CAPTURE_MODE_RELAXED

/// Runs a body on a stream, behind the lock.
template <typename Body>
int with_stream(void* handle, Body body) {
    return call_in_context([=, &body](Driver& driver, Context& context) {
        Stream* stream = find_stream(driver, context, handle);
        const std::lock_guard lock(driver.mutex);
        return stream == nullptr ? Result::invalid_handle : body(driver, *stream);
    });
}

} // namespace

GPUSTASIS_API(cuStreamBeginCapture_v2)(void* handle, int mode) {
    return with_stream(handle, [=](Driver&, Stream& stream) {
        if (mode < 0 || mode > kLastCaptureMode) {
            return Result::invalid_value;
        }
        if (&stream == &stream.context->null_stream) {
            return Result::stream_capture_unsupported;
        }
        if (stream.capture != Capture::none) {
            return Result::illegal_state;
        }
        stream.capture = Capture::active;
        return Result::success;
    });
}

GPUSTASIS_API(cuStreamEndCapture)(void* handle, Graph** graph) {
    return with_stream(handle, [=](Driver& driver, Stream& stream) {
        if (graph == nullptr) {
            return Result::invalid_value;
        }
        *graph = nullptr;
        if (stream.capture == Capture::none) {
            return Result::illegal_state;
        }
        if (std::exchange(stream.capture, Capture::none) == Capture::invalidated) {
            return Result::stream_capture_invalidated;
        }
        auto made = std::make_unique<Graph>();
        *graph = made.get();
        driver.objects.graphs.emplace(*graph, std::move(made));
        return Result::success;
    });
}

GPUSTASIS_API(cuStreamIsCapturing)(void* handle, int* status) {
    return with_stream(handle, [=](Driver&, Stream& stream) {
        if (status == nullptr) {
            return Result::invalid_value;
        }
        *status = static_cast<int>(stream.capture);
        return Result::success;
    });
}

GPUSTASIS_API(cuGraphDestroy)(Graph* graph) {
    return call([=](Driver& driver) {
        const std::lock_guard lock(driver.mutex);
        return driver.objects.graphs.erase(graph) == 1 ? Result::success : Result::invalid_value;
    });
}
