// SPDX-License-Identifier: Apache-2.0
/// What criu and the worker say to each other: one datagram a request, one a reply, in any order. Both
/// ends are the same binary, so the layout is the compiler's.
#pragma once

#include "core/image_info.hpp"
#include "cuda_plugin/driver.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace gpustasis::worker_protocol {

enum class Op : std::uint32_t {
    is_emulator,
    api_version,
    version_text,
    gpus,
    gpus_of,        ///< value: the GpuSource; text: why_not_all; of a GPU uuid and memory_size
    initialize,     ///< and DirectWork::prepare_ahead() for the GPUs move_from, if there are any
    prepare_direct, ///< DirectWork::prepare() for the GPUs move_from of `task`
    restore_thread,
    state,
    lock,
    checkpoint,
    restore,
    unlock,
    checkpoint_direct, ///< of the record `task` of the table: DirectWork::checkpoint()
    restore_direct,    ///< the same: DirectWork::restore()
    undo_restore,      ///< of the record `task` of the table: undo_restore() of undo.hpp
    undo_unlock,       ///< the same: undo_unlock()
    quit,              ///< no reply; the worker ends and undoes nothing
};

/// What the driver may take long for: of several tasks at once, each answered when it is done.
constexpr bool takes_long(Op op) noexcept {
    switch (op) {
    case Op::lock:
    case Op::checkpoint:
    case Op::restore:
    case Op::unlock:
    case Op::checkpoint_direct:
    case Op::restore_direct:
    case Op::undo_restore:
    case Op::undo_unlock: return true;
    default: return false;
    }
}

/// During what memory may move all the time: it takes as long as there is memory.
constexpr bool moves_memory(Op op) noexcept {
    return op == Op::checkpoint_direct || op == Op::restore_direct || op == Op::undo_restore;
}

inline constexpr std::size_t kMaxGpus = 64;
inline constexpr std::size_t kNameSize = 96;

struct Request {
    std::uint64_t id = 0;
    Op op = Op::quit;
    std::int32_t pid = 0;
    std::uint32_t task = 0;
    std::uint32_t timeout_ms = 0;
    std::uint32_t gpus_used = 0;
    std::uint32_t move_count = 0;
    Id move_from[kMaxGpus];
    Id move_to[kMaxGpus];
};

/// `used`: of `gpus` the first, that hold memory. Throws Error: unsupported.
inline void add_gpus(Request& request, const std::vector<Id>& gpus, std::size_t used) {
    if (gpus.size() > kMaxGpus)
        throw Error(Errc::unsupported, "more than " + std::to_string(kMaxGpus) + " GPUs");
    for (const Id& gpu : gpus)
        request.move_from[request.move_count++] = gpu;
    request.gpus_used = static_cast<std::uint32_t>(used);
}

enum class Status : std::uint32_t {
    done,
    nothing,        ///< an answer: no such thing (no CUDA state, no NVML)
    driver_refused, ///< `result` is the CUresult
    failed,         ///< it never came to the driver
};

struct Gpu {
    Id uuid;
    char name[kNameSize];
    std::uint64_t memory_size;
    std::uint64_t free_size; ///< all ones: not known
};

struct Reply {
    std::uint64_t id = 0;
    Status status = Status::failed;
    std::int32_t result = 0;
    std::int64_t value = 0;
    char text[1024] = {}; ///< the error, or the answer where it is text; NUL-terminated
    std::uint32_t gpu_count = 0;
    Gpu gpus[kMaxGpus];
};

/// Answers that need no GPU work: they come at once or not at all.
inline constexpr std::uint32_t kQuickTimeoutMs = 20'000;
/// How long an unlock or a lock's own timeout may be late before the call counts as hung.
inline constexpr std::uint32_t kGraceMs = 10'000;

/// Throws what a reply says that is no answer: DriverError, or Error: unsupported.
[[noreturn]] inline void throw_refused(const Reply& reply) {
    if (reply.status == Status::driver_refused)
        throw DriverError(reply.result, reply.text);
    throw Error(Errc::unsupported, reply.text);
}

} // namespace gpustasis::worker_protocol
