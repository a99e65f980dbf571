// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/dump_session.hpp"

#include "core/error.hpp"
#include "cuda_plugin/host.hpp"
#include "cuda_plugin/proc.hpp"
#include "cuda_plugin/staging.hpp"
#include "cuda_plugin/thawed_thread.hpp"
#include "cuda_plugin/traced_thread.hpp"
#include "cuda_plugin/undo.hpp"
#include "cuda_plugin/worker_process.hpp"
#include "tracee/thread_memory.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace gpustasis {
namespace {

std::string name(const TaskRecord& record) {
    return "pid " + std::to_string(record.pid);
}

} // namespace

DumpSession::DumpSession(const Config& config, PluginOptions options)
    : config_(config), options_(std::move(options)), image_dir_(host::open_image_dir()),
      lineage_(image_dir_.get()), undo_images_(lineage_), table_(OnOrphaned::undo),
      worker_(config_, table_, undo_images_),
      images_(config_, image_dir_.get(), lineage_, statistics_),
      cpu_memory_(config_, images_, statistics_) {
    statistics_.stage = "dump";
}

TaskStatistics& DumpSession::statistics_of(const TaskRecord& record) {
    const auto found = std::ranges::find(statistics_.tasks, record.pid, &TaskStatistics::pid);
    if (found != statistics_.tasks.end())
        return *found;
    TaskStatistics& added = statistics_.tasks.emplace_back();
    added.pid = record.pid;
    added.image_pid = record.image_pid;
    added.state_before = record.state_before;
    return added;
}

// A tree without CUDA, all of whose memory is CRIU's, needs no policy, and none of it can fail its dump.
void DumpSession::settle_policy(bool cuda) {
    if (policy_settled_)
        return;
    try {
        container_.settle(root_, config_, options_); // the worker reads config_ as well
        policy_settled_ = true;
    } catch (const Error& e) {
        const bool ours = config_.cpu_memory == CpuMemory::ours || config_.is_packed();
        if (cuda || ours || !config_.recipients.empty() || !config_.sign.empty())
            throw;
        host::warn("CRIU stores this tree alone, as without a policy: " + std::string(e.what()));
    }
}

void DumpSession::begin_pack() {
    images_.refuse_clear_images();
    if (!config_.incremental)
        refuse_circle(config_, image_dir_.get());
    packed_.emplace(image_dir_.get(), [this](int directory, const std::vector<std::string>& names) {
        statistics_.phases.time("pack", [&] { images_.pack(directory, names); });
        sign_images();
    });
    images_.begin();
    images_.begin_pack();
    statistics_.config_source = config_.source;
    statistics_.threads = config_.threads;
}

void DumpSession::choose_parent_once() {
    if (parent_chosen_)
        return;
    settle_policy(true);
    images_.require_as_asked();
    container_.open_store(root_, config_);
    statistics_.config_source = config_.source;
    statistics_.threads = config_.threads;
    host::info("configuration: " + config_.source);
    images_.choose_parent(container_.store());
    if (const seal::DataKey* key = images_.seal())
        undo_images_.use_key(*key);
    if (signature_ && images_.manifest().chain_length != 0)
        signature_->build_on(lineage_.directory(1));
    parent_chosen_ = true; // what has failed, and was let pass, is tried anew
}

void DumpSession::begin() {
    if (begun_)
        return;
    images_.begin();
    statistics_.phases.time("driver_facts", [&] {
        const DriverFacts facts = read_driver_facts(worker_);
        Manifest& manifest = images_.manifest();
        manifest.driver_api_version = facts.api_version;
        manifest.driver_version = facts.version;
        manifest.gpus = facts.gpu_infos();
        statistics_.backend = facts.backend();
        statistics_.driver_api_version = facts.api_version;
        statistics_.driver_version = facts.version;
        statistics_.gpus = manifest.gpus;
    });
    host::info(
        "backend: " + statistics_.backend + ", driver " +
        (statistics_.driver_version.empty() ? "of unknown version" : statistics_.driver_version));
    begun_ = true;
}

bool DumpSession::pause(pid_t pid) {
    const bool first = std::exchange(root_, root_ == 0 ? pid : root_) == 0;
    files_.add_task(pid);
    bool asked = false;
    try {
        if (first) {
            const host::PausedAlarm paused;
            refuse_missing_memory(pid, true);
            refuse_needed_images(image_dir_.get());
            settle_policy(false);
            images_.seal();
            if (!config_.sign.empty())
                signature_.emplace(config_, image_dir_.get());
            if (config_.is_packed())
                begin_pack();
            else if (signature_)
                complete_.emplace(image_dir_.get(), [this] { sign_images(); });
            cpu_memory_.prepare();
            // "auto" does so only where there is something to store.
            if (config_.cpu_memory == CpuMemory::ours)
                choose_parent_once();
        }
        return pause_task(pid, asked);
    } catch (const Error& e) {
        // The tree still runs: a child may end while it is looked at, and CRIU goes on without it. Of
        // one that ends while the driver works in it, the driver may be the cause: that is told.
        if (asked || !proc::has_exited(pid))
            throw;
        host::info("pid " + std::to_string(pid) + " has ended: " + e.what());
        return false;
    }
}

bool DumpSession::pause_task(pid_t pid, bool& asked) {
    if (!proc::may_use_cuda(pid)) // only what uses CUDA can lack memory
        return false;
    DumpLock lock_of_dump(identify_task(pid), "criu " + std::to_string(::getpid()) +
                                                  " dumps it into " +
                                                  directory_path(image_dir_.get()));
    refuse_missing_memory(pid, false);
    const host::PausedAlarm paused;
    choose_parent_once();
    require_lock(lock_of_dump, config_.externalize); // as settled by then
    const auto tid = worker_.restore_thread(pid);
    if (!tid)
        return false;
    begin();
    require_answering(pid, *tid);
    asked = true;
    const ProcessState before = worker_.state(pid);
    if (before == ProcessState::failed)
        throw Error(Errc::io, "the driver has given the process up (state FAILED)");
    if (before != ProcessState::running && !config_.dump_locked)
        throw Error(Errc::unsupported,
                    std::string("the driver says that the process is ") +
                        (before == ProcessState::locked ? "locked" : "checkpointed") +
                        ": another program is at work on it, or has left it so; unlock it, or "
                        "set found_locked = \"dump\" to have it dumped as it is");
    const TaskIdentity identity = identify_task(pid);
    table_.refuse_same_image(pid, identity.inner_pid);
    locks_.push_back(std::move(lock_of_dump));
    TaskRecord& record = table_.add(pid);
    record.image_pid = identity.inner_pid;
    record.start_time = identity.start_time;
    record.pid_namespace = identity.pid_namespace;
    record.checkpoint_id = images_.manifest().checkpoint_id;
    record.restore_tid = *tid;
    record.state_before = before;
    TaskStatistics& statistics = statistics_of(record);
    if (before != ProcessState::checkpointed) {
        statistics.gpus = worker_.gpus_of(pid);
        for (std::string& risk :
             take_risks(pid, images_.manifest().driver_api_version, table_->task_count,
                        statistics.gpus, staging_room_, config_))
            statistics_.risks.push_back(std::move(risk));
    }
    if (before == ProcessState::running)
        lock(record, statistics);
    else
        host::info(name(record) + " was found locked or checkpointed and will be left so");
    return true;
}

void DumpSession::lock(TaskRecord& record, TaskStatistics& statistics) {
    record.lock_begun = true;
    statistics.phases.time("lock", [&] { worker_.lock(record.pid, config_.lock_timeout_ms); });
    if (worker_.state(record.pid) != ProcessState::locked)
        throw Error(Errc::io, "the driver says it locked the process, and that it is not locked");
    host::info("locked " + name(record));
}

bool DumpSession::checkpoint(pid_t pid) {
    TaskRecord* record = table_.find(pid);
    if (record == nullptr && proc::may_use_cuda(pid) && worker_.restore_thread(pid))
        throw Error(Errc::io, "the process started to use CUDA while the tree was being frozen; "
                              "try again");
    images_.require_as_asked();
    close_left_userfaultfd(pid, record, closed_);
    std::vector<Region> staging;
    if (record != nullptr)
        staging = checkpoint_device(*record);
    if (packed_ && record != nullptr) // from now on as much is missing, or has been staged
        packed_->leave_room(pid, record->drop_begun ? statistics_of(*record).staged_bytes : 0);
    cpu_memory_.add(pid, staging);
    const bool taken =
        cpu_memory_.is_complete() &&
        cpu_memory_.take([this] { choose_parent_once(); },
                         [this](CpuMemoryDump::Noted noted) { note(std::move(noted)); });
    images_.asked_about(pid);
    return taken || record != nullptr;
}

// On return nothing of the task runs any more. Gives the memory that the driver staged.
std::vector<Region> DumpSession::checkpoint_device(TaskRecord& record) {
    TaskStatistics& statistics = statistics_of(record);
    if (record.state_before == ProcessState::checkpointed) {
        refuse_missing_memory(record.pid, false); // another dump may have dropped it meanwhile
        require_checkpointed(record);
        note({{entry_of(record), record.pid}});
        return {};
    }

    const std::vector<Mapping> before = read_maps(record.pid);
    run_driver_checkpoint(record, statistics);
    std::vector<Region> regions;
    if (config_.externalize || cpu_memory_.is_on())
        regions = statistics.phases.time("find_staging", [&] {
            return find_staging(before, read_maps(record.pid), addresses_in_use(record.pid));
        });
    if (regions.empty() || !config_.externalize)
        note({{entry_of(record), record.pid}});
    else
        externalize(record, regions, statistics);
    host::info("checkpointed " + name(record) + ": " +
               std::to_string(statistics.staged_bytes >> 20) + " MiB of GPU memory, " +
               std::to_string(statistics.file_bytes >> 20) + " MiB stored");
    return regions;
}

// Whoever has left it so may have come back for it before it was frozen.
void DumpSession::require_checkpointed(TaskRecord& record) {
    ThawedThread thawed(record);
    const WatchedThread watched(worker_, record.restore_tid);
    const ProcessState state = worker_.state(record.pid);
    thawed.refreeze();
    if (state != ProcessState::checkpointed)
        throw Error(Errc::io, "another program has restored the process meanwhile; try again");
}

void DumpSession::run_driver_checkpoint(TaskRecord& record, TaskStatistics& statistics) {
    const std::vector<pid_t> threads = proc::threads(record.pid);
    record.checkpoint_begun = true;
    record_checkpoint(record, image_dir_.get(), config_.externalize);
    ThawedThread thawed(record);
    const WatchedThread watched(worker_, record.restore_tid);
    statistics.phases.time("driver_checkpoint", [&] { worker_.checkpoint(record.pid); });
    if (worker_.state(record.pid) != ProcessState::checkpointed)
        throw Error(Errc::io, "the driver says it checkpointed the process, and that it is not "
                              "checkpointed");
    proc::wait_for_helper_threads(record.pid, threads);
    thawed.refreeze();
}

void DumpSession::externalize(TaskRecord& record, const std::vector<Region>& regions,
                              TaskStatistics& statistics) {
    ManifestTask task = entry_of(record);
    const WriteResult written =
        statistics.phases.time("write", [&] { return images_.write(record.pid, task, regions); });
    statistics.externalized = true;
    statistics.regions = regions.size();
    statistics.totals = written.totals;
    statistics.file_bytes = written.file_size;
    statistics.damaged_in_parent = written.damaged_in_parent;
    for (const Region& region : regions)
        statistics.staged_bytes += region.length;
    note({{std::move(task), record.pid}});
    record.digest = written.digest;
    Guard& guard = guards_[record.pid];
    statistics.phases.time("drop", [&] {
        drop_staging(guard, record, regions, *table_, undo_images_, config_.threads,
                     config_.require_guard);
    });
    statistics.not_guarded_because = guard.why_not;
}

ManifestTask DumpSession::entry_of(const TaskRecord& record) {
    const ProcessGpus& seen = statistics_of(record).gpus;
    ManifestTask task;
    task.pid = record.image_pid;
    task.state_before = record.state_before;
    task.gpus = places_of(seen, images_.manifest().gpus);
    task.gpu_source = task.gpus.empty() ? GpuSource::unknown : seen.source;
    return task;
}

void DumpSession::note(CpuMemoryDump::Noted noted) {
    std::vector<ManifestTask> entries;
    std::vector<pid_t> tasks;
    for (auto& [entry, pid] : noted) {
        entries.push_back(std::move(entry));
        tasks.push_back(pid);
    }
    images_.manifest().requirements = statistics_.phases.time("mapped_files", [&] {
        files_.look_at_others(table_);
        return files_.with(tasks);
    });
    images_.note(std::move(entries));
}

} // namespace gpustasis
