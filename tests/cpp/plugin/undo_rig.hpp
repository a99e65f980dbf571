// SPDX-License-Identifier: Apache-2.0
/// An orphaned worker that is to undo a dump, with a driver that notes what it was asked to do.
#pragma once

#include "worker_rig.hpp"

#include "tracee/proc.hpp"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

namespace sample {

inline std::string read_lines(const std::string& path) {
    std::ifstream file(path);
    std::string text;
    for (std::string line; std::getline(file, line);)
        text += line + " ";
    return text;
}

inline void add_record(Rig& rig, pid_t pid) {
    TaskRecord& record = rig.table.add(pid);
    record.start_time = proc::start_time(pid);
    record.restore_tid = pid;
    record.lock_begun = record.checkpoint_begun = true;
}

/// Three tasks that an orphan is to restore and to unlock, with what it noted of that.
struct Orphaned {
    explicit Orphaned(const Bystander* tasks, std::uint32_t driver_timeout_ms = 60'000,
                      const char* restore_ms = "1", bool hangs = false,
                      const std::function<void(Rig&)>& prepare = {})
        : slow("SLOW_DRIVER_RESTORE_MS", restore_ms, "2") {
        rig.config.driver_timeout_ms = driver_timeout_ms;
        CHECK(rig.worker->state(tasks[0].pid()) == ProcessState::checkpointed);
        for (int i = 0; i < 3; ++i)
            add_record(rig, tasks[i].pid());
        if (prepare)
            prepare(rig);
        worker = find_worker();
        if (hangs) {
            rig.worker->begin_checkpoint(tasks[1].pid(), 0);
            CHECK(comes_true([&] { return slow.is_in_it(); }));
        }
        rig.worker.reset();
    }
    std::string log() const { return read_lines(rig.images.path("gpustasis-undo.log")); }
    std::string noted() const { return read_lines(place.path("notes")); }

    sample::TempDir place;
    const Variable moves{"SLOW_DRIVER_MOVES", "1"};
    const Variable notes{"SLOW_DRIVER_NOTES", place.path("notes")};
    const Slow slow;
    Rig rig{OnOrphaned::undo};
    pid_t worker = 0;
};

template <class Condition>
void await(Condition&& condition) {
    const auto begin = std::chrono::steady_clock::now();
    while (!condition()) {
        CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(120));
        ::usleep(10'000);
    }
}

inline void await_settled(const std::vector<const TaskRecord*>& records) {
    await([&] {
        return std::ranges::all_of(records,
                                   [](const TaskRecord* one) { return one->settled.load(); });
    });
}

inline void open_gate(const std::string& path) {
    CHECK(std::ofstream(path) << "open" << std::flush);
}

} // namespace sample
