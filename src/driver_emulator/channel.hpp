// SPDX-License-Identifier: Apache-2.0
/// The way into a target: two pipes of its own, named by its restore thread.
///
/// The thread's name is "cuda" and 11 hexadecimal digits of (a << 22 | b), where a is the write end
/// of the request pipe and b the read end of the reply pipe, both in the target's descriptor table.
/// A caller opens them through /proc/PID/fd. The real driver's name and pipes are the same; its
/// messages are unknown, these are ours.
#pragma once

#include "driver_emulator/wire.hpp"

#include <cstdint>
#include <cstring>

namespace gpustasis::emulator {

inline constexpr std::uint32_t kChannelMagic = 0x65'6d'63'02;

struct ChannelRequest {
    std::uint32_t magic;
    Operation operation;
    std::uint64_t id; ///< repeated in the reply, so that a dead caller's reply is told apart
    std::uint32_t timeout_ms;
    std::uint32_t pair_count;
    GpuPair pairs[kMaxGpus];

    // Custom storage.
    std::uint32_t wants_storage; ///< of Checkpoint and Restore: the caller moves the memory
    std::uint32_t undo;          ///< of complete: the operation is taken back
    std::uint64_t storage;       ///< of complete: the id of the request that began it
    std::uint32_t context_count; ///< GPUs whose primary context the caller has retained
    std::uint32_t reserved;
    Uuid contexts[kMaxGpus];
};

struct ChannelReply {
    std::uint32_t magic;
    Result result;
    std::uint64_t id;
    ProcessState state;
    std::int32_t table; ///< the target's descriptor of a StorageTable, -1 if there is none
};

// Written in one piece: pipes keep writes up to PIPE_BUF (4096) whole.
static_assert(sizeof(ChannelRequest) <= 4096);

struct ChannelEnds {
    int request_write = -1;
    int reply_read = -1;
};

/// Length of a restore thread's name, without its NUL; a thread's name has no room for more.
inline constexpr unsigned kThreadNameLength = 15;

inline void format_thread_name(ChannelEnds ends, char (&name)[kThreadNameLength + 1]) noexcept {
    std::uint64_t value = static_cast<std::uint64_t>(ends.request_write) << 22 |
                          static_cast<std::uint64_t>(ends.reply_read);
    std::memcpy(name, "cuda", 4);
    for (unsigned i = kThreadNameLength; i-- > 4; value >>= 4) {
        name[i] = "0123456789abcdef"[value & 15];
    }
    name[kThreadNameLength] = '\0';
}

/// Parses a thread's name of `length` bytes. Returns false if it is not a restore thread's.
inline bool parse_thread_name(const char* name, std::size_t length, ChannelEnds& ends) noexcept {
    if (length != kThreadNameLength || std::memcmp(name, "cuda", 4) != 0) {
        return false;
    }
    std::uint64_t value = 0;
    for (std::size_t i = 4; i < length; ++i) {
        const char c = name[i];
        const bool digit = c >= '0' && c <= '9';
        if (!digit && !(c >= 'a' && c <= 'f')) {
            return false;
        }
        value = value << 4 | static_cast<std::uint64_t>(digit ? c - '0' : c - 'a' + 10);
    }
    ends.request_write = static_cast<int>(value >> 22);
    ends.reply_read = static_cast<int>(value & ((1U << 22) - 1));
    return true;
}

} // namespace gpustasis::emulator
