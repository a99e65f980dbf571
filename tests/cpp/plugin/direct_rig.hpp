// SPDX-License-Identifier: Apache-2.0
/// DirectWork on the driver of storage_driver.hpp, without a worker.
#pragma once

#include "check.hpp"
#include "sample.hpp"
#include "storage_driver.hpp"

#include "cuda_plugin/direct_work.hpp"
#include "cuda_plugin/driver_library.hpp"

#include <fcntl.h>

#include <array>
#include <functional>
#include <map>
#include <utility>

namespace direct_rig {

using namespace gpustasis;
using sample::Buffer;
using storage_driver::state;
using storage_driver::uuid;

/// Reads all, and then stores it.
class Reading final : public DirectStore {
public:
    explicit Reading(int dir_fd) : dir_fd_(dir_fd) {}

    WriteResult write(TaskRecord& record, const DriverFacts& facts, const UndoImages&,
                      const std::function<Memory()>& open) override {
        const Memory memory = open();
        if (const auto first = std::exchange(meanwhile, nullptr))
            first();
        read.clear();
        sample::Memory copy;
        for (const Region& region : memory.regions) {
            Buffer bytes(region.length);
            memory.source->read(region.address, bytes);
            copy.map(region.address, bytes);
            read[device_number(region.address)] = std::move(bytes);
        }
        ImageInfo info;
        info.checkpoint_id = record.checkpoint_id;
        info.pid = record.image_pid;
        info.chunk_size = kDefaultChunkSize;
        info.gpus = facts.gpu_infos();
        info.of_devices = true;
        info.regions = memory.regions;
        return write_image(dir_fd_, image_name(record.image_pid), info, copy, {.threads = 1});
    }
    std::vector<int> descriptors() const override { return {}; }

    std::function<void()> meanwhile; ///< once, when memory was handed over
    std::map<std::size_t, Buffer> read;

private:
    int dir_fd_;
};

struct Rig {
    Rig() {
        state.checkpoints = state.late = state.asked = 0;
        state.nvml_answers = true;
    }
    sample::TempDir dir;
    Lineage lineage{dir.fd()};
    UndoImages images{lineage};
    Config config = [] {
        Config ours;
        ours.driver = ours.nvml = "";
        return ours;
    }();
    Reading store{dir.fd()};
    DriverLibrary driver{config.driver, config.nvml};
    DirectWork work{config, images, &store};
};

/// This process has both GPUs open, and its children inherit that.
inline void open_gpus(const sample::TempDir& dir) {
    for (const char* name : {"nvidia0", "nvidia1"})
        CHECK(::open(dir.path(name).c_str(), O_RDWR | O_CREAT, 0600) >= 0);
}

inline std::array<Buffer, 2> some_memory(bool on_both) {
    return {sample::random_bytes(12 << 20, 1),
            on_both ? sample::random_bytes(8 << 20, 2) : Buffer{}};
}

inline TaskRecord& fresh(TaskRecord& record, pid_t pid) {
    record.pid = pid;
    record.image_pid = static_cast<std::uint32_t>(pid);
    record.checkpoint_id = sample::id_of(1);
    return record;
}

inline bool is_locked(pid_t pid) {
    return state.states.at(pid) == static_cast<int>(ProcessState::locked);
}

} // namespace direct_rig
