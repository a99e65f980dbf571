// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/restore_session.hpp"

#include "core/error.hpp"
#include "cuda_plugin/cpu_memory_restore.hpp"
#include "cuda_plugin/host.hpp"
#include "cuda_plugin/nvml.hpp"
#include "cuda_plugin/other_ways.hpp"
#include "cuda_plugin/proc.hpp"
#include "cuda_plugin/requirement_check.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <iterator>
#include <thread>

namespace gpustasis {
namespace {

// A task that the driver holds in the kernel, or that has much memory, may take long to die.
constexpr std::chrono::seconds kTellDeaths{10};

// The first process of a pid namespace among `tasks`, if it is the tree's root: criu waits for its
// end, without limit, when a restore has failed. 0: there is none.
pid_t root_of_own_namespace(const std::vector<pid_t>& tasks) {
    for (const pid_t task : tasks) {
        try {
            if (proc::innermost_pid(task) == 1 &&
                std::ranges::find(tasks, proc::parent(task)) == tasks.end())
                return task;
        } catch (const Error&) {
            continue; // it has ended
        }
    }
    return 0;
}

// The task that none of the others has made.
pid_t root_of(const std::vector<pid_t>& tasks) {
    for (const pid_t task : tasks)
        if (std::ranges::find(tasks, proc::parent(task)) == tasks.end())
            return task;
    throw Error(Errc::io, "criu has made no task whose parent is none of its own");
}

// Tids other than of `root` that its end waits for. A task without threads here has ended.
std::vector<pid_t> before_the_end_of(pid_t root, const std::vector<pid_t>& tasks) {
    std::vector<pid_t> found;
    for (const pid_t task : tasks) {
        try {
            std::ranges::copy_if(proc::threads(task), std::back_inserter(found),
                                 [&](pid_t tid) { return tid != root; });
        } catch (const Error&) {
            continue;
        }
    }
    return found;
}

// All of `tasks` were killed, and this process traces them. What it traces and has not waited for stays
// a zombie, and no process ends while one of its threads, or for the first of a pid namespace one of its
// other processes, is. criu waits for that one's end without limit, and for nothing else: so wait for
// the others, as long as it takes. Outside of a pid namespace criu waits for nobody, and signals the
// processes by their pids, which must stay taken.
void await_deaths(const std::vector<pid_t>& tasks) {
    const pid_t root = root_of_own_namespace(tasks);
    if (root == 0)
        return;
    std::vector<pid_t> left = before_the_end_of(root, tasks);
    auto told = std::chrono::steady_clock::now();
    while (!left.empty()) {
        std::erase_if(left, [](pid_t tid) {
            int status = 0;
            const pid_t got = ::waitpid(tid, &status, __WALL | WNOHANG);
            return got < 0 || (got == tid && !WIFSTOPPED(status));
        });
        if (std::chrono::steady_clock::now() - told > kTellDeaths) {
            told = std::chrono::steady_clock::now();
            host::warn("waiting for " + std::to_string(left.size()) +
                       " killed threads to end, pid " + std::to_string(left.front()) + " first");
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

// The same. criu asks its script next, and whoever looks at them then must not take them for restored.
void await_zombies(const std::vector<pid_t>& tasks) noexcept {
    const auto until = std::chrono::steady_clock::now() + kTellDeaths;
    for (const pid_t task : tasks) {
        try {
            const std::uint64_t start = proc::start_time(task);
            while (proc::liveness(task, start) != proc::Liveness::dead &&
                   std::chrono::steady_clock::now() < until)
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
        } catch (const std::exception&) { // NOLINT(bugprone-empty-catch): it has ended
        }
    }
}

} // namespace

RestoreSession::RestoreSession(const Config& config)
    : config_(config), image_dir_(host::open_image_dir()), lineage_(image_dir_.get()),
      undo_images_(lineage_), table_(OnOrphaned::kill), worker_(config_, table_, undo_images_),
      images_(config_, image_dir_.get(), undo_images_) {
    statistics_.stage = "restore";
    statistics_.config_source = config_.source;
    statistics_.threads = config_.threads;
}

bool RestoreSession::prepare() {
    try {
        if (!statistics_.phases.time("read_images", [&] { return images_.read(); }))
            return false;
        unpack();
        if (!images_.of_gpu().empty() || !images_.of_cpu().empty())
            exit_kill_.emplace([this](pid_t tid) { refuse_detach(tid); });
        if (images_.manifest().requirements)
            statistics_.phases.time("check_files", [&] {
                require_unchanged(
                    [&] { return find_changed_files(*images_.manifest().requirements); },
                    config_.ignore_requirements);
            });
        if (uses_driver()) {
            statistics_.phases.time("check_machine", [&] { check_machine(); });
            // Slow on real machines, and only needed when the tasks stand: criu works meanwhile.
            auto [gpus, used] = gpus_ahead();
            if (gpus.size() > worker_protocol::kMaxGpus) // of all tasks; each may have less
                gpus.clear();
            worker_.begin_initialize(gpus, used);
        }
        prepared_ = true;
        return true;
    } catch (const std::exception& e) {
        write_failure(e.what());
        worker_.stop();
        throw;
    }
}

void RestoreSession::unpack() {
    const auto begin = std::chrono::steady_clock::now();
    UniqueFd memory = images_.unpack();
    if (!memory)
        return;
    refuse_pages_from_elsewhere(image_dir_.get(), "layout = \"packed\"");
    unpacked_.emplace(image_dir_.get(), std::move(memory));
    statistics_.phases.add("unpack", std::chrono::steady_clock::now() - begin);
}

// A tree that has nothing but CPU memory in our images is restored where there is no driver, too.
bool RestoreSession::uses_driver() const noexcept {
    return !images_.has_manifest() || images_.manifest().has(MemoryKind::gpu);
}

void RestoreSession::check_machine() {
    const DriverFacts facts = read_driver_facts(worker_);
    statistics_.backend = facts.backend();
    statistics_.driver_api_version = facts.api_version;
    statistics_.driver_version = facts.version;
    statistics_.gpus = facts.gpu_infos();
    host::info("backend: " + statistics_.backend + ", CUDA " +
               std::to_string(facts.api_version / 1000) + "." +
               std::to_string(facts.api_version % 1000 / 10));
    if (!images_.has_manifest() && !config_.gpu_map.empty())
        throw Error(Errc::unsupported, "gpu_map: the checkpoint does not say which GPUs it needs");
    if (!images_.has_manifest())
        return;
    for (const auto& [pid, image] : images_.of_gpu())
        if (image.info().of_devices && facts.api_version < driver::kCustomStorageApiVersion)
            throw Error(Errc::unsupported,
                        "the GPU memory of process " + std::to_string(pid) +
                            " was handed over by a driver of CUDA 13.4 or later (gpu_memory = "
                            "\"direct\"), and the driver here is of CUDA " +
                            std::to_string(facts.api_version / 1000) + "." +
                            std::to_string(facts.api_version % 1000 / 10) +
                            ", which cannot take it back");
    std::map<std::uint32_t, std::uint64_t> staged;
    for (const auto& [pid, image] : images_.of_gpu())
        for (const Region& region : image.info().regions)
            staged[pid] += region.length;
    placement_ =
        place_gpus(images_.manifest(), staged, config_.gpu_map, facts, config_.ignore_requirements);
    for (const std::string& lack : placement_.ignored)
        host::warn("ignored, as requirements = \"ignore\" says: " + lack);
    for (const GpuMove& move : placement_.moves) {
        if (move.from == move.to)
            continue;
        statistics_.gpu_moves.push_back(move);
        host::info("what was on " + gpu_uuid_text(move.from) +
                   " moves to another GPU of the same "
                   "model, " +
                   gpu_uuid_text(move.to));
    }
}

bool RestoreSession::resume(pid_t pid) {
    if (ended_) {
        if (failed_)
            ::kill(pid, SIGKILL); // if it was not in the tree that was killed
        return resumed_.contains(pid);
    }
    try {
        begin_resuming();
        resume_tree(pid);
        complete();
        return resumed_.contains(pid);
    } catch (const std::exception& e) {
        ::kill(pid, SIGKILL);
        kill_all("pid " + std::to_string(pid) + ": " + e.what());
        throw;
    }
}

void RestoreSession::kill_all(const std::string& error) noexcept {
    // First of all, and by what is known already: nothing here may fail.
    ended_ = failed_ = true;
    for (const pid_t task : tree_)
        ::kill(task, SIGKILL);
    host::error("the restore failed and every restored task was killed: " + error);
    write_failure(error);
    worker_.stop();
    await_deaths(
        tree_); // first: the first process of a pid namespace ends when those are waited for
    await_zombies(tree_);
}

// criu asks no plugin behind one that has answered, so this one may not have been asked at all.
void RestoreSession::refuse_detach(pid_t tid) {
    if (ended_) // all are killed
        return;
    ::kill(tid, SIGKILL);
    if (tree_.empty())
        tree_ = proc::traced_by_us();
    kill_all("criu lets the tasks go before their memory is there: it has not asked this plugin "
             "about all of them; does another plugin answer RESUME_DEVICES_LATE?");
}

// CRIU calls for one task after the other once all of them stand, stopped and traced by it.
void RestoreSession::begin_resuming() {
    if (resuming_)
        return;
    resuming_ = true;
    tree_ = proc::traced_by_us();
    const Manifest& manifest = images_.manifest();
    // Before anything is asked of the worker: criu may die while that is under way.
    expect_death_of(tree_);
    if (manifest.requirements)
        statistics_.phases.time("check_mapped_files", [&] {
            require_unchanged(
                [&] {
                    return find_changed_mappings(*manifest.requirements, root_of(tree_), tree_);
                },
                config_.ignore_requirements);
        });
    for (const pid_t pid : tree_)
        if (proc::may_use_cuda(pid) &&
            (!images_.externalized() ||
             manifest.find(proc::innermost_pid(pid), MemoryKind::gpu) != nullptr))
            waiting_.insert(pid);
    const auto cuda_tasks = static_cast<std::size_t>(
        std::ranges::count(manifest.tasks, MemoryKind::gpu, &ManifestTask::kind));
    if (images_.has_manifest() && waiting_.size() < cuda_tasks)
        throw Error(Errc::corrupt_data, std::string(kManifestName) + " lists " +
                                            std::to_string(cuda_tasks) +
                                            " CUDA processes, and criu made " +
                                            std::to_string(waiting_.size()) + " of them");
    statistics_.phases.time("cpu_memory", [&] {
        fill_cpu_memory(images_.of_cpu(), tree_, config_.threads, statistics_);
    });
}

void RestoreSession::expect_death_of(const std::vector<pid_t>& tree) {
    if (tree.size() > TaskTable::kMaxKills)
        throw Error(Errc::unsupported, std::to_string(tree.size()) + " tasks in a tree; at most " +
                                           std::to_string(TaskTable::kMaxKills) + " are supported");
    for (std::size_t i = 0; i < tree.size(); ++i)
        table_->kills[i] = {tree[i], proc::start_time(tree[i])};
    table_->kill_count = tree.size();
}

void RestoreSession::write_failure(const std::string& error) noexcept {
    try {
        statistics_.result = "failed";
        statistics_.error = error;
        write_statistics(image_dir_.get(), statistics_);
    } catch (const std::exception& e) {
        host::warn(e.what());
    }
}

void RestoreSession::finish(bool succeeded) noexcept {
    const bool unreported = prepared_ && !ended_;
    if (unreported && !succeeded)
        write_failure("criu failed");
    else if (unreported && (resuming_ ? !waiting_.empty() : images_.has_manifest())) {
        const std::string error =
            images_.of_cpu().empty()
                ? "criu ended without having had every CUDA process of the tree restored"
                : "criu ended without having had the CPU memory of the tree filled";
        host::error(error);
        write_failure(error);
    } else if (unreported)
        complete();
    worker_.stop();
}

// Not left to finish(): a criu that stays in the foreground calls that when the job has ended. Should
// this criu be killed from now on, the job runs on.
void RestoreSession::complete() noexcept {
    ended_ = true;
    if (exit_kill_)
        exit_kill_->end();
    table_->complete = true;
    worker_.stop();
    // All is read: a criu that stays would hold the memory, and what is in an arena.
    unpacked_.reset();
    images_.release();
    try {
        write_statistics(image_dir_.get(), statistics_);
    } catch (const std::exception& e) {
        host::warn(e.what());
    }
}

} // namespace gpustasis
