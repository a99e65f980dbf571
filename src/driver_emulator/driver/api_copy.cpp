// SPDX-License-Identifier: Apache-2.0
// Copies and fills. Asynchronous ones are done by the driver's thread when their turn comes; those
// of pageable host memory, and of rows, wait for their stream and are then done at once, which the API
// allows.
#include "driver_emulator/driver/api.hpp"
#include "driver_emulator/driver/stream_order.hpp"
#include "driver_emulator/driver/transfer.hpp"

#include <type_traits>

using namespace gpustasis::emulator;

namespace {

template <typename Address>
std::uint64_t number(Address address) {
    if constexpr (std::is_pointer_v<Address>) {
        return reinterpret_cast<std::uint64_t>(address);
    } else {
        return address;
    }
}

/// In the null stream: after everything, and done when it returns.
template <typename To, typename From>
int copy(To to, From from, std::size_t size) {
    return call_in_stream(nullptr, [=](Driver& driver, Stream&) {
        return copy_bytes(driver, number(to), number(from), size);
    });
}

template <typename To, typename From>
int copy_later(To to, From from, std::size_t size, void* handle) {
    return call_in_context([=](Driver& driver, Context& context) {
        Stream* stream = find_stream(driver, context, handle);
        if (stream == nullptr) {
            return Result::invalid_handle;
        }
        CopyTurn turn{};
        const Result refused = find_turn(driver, number(to), number(from), size, turn);
        if (refused != Result::success) {
            return refused;
        }
        const auto body = [=, &driver](Result before) {
            return before != Result::success ? before
                                             : copy_bytes(driver, number(to), number(from), size);
        };
        if (turn != CopyTurn::at_once) {
            return turn == CopyTurn::direct ? submit_direct(driver, *stream, body)
                                            : defer(driver, *stream, body);
        }
        const Result entered = enter_stream(driver, *stream);
        return entered != Result::success ? entered
                                          : body(driver.link.wait(last_before(driver, *stream)));
    });
}

template <typename Pattern>
int fill_later(DevicePtr to, Pattern pattern, std::size_t count, void* handle) {
    return call_in_context([=](Driver& driver, Context& context) {
        Stream* stream = find_stream(driver, context, handle);
        if (stream == nullptr) {
            return Result::invalid_handle;
        }
        const std::uint64_t size = count * sizeof pattern;
        if (!is_fillable(driver, to, sizeof pattern, size)) {
            return Result::invalid_value;
        }
        const auto body = [=, &driver](Result before) {
            return before != Result::success
                       ? before
                       : fill_bytes(driver, to, &pattern, sizeof pattern, size);
        };
        return find_fill_turn(driver, to) == CopyTurn::direct ? submit_direct(driver, *stream, body)
                                                              : defer(driver, *stream, body);
    });
}

template <typename Pattern>
int fill(DevicePtr to, Pattern pattern, std::size_t count) {
    return call_in_stream(nullptr, [=](Driver& driver, Stream&) {
        return fill_bytes(driver, to, &pattern, sizeof pattern, count * sizeof pattern);
    });
}

template <typename Pattern>
int fill_rows(DevicePtr to, std::size_t pitch, Pattern pattern, std::size_t width,
              std::size_t height, void* stream = nullptr) {
    return call_in_stream(stream, [=](Driver& driver, Stream&) {
        for (std::size_t row = 0; row < height; ++row) {
            const Result result = fill_bytes(driver, to + row * pitch, &pattern, sizeof pattern,
                                             width * sizeof pattern);
            if (result != Result::success) {
                return result;
            }
        }
        return Result::success;
    });
}

/// The address of one side's first byte; false for arrays, of which there are none.
bool start_of(MemoryType type, const void* host, DevicePtr device, std::size_t x, std::size_t y,
              std::size_t pitch, std::uint64_t& start) {
    if (type == MemoryType::array) {
        return false;
    }
    start =
        (type == MemoryType::host ? reinterpret_cast<std::uint64_t>(host) : device) + y * pitch + x;
    return true;
}

int copy_rows(const Memcpy2d* copy, void* stream) {
    if (copy == nullptr) {
        return code(Result::invalid_value);
    }
    return call_in_stream(stream, [=](Driver& driver, Stream&) {
        std::uint64_t from = 0;
        std::uint64_t to = 0;
        if (!start_of(copy->src_memory_type, copy->src_host, copy->src_device, copy->src_x_in_bytes,
                      copy->src_y, copy->src_pitch, from) ||
            !start_of(copy->dst_memory_type, copy->dst_host, copy->dst_device, copy->dst_x_in_bytes,
                      copy->dst_y, copy->dst_pitch, to)) {
            return Result::not_supported;
        }
        for (std::size_t row = 0; row < copy->height; ++row) {
            const Result result = copy_bytes(driver, to + row * copy->dst_pitch,
                                             from + row * copy->src_pitch, copy->width_in_bytes);
            if (result != Result::success) {
                return result;
            }
        }
        return Result::success;
    });
}

} // namespace

GPUSTASIS_API(cuMemcpy)(DevicePtr to, DevicePtr from, std::size_t size) {
    return copy(to, from, size);
}

GPUSTASIS_API(cuMemcpyAsync)(DevicePtr to, DevicePtr from, std::size_t size, void* stream) {
    return copy_later(to, from, size, stream);
}

GPUSTASIS_API(cuMemcpyHtoD_v2)(DevicePtr to, const void* from, std::size_t size) {
    return copy(to, from, size);
}

GPUSTASIS_API(cuMemcpyHtoDAsync_v2)
(DevicePtr to, const void* from, std::size_t size, void* stream) {
    return copy_later(to, from, size, stream);
}

GPUSTASIS_API(cuMemcpyDtoH_v2)(void* to, DevicePtr from, std::size_t size) {
    return copy(to, from, size);
}

GPUSTASIS_API(cuMemcpyDtoHAsync_v2)(void* to, DevicePtr from, std::size_t size, void* stream) {
    return copy_later(to, from, size, stream);
}

GPUSTASIS_API(cuMemcpyDtoD_v2)(DevicePtr to, DevicePtr from, std::size_t size) {
    return copy(to, from, size);
}

GPUSTASIS_API(cuMemcpyDtoDAsync_v2)(DevicePtr to, DevicePtr from, std::size_t size, void* stream) {
    return copy_later(to, from, size, stream);
}

GPUSTASIS_API(cuMemcpyPeer)(DevicePtr to, Context*, DevicePtr from, Context*, std::size_t size) {
    return copy(to, from, size);
}

GPUSTASIS_API(cuMemcpyPeerAsync)
(DevicePtr to, Context*, DevicePtr from, Context*, std::size_t size, void* stream) {
    return copy_later(to, from, size, stream);
}

GPUSTASIS_API(cuMemcpy2D_v2)(const Memcpy2d* copy) {
    return copy_rows(copy, nullptr);
}

GPUSTASIS_API(cuMemcpy2DUnaligned_v2)(const Memcpy2d* copy) {
    return copy_rows(copy, nullptr);
}

GPUSTASIS_API(cuMemcpy2DAsync_v2)(const Memcpy2d* copy, void* stream) {
    return copy_rows(copy, stream);
}

GPUSTASIS_API(cuMemsetD8_v2)(DevicePtr to, unsigned char value, std::size_t count) {
    return fill(to, value, count);
}

GPUSTASIS_API(cuMemsetD16_v2)(DevicePtr to, unsigned short value, std::size_t count) {
    return fill(to, value, count);
}

GPUSTASIS_API(cuMemsetD32_v2)(DevicePtr to, unsigned int value, std::size_t count) {
    return fill(to, value, count);
}

GPUSTASIS_API(cuMemsetD8Async)(DevicePtr to, unsigned char value, std::size_t count, void* stream) {
    return fill_later(to, value, count, stream);
}

GPUSTASIS_API(cuMemsetD16Async)
(DevicePtr to, unsigned short value, std::size_t count, void* stream) {
    return fill_later(to, value, count, stream);
}

GPUSTASIS_API(cuMemsetD32Async)(DevicePtr to, unsigned int value, std::size_t count, void* stream) {
    return fill_later(to, value, count, stream);
}

GPUSTASIS_API(cuMemsetD2D8_v2)
(DevicePtr to, std::size_t pitch, unsigned char value, std::size_t width, std::size_t height) {
    return fill_rows(to, pitch, value, width, height);
}

GPUSTASIS_API(cuMemsetD2D16_v2)
(DevicePtr to, std::size_t pitch, unsigned short value, std::size_t width, std::size_t height) {
    return fill_rows(to, pitch, value, width, height);
}

GPUSTASIS_API(cuMemsetD2D32_v2)
(DevicePtr to, std::size_t pitch, unsigned int value, std::size_t width, std::size_t height) {
    return fill_rows(to, pitch, value, width, height);
}
