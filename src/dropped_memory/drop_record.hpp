// SPDX-License-Identifier: Apache-2.0
/// Which tasks lack memory because a dump has taken it out: one small file for each, written before
/// the first page is dropped and removed when all pages are back or the task is dead. And which tasks
/// a dump has had the driver checkpoint: written before it asks for that, and removed when the task
/// runs again or is dead.
///
/// A dump that was killed leaves such a task behind. Another dump must not take the missing pages
/// for zeros, and `gpustasis recover` must find the image that holds them. The second record tells it that
/// all other memory is there: a task that a restore has left checkpointed has none, and may lack it.
#pragma once

#include "core/image_info.hpp"
#include "core/unique_fd.hpp"
#include "tracee/task_identity.hpp"

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace gpustasis {

/// The directory of a checkpoint that another one is built on: to be told without following links.
struct BuiltOn {
    std::uint64_t device = 0; ///< st_dev
    std::uint64_t inode = 0;  ///< st_ino
    Id checkpoint_id{};       ///< all zero: not known, whichever is there

    bool operator==(const BuiltOn&) const = default;
};

struct DropRecord {
    TaskIdentity task;
    pid_t pid = 0;               ///< of the task, as the dump saw it
    std::uint64_t seen_from = 0; ///< inode of the pid namespace that `pid` counts in
    std::uint64_t signals = 0;   ///< that its restore thread blocked before the dump; 0: not known
    bool was_locked = false;     ///< when the dump began: it is left so
    bool handed_over = false; ///< its GPU memory, by the driver to the dump: the image alone has it
    bool filled = false; ///< of kFilling: every byte is there, and the driver may have been told
    Id boot_id{};        ///< a record of another boot counts for nothing
    Id checkpoint_id{};  ///< of the dump
    Id digest{};         ///< of the image; all zero: there was none yet
    std::string image;   ///< file name in the image directory
    std::uint64_t device = 0; ///< st_dev of the image directory
    std::uint64_t inode = 0;  ///< st_ino of the image directory
    /// All that the image needs, of one in memory its image directory as well.
    std::vector<BuiltOn> built_on;
    std::string directory; ///< path of the image directory, as the dump saw it

    bool operator==(const DropRecord&) const = default;
};

/// The directory of records: /run/gpustasis/dropped, of a user other than root
/// /run/user/UID/gpustasis/dropped. Nothing in it outlives a boot, nor could a dropped page. It has
/// mode 0700, no link is followed, and what others could write to is refused.
/// Errors name the file. For one thread at a time.
class DropRecords {
public:
    static constexpr const char* kDropped = "dropped";
    static constexpr const char* kCheckpointed = "checkpointed"; ///< a directory beside that one
    /// Another one: the driver waits for GPU memory of the task, which is being copied into it.
    static constexpr const char* kFilling = "filling";

    /// `base`: in place of /run or /run/user/UID; for tests. It must exist.
    explicit DropRecords(std::string base = {}, std::string kind = kDropped);

    /// Where the records are.
    std::string path() const;

    /// Durable on return. Throws Error: io, bad_argument.
    void write(const DropRecord& record);

    /// Nothing happens if there is none. Throws Error: io, bad_argument.
    void remove(const TaskIdentity& task);

    /// nullopt: there is none of `task`: of dropped memory, nothing is missing in it. Throws Error: io, bad_argument; corrupt_data if there is
    /// a record that cannot be read.
    std::optional<DropRecord> find(const TaskIdentity& task);

    /// Of this boot, of tasks that are alive as far as this process can tell; files of others are
    /// removed. Throws as find().
    std::vector<DropRecord> list();

private:
    UniqueFd open(bool make) const;
    /// As find(), of whatever boot.
    std::optional<DropRecord> read(const TaskIdentity& task);

    std::string base_;
    std::string kind_;
};

/// A task that a dump has had the driver checkpoint gets its GPU memory back from now on: should this process die, whatever
/// the driver makes of the task then, nobody may take it for whole. Nothing where there is no record of the checkpoint.
/// Throws as DropRecords::find() and write().
void begin_filling(const TaskIdentity& task);
/// Every byte is there, and the driver is about to be told: a task that is locked from now on is whole, whether or not its
/// record is removed; one that still is RESTORING, or FAILED, is not. Where that cannot be noted the record stays as it is.
void note_filled(const TaskIdentity& task) noexcept;
/// The driver has completed it, or has refused. A record that cannot be removed stays: it says what is true.
void end_filling(const TaskIdentity& task) noexcept;

/// If a dump that was killed has left the restore thread of process `pid` its own signal mask, kAllButSigtrap, give that
/// thread the mask of the record of the checkpoint. Whoever waits for a signal that all threads take, as setuid(3) does,
/// would wait for ever else. Returns whether that was so. `restore_thread` must be back in a call of its own. Throws Error:
/// io, unsupported, as SeizedThread; as DropRecords::find().
bool give_signals_back(pid_t pid, pid_t restore_thread);

} // namespace gpustasis
