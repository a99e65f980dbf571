// SPDX-License-Identifier: Apache-2.0
/// What of RestoreSession gives CUDA tasks their memory, and has the driver restore them: all, side by side.
#include "core/error.hpp"
#include "cuda_plugin/device_files.hpp"
#include "cuda_plugin/direct_work.hpp"
#include "cuda_plugin/findings.hpp"
#include "cuda_plugin/host.hpp"
#include "cuda_plugin/huge_pages.hpp"
#include "cuda_plugin/proc.hpp"
#include "cuda_plugin/restore_session.hpp"
#include "cuda_plugin/side_by_side.hpp"
#include "cuda_plugin/thawed_thread.hpp"
#include "cuda_plugin/traced_thread.hpp"
#include "dropped_memory/refill.hpp"

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <deque>
#include <exception>
#include <optional>
#include <string>
#include <utility>

namespace gpustasis {

/// A task that is restored.
struct RestoreSession::AtWork {
    TaskRecord* record = nullptr;
    std::size_t statistics = 0; ///< its place among those of all tasks
    std::vector<GpuMove> moves;
    std::optional<ThawedThread> thawed;
    std::optional<std::vector<int>>
        devices_before; ///< descriptors of the driver's that criu has restored
};

void RestoreSession::resume_tree(pid_t asked) {
    std::deque<AtWork> tasks; // in their places until the last is frozen again
    for (const pid_t pid : waiting_)
        of_task(pid, asked, [&] {
            look_at(pid, tasks);
            if (statistics_.in_turn_because.empty() && is_of_ipc_job(pid))
                statistics_.in_turn_because = "pid " + std::to_string(pid) +
                                              " is of a job of CUDA IPC (CUDA_CHECKPOINT_JOB_FILE)";
        });
    const std::size_t at_once = tasks_at_once(config_.parallel_gpus, statistics_);
    if (!tasks.empty())
        statistics_.parallel_gpus = at_once;
    const auto step = [&](const char* phase, const char* done, auto&& begin) {
        side_by_side(
            worker_, tasks.size(),
            {.limit = at_once,
             // None, once it is filled: it is taken by then, and the driver gives it back.
             .memory =
                 [&](std::size_t i) {
                     return tasks[i].thawed ? std::uint64_t{0} : staged_of(*tasks[i].record);
                 },
             .room = [&](std::size_t i) { return room_of(tasks[i].record->pid); }},
            [&](std::size_t i) {
                return of_task(tasks[i].record->pid, asked, [&] { return begin(tasks[i]); });
            },
            [&](const CallsUnderWay::Answer& answer) {
                AtWork& task = tasks[answer.number];
                statistics_.tasks[task.statistics].phases.add(phase, answer.waited);
                if (answer.error)
                    of_task(task.record->pid, asked, [&] { std::rethrow_exception(answer.error); });
                host::info(done + (" pid " + std::to_string(task.record->pid)));
            },
            // Nothing of them is to be kept, so nobody waits for what the driver still does in the others.
            [&] {
                for (const pid_t pid : tree_)
                    ::kill(pid, SIGKILL);
            });
    };
    step("driver_restore", "restored", [&](AtWork& task) { return begin_restore(task); });
    step("unlock", "unlocked", [&](AtWork& task) { return begin_unlock(task); });
    for (AtWork& task : tasks)
        of_task(task.record->pid, asked, [&] {
            const WatchedThread watched(worker_, task.record->restore_tid);
            if (worker_.state(task.record->pid) != ProcessState::running)
                throw Error(Errc::io,
                            "the driver says it restored the process, and that it is not running");
            task.thawed->refreeze();
            close_on_exec(*task.record, task.devices_before);
            resumed_.insert(task.record->pid);
        });
    waiting_.clear();
}

// Bytes that its memory takes until the driver has restored it.
std::uint64_t RestoreSession::staged_of(const TaskRecord& record) const {
    const auto image = images_.of_gpu().find(record.image_pid);
    if (image == images_.of_gpu().end() || image->second.info().of_devices)
        return 0;
    std::uint64_t bytes = 0;
    for (const Region& region : image->second.info().regions)
        bytes += region.length;
    return bytes;
}

// One without CUDA state, and without an image that needs one, is none of `tasks`.
void RestoreSession::look_at(pid_t pid, std::deque<AtWork>& tasks) {
    const std::uint32_t image_pid = proc::innermost_pid(pid);
    const auto tid = worker_.restore_thread(pid);
    if (!tid) {
        if (images_.externalized())
            throw Error(Errc::corrupt_data, "the restored process has no CUDA restore thread");
        return;
    }
    TaskRecord& record = table_.add(pid);
    record.image_pid = image_pid;
    record.start_time = proc::start_time(pid);
    record.restore_tid = *tid;
    TaskStatistics& statistics = statistics_.tasks.emplace_back();
    statistics.pid = pid;
    statistics.image_pid = image_pid;
    AtWork& task = tasks.emplace_back();
    task.record = &record;
    task.statistics = statistics_.tasks.size() - 1;
    if (const ManifestTask* saved = images_.manifest().find(image_pid, MemoryKind::gpu))
        task.moves = placement_.moves_of(images_.manifest(), *saved);
}

// All that the task could see, also those where it had no memory: the driver wants a context on each.
std::vector<Id> RestoreSession::gpus_for(const ImageInfo& info,
                                         const std::vector<GpuMove>& moves) const {
    std::vector<Id> gpus = gpus_of(info, moves);
    const Manifest& manifest = images_.manifest();
    const ManifestTask* saved = manifest.find(info.pid, MemoryKind::gpu);
    for (const TaskGpu& seen : saved == nullptr ? std::vector<TaskGpu>{} : saved->gpus) {
        const Id& from = manifest.gpus[seen.gpu].uuid;
        const auto move = std::ranges::find(moves, from, &GpuMove::from);
        const Id& now = move == moves.end() ? from : move->to;
        if (std::ranges::find(gpus, now) == gpus.end())
            gpus.push_back(now);
    }
    return gpus;
}

// Of all tasks that the worker gives their memory, as gpus_for(); and how many of them, the first, have memory.
std::pair<std::vector<Id>, std::size_t> RestoreSession::gpus_ahead() const {
    std::vector<Id> gpus;
    const auto add = [&gpus](const std::vector<Id>& more) {
        for (const Id& gpu : more)
            if (std::ranges::find(gpus, gpu) == gpus.end())
                gpus.push_back(gpu);
    };
    const auto add_of_all = [&](auto&& find) {
        for (const auto& [pid, image] : images_.of_gpu()) {
            if (!image.info().of_devices)
                continue;
            const ManifestTask* saved = images_.manifest().find(pid, MemoryKind::gpu);
            add(find(image.info(), saved == nullptr
                                       ? std::vector<GpuMove>{}
                                       : placement_.moves_of(images_.manifest(), *saved)));
        }
    };
    add_of_all([](const auto& info, const auto& moves) { return gpus_of(info, moves); });
    const std::size_t used = gpus.size();
    add_of_all([this](const auto& info, const auto& moves) { return gpus_for(info, moves); });
    return {std::move(gpus), used};
}

// The worker puts the memory back while the driver waits.
void RestoreSession::expect_direct(TaskRecord& record, const ImageReader& image) {
    record.checkpoint_id = image.info().checkpoint_id;
    record.digest = image.digest();
    record.direct.stored = true;
    record.direct.begun = true;
}

void RestoreSession::refill_staging(TaskRecord& record, const ImageReader& image,
                                    TaskStatistics& statistics) {
    statistics.phases.time("ask_huge_pages", [&] {
        statistics.huge_pages = ask_for_huge_pages(config_.huge_pages, record, image.info());
    });
    statistics.phases.time("refill", [&] { refill(record.pid, image, config_.threads); });
}

// While the driver restores others: memory first, then the GPU.
std::optional<Worker::Call> RestoreSession::begin_restore(AtWork& task) {
    TaskRecord& record = *task.record;
    TaskStatistics& statistics = statistics_.tasks[task.statistics];
    const auto image = images_.of_gpu().find(record.image_pid);
    if (image != images_.of_gpu().end()) {
        statistics.externalized = true;
        statistics.gpu_memory = image->second.info().of_devices ? "direct" : "staged";
        statistics.totals = image->second.totals();
        statistics.file_bytes = image->second.file_size();
        statistics.regions = image->second.info().regions.size();
        for (const Region& region : image->second.info().regions)
            statistics.staged_bytes += region.length;
        if (image->second.info().of_devices)
            expect_direct(record, image->second);
        else
            refill_staging(record, image->second, statistics);
    }
    statistics.phases.time("driver_init", [&] {
        if (record.direct.begun)
            worker_.prepare_direct(record, gpus_for(image->second.info(), task.moves),
                                   gpus_of(image->second.info(), task.moves).size());
        else
            worker_.initialize();
    });
    task.devices_before = driver_descriptors(record.pid);
    task.thawed.emplace(record);
    const WatchedThread watched(worker_, record.restore_tid);
    statistics.state_before = worker_.state(record.pid);
    if (statistics.state_before == ProcessState::checkpointed && record.direct.begun)
        return worker_.begin_restore_direct(record, task.moves, record.restore_tid);
    if (statistics.state_before == ProcessState::checkpointed)
        return worker_.begin_restore(record.pid, task.moves, record.restore_tid);
    if (statistics.externalized)
        throw Error(Errc::corrupt_data, "the restored process has a GPU image, and the driver "
                                        "says that it is not checkpointed");
    return std::nullopt;
}

// As the stock plugin: a restored process runs, whatever it was found in.
std::optional<Worker::Call> RestoreSession::begin_unlock(AtWork& task) {
    const TaskRecord& record = *task.record;
    const WatchedThread watched(worker_, record.restore_tid);
    if (worker_.state(record.pid) != ProcessState::locked)
        return std::nullopt;
    return worker_.begin_unlock(record.pid, record.restore_tid);
}

} // namespace gpustasis
