// SPDX-License-Identifier: Apache-2.0
// Once the driver has handed GPU memory over, no page-locked memory is asked for; what fails all the same loses nothing.
#include "check.hpp"
#include "child.hpp"
#include "direct_rig.hpp"
#include "sample.hpp"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

using namespace direct_rig;

namespace {

constexpr int kNoGpu = storage_driver::kGpus;

void a_gpu_of_which_nothing_is_known_is_ready_before_memory_is_handed_over() {
    for (const bool answers : {false, true}) { // and lists no process
        Rig rig;
        state.nvml_answers = answers;
        TaskRecord record;
        fresh(record, ::getpid());
        const auto memory = some_memory(true);
        storage_driver::have(record.pid, memory);
        rig.work.prepare(rig.driver, record.pid, {uuid(0), uuid(1)}, 1);
        rig.work.checkpoint(rig.driver, record);
        CHECK(record.direct.stored && !record.direct.held);
        CHECK(state.asked != 0);
        CHECK(state.late == 0);
        CHECK(rig.store.read[0] == memory[0] && rig.store.read[1] == memory[1]);
    }
}

void where_no_page_can_be_locked_the_driver_is_not_asked() {
    Rig rig;
    TaskRecord record;
    fresh(record, ::getpid());
    const auto memory = some_memory(true);
    storage_driver::have(record.pid, memory);
    rig.work.prepare(rig.driver, record.pid, {uuid(0), uuid(1)}, 1);
    state.host_allocs_left = 0;
    CHECK_THROWS(Errc::io, rig.work.checkpoint(rig.driver, record));
    CHECK(state.checkpoints == 0 && !record.direct.held && is_locked(record.pid));
    rig.work.restore(rig.driver, record, {}); // as an undo does
    CHECK(is_locked(record.pid) && state.memory[record.pid] == memory);
    state.host_allocs_left = 1000;
}

void who_was_not_prepared_here_is_not_begun() {
    Rig rig;
    TaskRecord record;
    fresh(record, ::getpid());
    storage_driver::have(record.pid, some_memory(false));
    CHECK_THROWS(Errc::io, rig.work.checkpoint(rig.driver, record));
    CHECK(state.checkpoints == 0 && is_locked(record.pid));
}

void nvml_is_not_asked_because_of_the_gpus_of_other_tasks() {
    Rig rig;
    const Child other;
    TaskRecord record;
    fresh(record, ::getpid());
    storage_driver::have(record.pid, some_memory(false));
    rig.work.prepare(rig.driver, record.pid, {uuid(0)}, 1);
    rig.work.prepare(rig.driver, other.pid(), {uuid(0), uuid(1)}, 1);
    rig.work.checkpoint(rig.driver, record);
    CHECK(record.direct.stored && state.asked == 0 && state.late == 0);
}

void tasks_that_are_at_work_on_one_gpu_at_once_are_ready_before_each() {
    Rig rig;
    const Child other;
    TaskRecord one, two;
    const auto memory = some_memory(false);
    for (TaskRecord* record : {&fresh(one, ::getpid()), &fresh(two, other.pid())}) {
        storage_driver::have(record->pid, memory);
        rig.work.prepare(rig.driver, record->pid, {uuid(0)}, 1);
    }
    int late_of_first = 0;
    rig.store.meanwhile = [&] {
        state.in_flight = 0; // the first one's is no concern of the second
        rig.work.checkpoint(rig.driver, two);
        late_of_first = state.late;
        state.in_flight = 1;
    };
    rig.work.checkpoint(rig.driver, one);
    CHECK(one.direct.stored && two.direct.stored);
    CHECK(late_of_first == 0 && state.late == 0);
    CHECK(rig.store.read[0] == memory[0]);
}

// Of a GPU that NVML has said nothing of, and that another task has had prepared.
void what_cannot_be_copied_stays_on_the_gpus_until_it_can() {
    Rig rig;
    const Child other;
    TaskRecord record;
    fresh(record, ::getpid());
    const auto memory = some_memory(true);
    storage_driver::have(record.pid, memory);
    rig.work.prepare(rig.driver, record.pid, {uuid(0)}, 1);
    rig.work.prepare(rig.driver, other.pid(), {uuid(1)}, 0);
    state.host_allocs_left = 0;
    try {
        rig.work.checkpoint(rig.driver, record);
        CHECK(false && "nothing was thrown");
    } catch (const Error& e) {
        CHECK(std::string(e.what()).find("it stays on the GPU") != std::string::npos);
    }
    CHECK(record.direct.held && !record.direct.stored);
    CHECK_THROWS(Errc::io, rig.work.restore(rig.driver, record, {}));
    CHECK(record.direct.held && state.memory[record.pid] == memory);
    state.host_allocs_left = 1000;
    rig.work.restore(rig.driver, record, {});
    CHECK(!record.direct.held && is_locked(record.pid));
    CHECK(state.memory[record.pid] == memory);
}

// Since it was prepared: which place in the image is the GPU's cannot be told.
void memory_of_a_gpu_that_nvml_lists_no_more_is_kept_and_comes_back() {
    Rig rig;
    TaskRecord record;
    fresh(record, ::getpid());
    const auto memory = some_memory(true);
    storage_driver::have(record.pid, memory);
    rig.work.prepare(rig.driver, record.pid, {uuid(0), uuid(1)}, 2);
    state.nvml_lists = 1;
    try {
        rig.work.checkpoint(rig.driver, record);
        CHECK(false && "nothing was thrown");
    } catch (const Error& e) {
        CHECK(std::string(e.what()).find("not listed in this checkpoint") != std::string::npos);
        CHECK(std::string(e.what()).find("it stays on the GPU") == std::string::npos);
    }
    CHECK(state.checkpoints == 1 && !record.direct.stored && record.direct.held);
    CHECK(state.memory[record.pid] != memory); // it is here alone
    rig.work.restore(rig.driver, record, {});
    CHECK(!record.direct.held && is_locked(record.pid) && state.memory[record.pid] == memory);
    state.nvml_lists = storage_driver::kGpus;
}

// As of whoever clears the image directory when criu has died, before the worker has come to this task.
void what_was_stored_comes_back_though_its_name_is_gone() {
    Rig rig;
    TaskRecord record;
    fresh(record, ::getpid());
    const auto memory = some_memory(true);
    storage_driver::have(record.pid, memory);
    rig.work.prepare(rig.driver, record.pid, {uuid(0), uuid(1)}, 2);
    rig.work.checkpoint(rig.driver, record);
    CHECK(record.direct.stored && state.memory[record.pid] != memory);
    CHECK(::unlinkat(rig.dir.fd(), image_name(record.image_pid).c_str(), 0) == 0);
    rig.work.restore(rig.driver, record, {});
    CHECK(is_locked(record.pid) && state.memory[record.pid] == memory);
}

void no_memory_is_asked_for_while_criu_decides_whether_to_kill_this_process() {
    Rig rig;
    TaskRecord record;
    fresh(record, ::getpid());
    const auto memory = some_memory(true);
    storage_driver::have(record.pid, memory);
    rig.work.prepare(rig.driver, record.pid, {uuid(0), uuid(1)}, 2);
    const auto waits_for_the_decision = [&record](const std::atomic<bool>& flag,
                                                  const std::function<void()>& call) {
        const auto memory_before = state.memory[record.pid];
        state.announced = &flag;
        record.direct.ending = true;
        std::thread thread(call);
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
        bool waits = false;
        {
            const std::lock_guard lock(state.mutex);
            waits = state.in_flight == 0 && state.memory[record.pid] == memory_before;
        }
        record.direct.ending = false;
        thread.join();
        state.announced = nullptr;
        return waits && !flag && state.unannounced == 0;
    };
    CHECK(waits_for_the_decision(record.direct.asking,
                                 [&] { rig.work.checkpoint(rig.driver, record); }));
    CHECK(record.direct.stored && state.memory[record.pid] != memory);
    CHECK(waits_for_the_decision(record.direct.restoring,
                                 [&] { rig.work.restore(rig.driver, record, {}); }));
    CHECK(state.memory[record.pid] == memory);
}

void what_is_prepared_ahead_is_there_for_the_tasks() {
    Rig rig;
    const int hosts = state.hosts, contexts = state.contexts;
    rig.work.prepare_ahead(rig.driver, {uuid(1), uuid(0)}, 1);
    CHECK(state.hosts == hosts + 1 && state.contexts == contexts + 2);
    rig.work.prepare(rig.driver, ::getpid(), {uuid(1), uuid(0)}, 1);
    CHECK(state.hosts == hosts + 1 && state.contexts == contexts + 2);
}

void what_cannot_be_prepared_ahead_is_told_when_it_is_needed() {
    Rig rig;
    state.host_allocs_left = 0;
    rig.work.prepare_ahead(rig.driver, {uuid(0), uuid(1)}, 2);
    rig.work.prepare_ahead(rig.driver, {uuid(kNoGpu)}, 1);
    CHECK_THROWS(Errc::io, rig.work.prepare(rig.driver, ::getpid(), {uuid(0)}, 1));
    CHECK_THROWS(Errc::unsupported, rig.work.prepare(rig.driver, ::getpid(), {uuid(kNoGpu)}, 1));
    state.host_allocs_left = 1000;
    rig.work.prepare(rig.driver, ::getpid(), {uuid(0)}, 1);
}

} // namespace

int main() {
    const sample::TempDir dir;
    open_gpus(dir);
    a_gpu_of_which_nothing_is_known_is_ready_before_memory_is_handed_over();
    where_no_page_can_be_locked_the_driver_is_not_asked();
    who_was_not_prepared_here_is_not_begun();
    nvml_is_not_asked_because_of_the_gpus_of_other_tasks();
    tasks_that_are_at_work_on_one_gpu_at_once_are_ready_before_each();
    what_cannot_be_copied_stays_on_the_gpus_until_it_can();
    memory_of_a_gpu_that_nvml_lists_no_more_is_kept_and_comes_back();
    what_was_stored_comes_back_though_its_name_is_gone();
    no_memory_is_asked_for_while_criu_decides_whether_to_kill_this_process();
    what_is_prepared_ahead_is_there_for_the_tasks();
    what_cannot_be_prepared_ahead_is_told_when_it_is_needed();
    CHECK(state.races == 0);
}
