// SPDX-License-Identifier: Apache-2.0
/// Which work an operation in a stream comes after.
///
/// The worker runs launches one after the other, in the order of all streams together, and the
/// driver's thread does copies and host functions in between. So an event
/// of another stream is waited for by itself, and a stream is done when its last launch is.
#pragma once

#include "driver_emulator/driver/driver.hpp"

namespace gpustasis::emulator {

/// The stream of a handle; the default streams' handles give the context's null stream. Null if
/// there is none.
[[nodiscard]] Stream* find_stream(Driver& driver, Context& context, void* handle);

/// The last launch that an operation in this stream has to wait for: for the null stream, any.
[[nodiscard]] inline std::uint64_t last_before(const Driver& driver, const Stream& stream) {
    const bool null_stream = &stream == &stream.context->null_stream;
    return null_stream ? driver.link.submitted() : stream.last_sequence;
}

/// Runs `body` when all that is in the stream is done.
template <typename Body>
int call_in_stream(void* handle, Body body) noexcept {
    return call_in_context([=, &body](Driver& driver, Context& context) {
        Stream* stream = find_stream(driver, context, handle);
        if (stream == nullptr) {
            return Result::invalid_handle;
        }
        const Result done = driver.link.wait(last_before(driver, *stream));
        return done != Result::success ? done : body(driver, *stream);
    });
}

/// Has the driver's thread call body(Result) when all that was made before it is done; the Result is
/// the error that the context has died of meanwhile.
template <typename Body>
Result defer(Driver& driver, Stream& stream, Body body) {
    const std::lock_guard lock(driver.mutex);
    driver.link.defer(std::move(body), &stream.last_sequence);
    return Result::success;
}

} // namespace gpustasis::emulator
