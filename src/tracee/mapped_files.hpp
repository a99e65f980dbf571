// SPDX-License-Identifier: Apache-2.0
/// The files that tasks have mapped, each told by what a later one of its path is compared with.
#pragma once

#include "core/requirements.hpp"

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace gpustasis {

/// A file that any of the tasks has mapped executable is told by its build id, or, up to the limits of
/// docs/format.md, by a hash of its content; of those that nobody has mapped executable the size is noted,
/// and they are not opened. Left out is what CRIU carries in its own images (files without a name, shared
/// memory) and what is no regular file: a device is never opened. A path that leads to more than one file,
/// in mount namespaces of one place, is left out and counted: which of them a later one is cannot be told.
class MappedFiles {
public:
    /// The tasks stand still meanwhile: what has not been looked at by then, in all calls together, is
    /// counted.
    static constexpr std::chrono::milliseconds kTime{500};

    /// `root`: of the tree. `expected`: a record, which outlives this, to compare with: only files that are
    /// in it are kept, and only those opened whose size and place leave the question open; for as long as
    /// that takes. Null: of a dump, for `time`. Throws Error: io.
    explicit MappedFiles(pid_t root, const Requirements* expected = nullptr,
                         std::chrono::milliseconds time = kTime);

    /// Add what `pid`, which stands still, has mapped; nothing if it has ended. What cannot be looked at
    /// is counted.
    void add(pid_t pid);

    /// Of all tasks so far.
    Requirements result() const;

    /// With `expected`: of its files, those that are mapped and could not be read, and why.
    const std::vector<std::pair<RequiredFile, std::string>>& unreadable() const noexcept {
        return unreadable_;
    }

private:
    using Clock = std::chrono::steady_clock;
    using Inode = std::pair<std::uint64_t, std::uint64_t>; ///< device and number
    struct Kept {
        RequiredFile file;
        bool executable = false;
        bool ambiguous = false;
    };
    struct Known {
        FileIdentity identity = FileIdentity::size;
        std::vector<std::byte> id;
    };

    void look_at(pid_t pid);
    void note(FilePlace place, const std::string& link, bool executable);
    const RequiredFile* expected_of(const RequiredFile& file) const;
    /// `wanted`: as `expected` has it; size: the best there is.
    void identify(const std::string& link, RequiredFile& file, Inode inode, FileIdentity wanted);
    Known identity_of(const std::string& link, std::uint64_t size, FileIdentity wanted);
    void keep(RequiredFile file, bool executable);

    const Requirements* expected_;
    std::string ours_;  ///< mount namespace of this process
    std::string roots_; ///< of the tree's root
    /// By mount namespace, name in /proc/PID/maps and inode: whether it was looked for an identity.
    /// Bounded, as everything that is kept here: of what goes beyond that, only the number is kept.
    std::map<std::tuple<std::string, std::string, std::uint64_t>, bool> seen_;
    std::size_t seen_size_ = 0; ///< bytes of the names in it
    std::map<std::pair<FilePlace, std::string>, Kept> files_;
    std::size_t paths_size_ = 0; ///< bytes of the paths in it
    /// By inode and what was wanted: a file is read once, whatever names and namespaces it is found by.
    std::map<std::pair<Inode, FileIdentity>, Known> known_;
    std::vector<std::pair<RequiredFile, std::string>> unreadable_;
    std::uint64_t hashed_ = 0; ///< bytes of the files that have a hash
    Clock::time_point deadline_ = Clock::time_point::max();
    Clock::duration left_; ///< of the time, for later calls
    std::uint32_t unrecorded_ = 0;
};

} // namespace gpustasis
