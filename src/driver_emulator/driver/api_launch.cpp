// SPDX-License-Identifier: Apache-2.0
// Kernel launches.
#include "driver_emulator/driver/api.hpp"
#include "driver_emulator/driver/stream_order.hpp"

#include <cstring>

using namespace gpustasis::emulator;

namespace {

constexpr std::uint64_t kMaxBlockThreads = 1024;
constexpr std::uint64_t kMaxPending = 1024; // launches; further ones wait for a place

struct Shape {
    unsigned grid[3];
    unsigned block[3];
};

bool is_valid(const Shape& shape) {
    const std::uint64_t threads = std::uint64_t{shape.block[0]} * shape.block[1] * shape.block[2];
    return threads != 0 && shape.block[0] <= kMaxBlockThreads &&
           shape.block[1] <= kMaxBlockThreads && shape.block[2] <= 64 &&
           threads <= kMaxBlockThreads && shape.grid[0] != 0 && shape.grid[0] <= 2147483647 &&
           shape.grid[1] != 0 && shape.grid[1] <= 65535 && shape.grid[2] != 0 &&
           shape.grid[2] <= 65535;
}

/// Collects the parameters, given one by one or as a buffer, into the layout of a buffer.
Result collect(const Function& function, void** params, void** extra,
               unsigned char (&buffer)[kMaxParamBytes]) {
    if (params != nullptr) {
        for (unsigned i = 0; i < function.param_count; ++i) {
            std::memcpy(buffer + function.offsets[i], params[i], function.sizes[i]);
        }
        return Result::success;
    }
    if (extra == nullptr) {
        return function.param_count == 0 ? Result::success : Result::invalid_value;
    }
    const void* from = nullptr;
    std::size_t size = 0;
    for (; reinterpret_cast<std::uintptr_t>(*extra) != kLaunchParamEnd; extra += 2) {
        if (reinterpret_cast<std::uintptr_t>(*extra) == kLaunchParamBufferPointer) {
            from = extra[1];
        } else if (reinterpret_cast<std::uintptr_t>(*extra) == kLaunchParamBufferSize) {
            size = *static_cast<const std::size_t*>(extra[1]);
        } else {
            return Result::invalid_value;
        }
    }
    if (from == nullptr || size < function.param_bytes || size > sizeof buffer) {
        return Result::invalid_value;
    }
    std::memcpy(buffer, from, function.param_bytes);
    return Result::success;
}

int launch(Function* function, const Shape& shape, unsigned shared_bytes, void* stream_handle,
           void** params, void** extra) {
    return call_in_context([=](Driver& driver, Context& context) {
        const std::uint64_t submitted = driver.link.submitted();
        if (submitted > kMaxPending) {
            const Result room = driver.link.wait(submitted - kMaxPending);
            if (room != Result::success) {
                return room;
            }
        }
        Stream* stream = find_stream(driver, context, stream_handle);
        const Result entered =
            stream == nullptr ? Result::invalid_handle : enter_stream(driver, *stream);
        if (entered != Result::success) {
            return entered;
        }
        const std::lock_guard lock(driver.mutex);
        if (!driver.objects.functions.contains(function)) {
            return Result::invalid_handle;
        }
        if (!is_valid(shape) || (params != nullptr && extra != nullptr)) {
            return Result::invalid_value;
        }
        if (shared_bytes != 0) {
            return Result::launch_out_of_resources; // there is no shared memory
        }
        unsigned char buffer[kMaxParamBytes];
        Result result = collect(*function, params, extra, buffer);
        if (result != Result::success) {
            return result;
        }
        LaunchRequest request{};
        request.header = {kWireMagic, WireOp::launch};
        request.module = function->module->id;
        std::strcpy(request.name, function->name);
        std::memcpy(request.grid, shape.grid, sizeof request.grid);
        std::memcpy(request.block, shape.block, sizeof request.block);
        request.param_bytes = function->param_bytes;
        return driver.link.launch(request, buffer, &stream->last_sequence);
    });
}

} // namespace

GPUSTASIS_API(cuLaunchKernel)
(Function* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
 unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream, void** params,
 void** extra) {
    return launch(function, {{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}}, shared_bytes,
                  stream, params, extra);
}

GPUSTASIS_API(cuLaunchKernelEx)
(const LaunchConfig* config, Function* function, void** params, void** extra) {
    if (config == nullptr) {
        return code(Result::invalid_value);
    }
    if (config->attribute_count != 0) {
        return code(Result::not_supported);
    }
    return launch(function,
                  {{config->grid_x, config->grid_y, config->grid_z},
                   {config->block_x, config->block_y, config->block_z}},
                  config->shared_memory_size, config->stream, params, extra);
}
