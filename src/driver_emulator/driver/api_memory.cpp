// Device memory: allocate, free, ask.
#include "driver_emulator/driver/api.hpp"
#include "driver_emulator/driver/driver.hpp"

using namespace cudackpt::emulator;

CUDACKPT_API(cuMemAlloc_v2)(DevicePtr* address, std::size_t size) {
    return call_in_context([=](Driver& state, Context& context) {
        if (address == nullptr) {
            return Result::invalid_value;
        }
        const std::lock_guard lock(state.mutex);
        return context.device->vram.allocate(state.link, size, &context, address);
    });
}

CUDACKPT_API(cuMemFree_v2)(DevicePtr address) {
    return call_in_context([=](Driver& state, Context&) {
        if (address == 0) {
            return Result::success;
        }
        const Result done = synchronise(state); // as the real one: it may still be in use
        if (done != Result::success) {
            return done;
        }
        const std::lock_guard lock(state.mutex);
        Device* device = state.objects.find_device(address);
        return device == nullptr ? Result::invalid_value
                                 : device->vram.free(state.link, address);
    });
}

CUDACKPT_API(cuMemGetInfo_v2)(std::size_t* free, std::size_t* total) {
    return call_in_context([=](Driver& state, Context& context) {
        std::uint64_t free_bytes = 0;
        std::uint64_t total_bytes = 0;
        const Result result =
            state.link.memory_info(context.device->gpu, &free_bytes, &total_bytes);
        if (free != nullptr) {
            *free = free_bytes;
        }
        if (total != nullptr) {
            *total = total_bytes;
        }
        return result;
    });
}
