// SPDX-License-Identifier: Apache-2.0
/// What a program has made through the API. Handles are addresses of these.
#pragma once

#include "driver_emulator/driver/lane.hpp"
#include "driver_emulator/driver/storage_mapping.hpp"
#include "driver_emulator/driver/vram.hpp"
#include "driver_emulator/wire.hpp"

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

namespace gpustasis::emulator {

struct Context;

struct Device {
    DeviceOrdinal ordinal = 0;
    unsigned gpu = 0; ///< the daemon's number for it; changes when it is restored elsewhere
    Uuid uuid{};
    Vram vram;
    std::unique_ptr<Context> primary;
    unsigned primary_users = 0;
    unsigned primary_flags = 0;
};

struct Stream {
    Stream() = default;
    ~Stream() {
        if (lane != nullptr) {
            lane->close();
        }
    }
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;

    Context* context = nullptr;
    unsigned flags = 0;
    int priority = 0;
    std::uint64_t last_sequence = 0;
    Capture capture = Capture::none;
    std::shared_ptr<Lane> lane; ///< of its copies of custom storage; null if it never had any
};

struct Context {
    Device* device = nullptr;
    unsigned flags = 0;
    bool primary = false;
    Stream null_stream;
};

struct Event {
    Context* context = nullptr;
    unsigned flags = 0;
    bool recorded = false;
    std::uint64_t sequence = 0;    ///< last launch before it
    std::uint64_t recorded_ns = 0; ///< when it was recorded
    std::uint64_t done_ns = 0;     ///< when it was reached; 0 = not known yet
    LanePoint point;               ///< behind copies of custom storage
    std::shared_ptr<std::atomic<std::uint64_t>> point_ns; ///< when those were done; null: none
};

/// What a capture without operations gives.
struct Graph {};

struct Function;

/// A loaded kernel file. The image stays here: after a restore it is sent to the new worker.
struct Module {
    Context* context = nullptr;
    std::uint64_t id = 0;
    void* image = nullptr; ///< private anonymous memory of its own
    std::size_t image_size = 0;
    std::map<std::string, std::unique_ptr<Function>> functions;
};

struct Function {
    Module* module = nullptr;
    char name[256] = {};
    std::uint32_t param_count = 0;
    std::uint32_t param_bytes = 0;
    std::uint16_t sizes[kMaxParams] = {};
    std::uint16_t offsets[kMaxParams] = {};
};

/// Pinned host memory.
struct HostRange {
    std::size_t size = 0;
    std::size_t mapped_size = 0; ///< of our own mapping; 0 = the program's, registered
    unsigned flags = 0;
    Context* context = nullptr;
};

struct StorageOperation;

struct Objects {
    Objects();
    ~Objects();
    Objects(const Objects&) = delete;
    Objects& operator=(const Objects&) = delete;

    Device devices[kMaxGpus];
    unsigned device_count = 0;
    std::map<Context*, std::unique_ptr<Context>> contexts; ///< without the primary ones
    std::map<Stream*, std::unique_ptr<Stream>> streams;
    std::map<Event*, std::unique_ptr<Event>> events;
    std::map<Graph*, std::unique_ptr<Graph>> graphs;
    std::map<Module*, std::unique_ptr<Module>> modules;
    std::map<Function*, Module*> functions;
    std::map<std::uint64_t, HostRange> host_ranges; ///< by address
    std::uint64_t last_module = 0;

    /// Of custom storage operations that this process has begun.
    std::map<const void*, std::unique_ptr<StorageOperation>> operations; ///< by handle
    MappingTable mappings;

    [[nodiscard]] bool has_context(const Context* context) const noexcept;
    [[nodiscard]] Device* find_device(DevicePtr address) noexcept;

    /// The host range that an address lies in, as address and range; second is null if none.
    [[nodiscard]] std::pair<std::uint64_t, const HostRange*> find_host(std::uint64_t address) const;
};

class DaemonLink;

/// Frees all that belongs to a context: device and host memory, modules, streams, events. The
/// context itself stays, for its owner to delete. Nothing that uses it may be pending.
void empty_context(Objects& objects, DaemonLink& link, Context& context);

/// The calling thread's stack of contexts, as cuCtxPushCurrent has it.
[[nodiscard]] Context* current_context() noexcept;
[[nodiscard]] Result push_context(Context* context) noexcept;
[[nodiscard]] Context* pop_context() noexcept;
void set_context(Context* context) noexcept; ///< replaces the top; null pops

} // namespace gpustasis::emulator
