// Copies and fills. Asynchronous ones wait for their stream and are then done at once, which the
// API allows.
#include "driver_emulator/driver/api.hpp"
#include "driver_emulator/driver/driver.hpp"
#include "driver_emulator/driver/transfer.hpp"

using namespace cudackpt::emulator;

namespace {

template <typename Address> std::uint64_t number(Address address) {
    if constexpr (std::is_pointer_v<Address>) {
        return reinterpret_cast<std::uint64_t>(address);
    } else {
        return address;
    }
}

template <typename To, typename From> int copy(To to, From from, std::size_t size) {
    return call_in_context([=](Driver& state, Context&) {
        const Result done = synchronise(state);
        return done != Result::success ? done : copy_bytes(state, number(to), number(from), size);
    });
}

template <typename Pattern> int fill(DevicePtr to, Pattern pattern, std::size_t count) {
    return call_in_context([=](Driver& state, Context&) {
        const Result done = synchronise(state);
        return done != Result::success
                   ? done
                   : fill_bytes(state, to, &pattern, sizeof pattern, count * sizeof pattern);
    });
}

} // namespace

CUDACKPT_API(cuMemcpyHtoD_v2)(DevicePtr to, const void* from, std::size_t size) {
    return copy(to, from, size);
}

CUDACKPT_API(cuMemcpyDtoH_v2)(void* to, DevicePtr from, std::size_t size) {
    return copy(to, from, size);
}

CUDACKPT_API(cuMemcpyDtoD_v2)(DevicePtr to, DevicePtr from, std::size_t size) {
    return copy(to, from, size);
}

CUDACKPT_API(cuMemcpy)(DevicePtr to, DevicePtr from, std::size_t size) {
    return copy(to, from, size);
}

CUDACKPT_API(cuMemsetD8_v2)(DevicePtr to, unsigned char value, std::size_t count) {
    return fill(to, value, count);
}

CUDACKPT_API(cuMemsetD16_v2)(DevicePtr to, unsigned short value, std::size_t count) {
    return fill(to, value, count);
}

CUDACKPT_API(cuMemsetD32_v2)(DevicePtr to, unsigned int value, std::size_t count) {
    return fill(to, value, count);
}
