// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/drop.hpp"

#include "core/arena.hpp"
#include "core/error.hpp"
#include "core/lineage.hpp"
#include "core/manifest.hpp"
#include "cuda_plugin/guardian.hpp"
#include "cuda_plugin/host.hpp"
#include "cuda_plugin/memory_directory.hpp"
#include "cuda_plugin/sealed_key.hpp"
#include "dropped_memory/drop_record.hpp"
#include "tracee/injected_syscall.hpp"
#include "tracee/proc.hpp"
#include "tracee/ptrace.hpp"
#include "tracee/task_maps.hpp"
#include "tracee/userfaultfd_record.hpp"
#include "tracee/way_back.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string>

namespace gpustasis {
namespace {

// linux/mman.h, since 5.18: MADV_DONTNEED for memory that is mlocked.
constexpr int kMadvDontneedLocked = 24;

bool is_descendant(pid_t pid, pid_t ancestor) {
    try {
        while (pid != ancestor && pid > 1)
            pid = proc::parent(pid);
    } catch (const Error&) {
        return false; // it, or one above it, has ended: the tree to be dumped stands
    }
    return pid == ancestor;
}

void close_by(const BorrowedThread& thread, UserfaultfdRecord& record,
              const std::vector<UnusedUserfaultfd>& found, std::vector<UnusedUserfaultfd>& closed) {
    InjectedSyscalls task(thread);
    for (const UnusedUserfaultfd& left : found)
        if (record.close_left(left, task)) {
            closed.push_back(left);
            host::info("closed descriptor " + std::to_string(left.fd) + " of pid " +
                       std::to_string(thread.pid) +
                       ": a userfaultfd that a dump or a tracker which was killed has left there");
        }
    task.finish();
}

/// By one that survives it should this criu be killed meanwhile: no worker looks after a task without CUDA.
void close_by_any_thread(pid_t pid, UserfaultfdRecord& record,
                         const std::vector<UnusedUserfaultfd>& found,
                         std::vector<UnusedUserfaultfd>& closed) {
    if (!find_way_back_code(pid))
        throw Error(Errc::unsupported, "it has no code that would lead a thread of it back");
    Error failure(Errc::gone, "it has no thread");
    for (const pid_t tid : proc::threads(pid)) {
        try {
            require_room_for_way_back(read_maps(pid), tid);
        } catch (const Error& e) {
            failure = e;
            continue;
        }
        std::atomic<bool> signals_blocked = false;
        std::atomic<std::uint64_t> signal_mask = 0;
        return close_by({pid, tid, signals_blocked, signal_mask}, record, found, closed);
    }
    throw failure;
}

/// The checkpoint whose manifest is in `dir`, in the clear; none where that cannot be told.
std::optional<Id> checkpoint_in(int dir) {
    try {
        return read_manifest(dir).checkpoint_id;
    } catch (const Error&) {
        return std::nullopt;
    }
}

/// Whether `dir` holds images of this plugin.
bool holds_images(int dir) {
    return holds_sealed(dir) || std::ranges::any_of(names_in(dir), [](const std::string& name) {
               return name.starts_with("gpustasis-") && name.ends_with(".img");
           });
}

bool is_needed_by(const DropRecord& record, int image_dir) {
    struct stat status {};
    if (::fstat(image_dir, &status) != 0)
        throw io_error("cannot examine the image directory", errno);
    if (record.device == status.st_dev && record.inode == status.st_ino)
        return ::faccessat(image_dir, record.image.c_str(), F_OK, AT_SYMLINK_NOFOLLOW) == 0 ||
               holds_sealed(image_dir);
    return std::ranges::any_of(record.built_on, [&](const BuiltOn& one) {
        if (one.device != status.st_dev || one.inode != status.st_ino || !holds_images(image_dir))
            return false;
        // It may have been given up in memory, and another one be here since.
        return one.checkpoint_id == Id{} ||
               checkpoint_in(image_dir).value_or(one.checkpoint_id) == one.checkpoint_id;
    });
}

[[noreturn]] void refuse(const DropRecord& record, pid_t pid) {
    throw Error(Errc::unsupported,
                "memory of process " + std::to_string(pid) + " is missing: an earlier dump into " +
                    record.directory + " took it out and was broken off; put it back first: " +
                    "gpustasis recover " + std::to_string(pid) + " -D " + record.directory);
}

/// That the restore thread of a frozen task blocks; 0: that cannot be told. If an earlier dump was killed and has left it
/// the mask of a dump, it gets its own first: nobody would know that one any more, nor would any image.
std::uint64_t own_signals(const TaskRecord& record, DropRecords& records) {
    try {
        if (record.thawed)
            return record.signal_mask;
        const std::uint64_t signals = get_signal_mask(record.restore_tid);
        if (!is_mask_of_dump(signals))
            return signals;
        const std::optional<DropRecord> earlier = records.find(identity_of(record));
        if (!earlier || earlier->signals == 0) {
            host::warn(
                "the restore thread of pid " + std::to_string(record.pid) +
                " has the signal mask of a dump, and no record says which it had before: "
                "setuid() and others like it may wait for ever there, after a restore as well");
            return signals;
        }
        host::info("giving the restore thread of pid " + std::to_string(record.pid) +
                   " its signal mask back, which an earlier dump has left changed");
        set_signal_mask(record.restore_tid, earlier->signals);
        return earlier->signals;
    } catch (const Error& e) {
        host::warn("cannot tell which signals the restore thread of pid " +
                   std::to_string(record.pid) + " blocks: " + e.what());
        return 0;
    }
}

void write_record(DropRecords& records, const TaskRecord& record, const ImagePlace& place) {
    struct stat directory {};
    if (::fstat(place.directory, &directory) != 0)
        throw io_error("cannot examine the image directory", errno);
    records.write({.task = identity_of(record),
                   .pid = record.pid,
                   .seen_from = pid_namespace_of("self"),
                   .signals = own_signals(record, records),
                   .was_locked = record.state_before == ProcessState::locked,
                   .handed_over = record.direct.begun,
                   .boot_id = proc::boot_id(),
                   .checkpoint_id = record.checkpoint_id,
                   .digest = record.digest,
                   .image = image_name(record.image_pid),
                   .device = directory.st_dev,
                   .inode = directory.st_ino,
                   .built_on = place.built_on,
                   .directory = directory_path(place.directory)});
}

/// With a record for another dump, should this criu be killed. The memory is as well guarded without.
UniqueFd make_recorded_userfaultfd(InjectedSyscalls& task, const TaskRecord& record) {
    UserfaultfdRecord made_there(record.pid, IfMissing::make);
    made_there.begin();
    if (const auto& why_not = made_there.why_not())
        host::warn("should this criu be killed now, pid " + std::to_string(record.pid) +
                   " may keep a userfaultfd, which CRIU cannot dump: " + why_not->what());
    host::info("guarding the staged memory of pid " + std::to_string(record.pid));
    UniqueFd made = make_userfaultfd(task, record.pid, made_there);
    made_there.end();
    return made;
}

Guard make_guard(InjectedSyscalls& task, const TaskRecord& record,
                 const std::vector<Region>& regions, bool required) {
    Guard guard;
    try {
        guard.pages.emplace(make_recorded_userfaultfd(task, record));
        for (const Region& region : regions)
            guard.pages->add(region);
    } catch (const Error& e) {
        if (required)
            throw Error(e, std::string("guard = \"require\": ") + e.what());
        guard.pages.reset(); // closed, it leaves the memory as it was
        guard.why_not = e.what();
    }
    return guard;
}

} // namespace

void refuse_missing_memory(pid_t pid, bool with_tree) {
    for (const char* kind : {DropRecords::kDropped, DropRecords::kFilling}) {
        DropRecords records({}, kind);
        // One that is `filled` was left of a task that is whole: one that is not is in no state that can be dumped.
        if (const auto record = records.find(identify_task(pid)); record && !record->filled)
            refuse(*record, pid);
        if (!with_tree)
            continue;
        for (const DropRecord& record : records.list())
            if (!record.filled && record.seen_from == pid_namespace_of("self") &&
                is_descendant(record.pid, pid))
                refuse(record, record.pid);
    }
}

void refuse_needed_images(int image_dir) {
    if (const std::optional<ArenaMarker> marker = find_marker(image_dir)) {
        // Where that is gone, nothing can be put back from it any more.
        const UniqueFd local(
            ::open(marker->directory.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
        if (local && !find_marker(local.get()))
            refuse_needed_images(local.get());
    }
    std::vector<DropRecord> needed = DropRecords().list();
    for (DropRecord& record : DropRecords({}, DropRecords::kCheckpointed).list())
        if (record.handed_over) // whether it is missing still, only the driver knows
            needed.push_back(std::move(record));
    for (const DropRecord& record : needed)
        if (is_needed_by(record, image_dir))
            throw Error(Errc::unsupported,
                        directory_path(image_dir) + " holds memory that is missing in process " +
                            std::to_string(record.pid) + ": put it back first: gpustasis recover " +
                            std::to_string(record.pid) + " -D " + record.directory +
                            "; or dump into another directory");
}

std::vector<BuiltOn> read_built_on(Lineage& lineage, std::uint32_t count) {
    std::vector<BuiltOn> found;
    try {
        for (std::uint32_t depth = 1; depth <= count; ++depth) {
            const int dir = lineage.directory(depth);
            struct stat status {};
            if (::fstat(dir, &status) != 0)
                throw io_error("cannot examine " + directory_path(dir), errno);
            found.push_back({status.st_dev, status.st_ino, checkpoint_in(dir).value_or(Id{})});
            if (::faccessat(dir, kArenaOwner, F_OK, AT_SYMLINK_NOFOLLOW) != 0)
                continue;
            const ArenaOwner owner = read_owner(dir);
            found.push_back({owner.device, owner.inode, owner.checkpoint_id}); // it is drained to
        }
    } catch (const Error& e) { // if the dump needs that one, it fails for that
        host::warn("another dump may replace a part of what this one is built on, should this one "
                   "be broken off: " +
                   std::string(e.what()));
    }
    return found;
}

void refuse_handed_over(pid_t pid) {
    const auto record = DropRecords({}, DropRecords::kCheckpointed).find(identify_task(pid));
    if (record && record->handed_over)
        refuse(*record, pid);
}

void require_lock(const DumpLock& lock, bool drops) {
    const std::optional<Error>& why_not = lock.why_not();
    if (!why_not)
        return;
    if (drops)
        throw Error(*why_not);
    host::warn("nothing keeps a second dump from this task while this one is at work: " +
               std::string(why_not->what()));
}

void record_checkpoint(const TaskRecord& record, const ImagePlace& place, bool required) {
    try {
        DropRecords records({}, DropRecords::kCheckpointed);
        try {
            records.list();        // which removes those of the dead
        } catch (const Error& e) { // one that cannot be read is no matter of this task
            host::warn(e.what());
        }
        write_record(records, record, place);
    } catch (const Error& e) {
        if (required)
            throw;
        host::warn("should this criu and its worker be killed, gpustasis recover will refuse pid " +
                   std::to_string(record.pid) + ": " + e.what());
    }
}

void note_found_running(const TaskRecord& record) {
    try {
        DropRecords records({}, DropRecords::kCheckpointed);
        std::optional<DropRecord> earlier = records.find(identity_of(record));
        if (!earlier || !earlier->was_locked)
            return;
        earlier->was_locked = false;
        records.write(*earlier);
    } catch (const Error& e) {
        host::warn("should this criu and its worker be killed, gpustasis recover may leave pid " +
                   std::to_string(record.pid) + " locked: " + e.what());
    }
}

void give_own_signals(const TaskRecord& record) {
    DropRecords records({}, DropRecords::kCheckpointed);
    own_signals(record, records);
}

void close_left_userfaultfd(pid_t pid, TaskRecord* record, std::vector<UnusedUserfaultfd>& closed) {
    try {
        UserfaultfdRecord left_there(pid, IfMissing::nothing);
        std::vector<UnusedUserfaultfd> found = left_there.find_left();
        std::ranges::copy(find_inherited(pid, closed), std::back_inserter(found));
        if (!found.empty() && record != nullptr)
            close_by({pid, record->restore_tid, record->thawed, record->signal_mask}, left_there,
                     found, closed);
        else if (!found.empty())
            close_by_any_thread(pid, left_there, found, closed);
        if (const auto& why_not = left_there.why_not())
            throw Error(*why_not);
    } catch (const Error& e) {
        host::warn("a dump or a tracker of pid " + std::to_string(pid) +
                   " that was killed may have left a userfaultfd there, which CRIU cannot dump: " +
                   e.what());
    }
}

void drop_staging(Guard& guard, TaskRecord& record, const std::vector<Region>& regions,
                  const TaskTable& table, UndoImages& images, const ImagePlace& place,
                  unsigned threads, bool required) {
    const std::string name = "pid " + std::to_string(record.pid);
    record.recorded = true;
    DropRecords records;
    write_record(records, record, place);
    InjectedSyscalls task({record.pid, record.restore_tid, record.thawed, record.signal_mask});
    if (!task.has_way_back())
        host::warn(name + " would not survive this criu being killed while its staged memory is "
                          "dropped");
    guard = make_guard(task, record, regions, required);
    if (guard.pages)
        try {
            start_guardians(record, table, *guard.pages, images, threads);
        } catch (...) {
            guard.pages->release(); // nothing is missing, and nobody would answer who waits
            guard.pages.reset();
            throw;
        }
    else
        host::warn("the dropped memory of " + name +
                   " reads as zeros until it is put back, should "
                   "this criu be killed: " +
                   guard.why_not);
    host::info("dropping the staged memory of " + name);
    record.drop_begun = true;
    for (const Region& region : regions) {
        const bool shared = region.kind == RegionKind::shared_anonymous;
        std::int64_t result = task.call(SYS_madvise, region.address, region.length,
                                        shared ? MADV_REMOVE : MADV_DONTNEED);
        if (result == -EINVAL && !shared)
            result = task.call(SYS_madvise, region.address, region.length, kMadvDontneedLocked);
        if (result != 0)
            throw io_error("cannot drop staged memory of " + name, static_cast<int>(-result));
    }
    task.finish();
}

} // namespace gpustasis
