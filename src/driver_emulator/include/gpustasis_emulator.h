// SPDX-License-Identifier: Apache-2.0
/* Kernels that run on a real GPU and on gpustasis's emulated GPUs, from one source file.
 *
 *     #include "gpustasis_emulator.h"
 *
 *     GPUSTASIS_KERNEL(axpy, float a, const float* x, float* y, unsigned n) {
 *         const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
 *         if (i < n) { y[i] += a * x[i]; }
 *     }
 *
 * For a GPU:        nvcc -ptx -o kernels.ptx kernels.cu
 * For the emulator: g++ -x c++ -std=c++17 -O2 -ffp-contract=off -fPIC -shared -o kernels.so
 * kernels.cu
 *                   (-I the folder of this header; `gpustasis emulator env` prints it)
 *
 * The program gives the result of either to cuModuleLoad or cuModuleLoadData and finds the kernel
 * by its name ("axpy"). Under the emulator a launch calls the kernel's body once for every thread
 * of the grid, one after the other, in the emulator's own process: device pointers are valid there,
 * host pointers are not. There are no shared memory, no __syncthreads, no warp functions and no
 * device variables (a static variable of a kernel file is lost by a checkpoint). Up to 128
 * parameters of 4096 bytes in all, trivially copyable.
 */
#ifndef GPUSTASIS_EMULATOR_H
#define GPUSTASIS_EMULATOR_H

#if defined(__CUDACC__)

#define GPUSTASIS_KERNEL(name, ...) extern "C" __global__ void name(__VA_ARGS__)

#else

#if !defined(__cplusplus) || __cplusplus < 201703L
#error "kernels for the emulator are C++17"
#endif

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

// NOLINTBEGIN(bugprone-reserved-identifier): these are CUDA's names
#define __host__
#define __device__
#define __forceinline__ inline
#define __shared__ static_assert(false, "the emulator has no shared memory");
#define __constant__ static_assert(false, "the emulator has no constant memory");
// NOLINTEND(bugprone-reserved-identifier)

struct uint3 {
    unsigned int x, y, z;
};

struct dim3 {
    unsigned int x, y, z;
};

namespace gpustasis_emulator {

inline constexpr std::uint32_t kKernelMagic = 0x6b'65'72'01;

/* What the emulator reads of a kernel: the symbol gpustasis_kernel_<name> of the shared object. */
struct Kernel {
    std::uint32_t magic;
    std::uint32_t param_count;
    std::uint32_t param_bytes;        /* of a parameter buffer laid out as CUDA's */
    const std::uint16_t* param_sizes; /* param_count of them */
    const std::uint16_t* param_offsets;
    void (*run)(const unsigned char* params, const unsigned int* grid, const unsigned int* block);
};

/* One thread of the worker runs all kernels, so these need not be thread-local. */
namespace {
uint3 current_block;
uint3 current_thread;
dim3 grid_size;
dim3 block_size;
} // namespace

template <typename... Params>
struct Layout {
    static constexpr std::size_t kCount = sizeof...(Params);
    std::uint16_t sizes[kCount + 1] = {};
    std::uint16_t offsets[kCount + 1] = {};
    std::uint32_t bytes = 0;

    constexpr Layout() {
        constexpr std::size_t size[] = {sizeof(Params)..., 0};
        constexpr std::size_t alignment[] = {alignof(Params)..., 1};
        std::size_t end = 0;
        for (std::size_t i = 0; i < kCount; ++i) {
            end = (end + alignment[i] - 1) / alignment[i] * alignment[i];
            offsets[i] = static_cast<std::uint16_t>(end);
            sizes[i] = static_cast<std::uint16_t>(size[i]);
            end += size[i];
        }
        bytes = static_cast<std::uint32_t>(end);
    }
};

template <auto Function>
struct Runner;

template <typename... Params, void (*Function)(Params...)>
struct Runner<Function> {
    static_assert((std::is_trivially_copyable_v<Params> && ...), "parameters are copied as bytes");
    static_assert(sizeof...(Params) <= 128 && (sizeof(Params) + ... + 0) <= 4096,
                  "too many parameters");
    static constexpr Layout<Params...> kLayout{};

    template <std::size_t... I>
    static void call(const unsigned char* params, std::index_sequence<I...>) {
        Function(
            *reinterpret_cast<const std::remove_const_t<Params>*>(params + kLayout.offsets[I])...);
    }

    static void run(const unsigned char* params, const unsigned int* grid,
                    const unsigned int* block) {
        grid_size = {grid[0], grid[1], grid[2]};
        block_size = {block[0], block[1], block[2]};
        for (current_block.z = 0; current_block.z < grid[2]; ++current_block.z) {
            for (current_block.y = 0; current_block.y < grid[1]; ++current_block.y) {
                for (current_block.x = 0; current_block.x < grid[0]; ++current_block.x) {
                    run_block(params, block);
                }
            }
        }
    }

    static void run_block(const unsigned char* params, const unsigned int* block) {
        for (current_thread.z = 0; current_thread.z < block[2]; ++current_thread.z) {
            for (current_thread.y = 0; current_thread.y < block[1]; ++current_thread.y) {
                for (current_thread.x = 0; current_thread.x < block[0]; ++current_thread.x) {
                    call(params, std::index_sequence_for<Params...>{});
                }
            }
        }
    }

    static constexpr Kernel kKernel{kKernelMagic,  sizeof...(Params), kLayout.bytes,
                                    kLayout.sizes, kLayout.offsets,   &run};
};

} // namespace gpustasis_emulator

static inline const uint3& blockIdx = gpustasis_emulator::current_block;
static inline const uint3& threadIdx = gpustasis_emulator::current_thread;
static inline const dim3& gridDim = gpustasis_emulator::grid_size;
static inline const dim3& blockDim = gpustasis_emulator::block_size;

/* Threads run one after the other: a plain addition is atomic. */
template <typename T>
static inline T atomicAdd(T* address, T value) {
    const T old = *address;
    *address = static_cast<T>(old + value);
    return old;
}

static inline float rsqrtf(float x) {
    return 1.0F / std::sqrt(x);
}

#define GPUSTASIS_KERNEL(name, ...)                                                                \
    static void name(__VA_ARGS__);                                                                 \
    extern "C" __attribute__((visibility("default"), used))                                        \
    const gpustasis_emulator::Kernel gpustasis_kernel_##name =                                     \
        gpustasis_emulator::Runner<&name>::kKernel;                                                \
    static inline void name(__VA_ARGS__)

#endif /* !__CUDACC__ */

#endif /* GPUSTASIS_EMULATOR_H */
