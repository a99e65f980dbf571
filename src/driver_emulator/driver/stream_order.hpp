// SPDX-License-Identifier: Apache-2.0
/// Which work an operation in a stream comes after.
///
/// The worker runs launches one after the other, in the order of all streams together, and the
/// driver's thread does copies and host functions in between. So an event
/// of another stream is waited for by itself, and a stream is done when its last launch is.
///
/// Copies of custom storage are apart from that order, so that those of different streams overlap: each
/// stream that has any has a lane of them. What comes behind them in their stream, and is no such
/// copy itself, is not made before they are done.
#pragma once

#include "driver_emulator/driver/driver.hpp"

#include <functional>
#include <utility>
#include <vector>

namespace gpustasis::emulator {

/// The stream of a handle; the default streams' handles give the context's null stream. Null if
/// there is none.
[[nodiscard]] Stream* find_stream(Driver& driver, Context& context, void* handle);

/// The last launch that an operation in this stream has to wait for: for the null stream, any.
[[nodiscard]] inline std::uint64_t last_before(const Driver& driver, const Stream& stream) {
    const bool null_stream = &stream == &stream.context->null_stream;
    return null_stream ? driver.link.submitted() : stream.last_sequence;
}

/// The copies of custom storage that an operation in this stream comes after.
[[nodiscard]] std::vector<LanePoint> lanes_before(Driver& driver, const Stream& stream);

/// What every operation in a stream does first: waits for copies of custom storage before it. Returns
/// stream_capture_unsupported if the stream captures: there are no graphs, and its capture is invalid
/// from then on.
[[nodiscard]] Result enter_stream(Driver& driver, Stream& stream);

/// enter_stream() for what does not wait.
[[nodiscard]] Result refuse_capture(Driver& driver, Stream& stream);

/// Has a copy of custom storage, or a fill of it, done in its stream's lane: body(Result) as for
/// defer(). *submitted, unless null, is the moment when it is done.
[[nodiscard]] Result submit_direct(Driver& driver, Stream& stream,
                                   std::function<Result(Result)> body,
                                   LanePoint* submitted = nullptr);

/// Runs `body` when all that is in the stream is done.
template <typename Body>
int call_in_stream(void* handle, Body body) noexcept {
    return call_in_context([=, &body](Driver& driver, Context& context) {
        Stream* stream = find_stream(driver, context, handle);
        if (stream == nullptr) {
            return Result::invalid_handle;
        }
        const Result entered = enter_stream(driver, *stream);
        if (entered != Result::success) {
            return entered;
        }
        const Result done = driver.link.wait(last_before(driver, *stream));
        return done != Result::success ? done : body(driver, *stream);
    });
}

/// Has the driver's thread call body(Result) when all that was made before it is done; the Result is
/// the error that the context has died of meanwhile.
template <typename Body>
Result defer(Driver& driver, Stream& stream, Body body) {
    const Result entered = enter_stream(driver, stream);
    if (entered != Result::success) {
        return entered;
    }
    const std::lock_guard lock(driver.mutex);
    driver.link.defer(std::move(body), &stream.last_sequence);
    return Result::success;
}

} // namespace gpustasis::emulator
