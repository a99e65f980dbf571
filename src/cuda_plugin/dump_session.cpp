// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/dump_session.hpp"

#include "core/error.hpp"
#include "cuda_plugin/early_images.hpp"
#include "cuda_plugin/host.hpp"
#include "cuda_plugin/other_ways.hpp"
#include "cuda_plugin/proc.hpp"
#include "cuda_plugin/staging.hpp"
#include "cuda_plugin/thawed_thread.hpp"
#include "cuda_plugin/traced_thread.hpp"
#include "cuda_plugin/undo.hpp"
#include "cuda_plugin/worker_process.hpp"
#include "tracee/thread_memory.hpp"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace gpustasis {
DumpSession::DumpSession(const Config& config, PluginOptions options)
    : config_(config), options_(std::move(options)), image_dir_(host::open_image_dir()),
      lineage_(image_dir_.get()), undo_images_(lineage_, image_dir_.get()),
      table_(OnOrphaned::undo), worker_(config_, table_, undo_images_, &images_),
      images_(config_, image_dir_.get(), lineage_, statistics_),
      kept_staging_(config_, statistics_, hidden_pages_),
      cpu_memory_(config_, images_, statistics_, hidden_pages_) {
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

// Nothing was written yet, and the worker, which inherits what the lineage has open, is not there.
void DumpSession::use_arena() {
    if (!config_.arena.is_used || arena_)
        return;
    refuse_with_arena(config_);
    container_.refuse_arena();
    refuse_circle(config_, image_dir_.get());
    arena_.emplace(config_.arena, image_dir_.get());
    image_dir_lock_ = std::exchange(lineage_, Lineage(arena_->directory()));
    images_.use_arena(*arena_);
}

// All of the tree runs, and nothing is locked. What is zero, and what an earlier checkpoint has, is not known yet.
void DumpSession::reserve_arena() {
    if (!arena_)
        return;
    const host::PausedAlarm paused;
    ArenaNeed need{.root = root_};
    for (std::size_t i = 0; i < table_->task_count; ++i) {
        const TaskRecord& record = table_->tasks[i];
        if (record.state_before == ProcessState::checkpointed)
            continue;
        if (record.direct
                .wanted) { // what is not known counts as all that there can be: there is no way back
            need.stored += record.direct.most;
            continue;
        }
        const std::uint64_t bytes = with_margin(statistics_of(record).gpus.memory_size());
        need.stored += bytes;
        const bool at_once = config_.staging != Staging::drop;
        need.staged = at_once ? need.staged + bytes : std::max(need.staged, bytes);
    }
    if (config_.cpu_memory != CpuMemory::criu)
        for (const pid_t pid : proc::tree(root_))
            need.stored += cpu_memory_of(pid);
    statistics_.phases.time("arena_room", [&] { arena_->room().reserve(need, true); });
}

void DumpSession::choose_parent_once() {
    if (parent_chosen_)
        return;
    settle_policy(true);
    images_.require_as_asked();
    container_.open_store(root_, config_);
    use_arena();
    statistics_.config_source = config_.source;
    statistics_.threads = config_.threads;
    host::info("configuration: " + config_.source);
    images_.choose_parent(container_.store());
    built_on_ = read_built_on(lineage_, images_.manifest().chain_length);
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
    try {
        if (first) {
            const host::PausedAlarm paused;
            refuse_missing_memory(pid, true);
            refuse_needed_images(image_dir_.get());
            // Where a drain is at work, or has to be, nothing is touched.
            lock_marker(image_dir_.get());
            settle_policy(false);
            refuse_needed_by_local(config_, image_dir_.get());
            if (config_.arena.is_used)
                refuse_with_arena(config_);
            images_.seal();
            if (!config_.sign.empty())
                signature_.emplace(config_, image_dir_.get());
            if (config_.is_packed())
                begin_pack();
            else if (signature_) {
                remove_unfinished(image_dir_.get());
                watch_images();
            }
            cpu_memory_.prepare();
            // "auto" does so only where there is something to store.
            if (config_.cpu_memory == CpuMemory::ours)
                choose_parent_once();
        }
    } catch (const Error& e) {
        if (!proc::has_exited(pid))
            throw;
        host::info("pid " + std::to_string(pid) + " has ended: " + e.what());
        return false;
    }
    if (first)
        lock_tree();
    if (const TaskRecord* locked = table_.find(pid)) // with the whole tree
        return is_still(*locked);
    TaskRecord* record = look_at(pid);
    if (record != nullptr)
        lock({record}, pid);
    return record != nullptr;
}

// False: the task has ended since it was locked. Throws Error: io if its pid is another program's by now.
bool DumpSession::is_still(const TaskRecord& record) const {
    const host::PausedAlarm paused;
    // One that is about to end has lost that thread before it counts as dead: its GPU files are closed first.
    constexpr int kEndsWithinMs = 2'000;
    const auto is_dead = [&record] {
        return proc::liveness(record.pid, record.start_time) == proc::Liveness::dead;
    };
    const auto is_exiting = [&record, &is_dead] {
        try {
            return proc::is_exiting(record.pid);
        } catch (const Error&) {
            return is_dead(); // just now
        }
    };
    for (int waited = 0;; ++waited) {
        const bool is_late = waited == kEndsWithinMs; // with much memory it takes longer
        if (is_dead() || (is_late && is_exiting())) {
            host::info("pid " + std::to_string(record.pid) + " has ended since it was locked");
            return false;
        }
        if (has_thread(record.pid, record.restore_tid) || proc::has_exited(record.pid))
            return true;
        if (is_late)
            throw Error(Errc::io,
                        "the process has executed another program since it was locked: try again");
        ::poll(nullptr, 0, 1);
    }
}

bool DumpSession::checkpoint(pid_t pid) {
    TaskRecord* record = table_.find(pid);
    if (record != nullptr && !is_still(*record))
        record = nullptr; // and another task has its pid
    if (record == nullptr && proc::may_use_cuda(pid) && worker_.restore_thread(pid))
        throw Error(Errc::io, "the process started to use CUDA while the tree was being frozen; "
                              "try again");
    images_.require_as_asked();
    checkpoint_tree(pid);
    close_left(pid);
    if (record != nullptr && !staging_.contains(pid))
        throw Error(Errc::io, "criu asks about a process that was not frozen before: try again");
    const std::vector<Region>& staging = staging_[pid];
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
    watch_images();
    images_.note(std::move(entries));
}

// What criu has not written to its end has no manifest: criu may be killed when its inventory is there and others of
// its images are not.
void DumpSession::watch_images() {
    if (packed_ || std::exchange(images_watched_, true))
        return;
    try {
        sent_pages_ = sends_pages();
        complete_.emplace(image_dir_.get(), [this] {
            images_.publish();
            sign_images();
            is_whole_ = true;
        });
    } catch (const Error& e) {
        if (signature_)
            throw;
        host::warn(std::string(e.what()) + ": if it is killed while it writes its last images, "
                                           "nothing tells its dump from a checkpoint");
        images_.publish();
    }
}

} // namespace gpustasis
