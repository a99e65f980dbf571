// SPDX-License-Identifier: Apache-2.0
/// Which shared memory of a frozen tree its images of CPU memory hold, each part in the image of one task, and
/// which is left to CRIU.
#pragma once

#include "core/image_info.hpp"
#include "core/unique_fd.hpp"
#include "cuda_plugin/address_ranges.hpp"
#include "tracee/task_maps.hpp"

#include <sys/types.h>

#include <compare>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace gpustasis {

/// One task of the tree. Every thread of it is a stopped tracee.
struct SharingTask {
    pid_t pid = 0;
    std::vector<Mapping> mappings;     ///< with their flags, where they matter
    std::vector<std::uint64_t> in_use; ///< addresses: addresses_in_use()
    std::vector<Region> staging;       ///< GPU memory
    std::vector<Region> pages{};       ///< find_own_pages()
};

/// Which file it is. A number is given once on each file system only.
struct SharedFileId {
    dev_t device = 0;
    std::uint64_t inode = 0;
    auto operator<=>(const SharedFileId&) const = default;
};

/// Shared anonymous memory or a memfd, files of the kernel's own, which no mount shows; or a file on a tmpfs that
/// has no name any more.
struct SharedFile {
    UniqueFd fd;                    ///< to read
    std::uint64_t size = 0;         ///< bytes
    std::vector<AddressRange> data; ///< offsets of what is there, ascending
    std::uint64_t block = 4096;     ///< bytes of which the kernel may make all if one is written
};

/// A part of a file, as a task maps it.
struct SharedPart {
    pid_t pid = 0; ///< of the task whose image is to hold it
    Region region; ///< in that task
    SharedFileId file;
    std::uint64_t offset = 0; ///< of the region's first byte in the file
};

/// Whether the mapping, shared or private, may be of such a file: by its name, which a file that was removed from
/// a disk has as well.
bool maps_shared_memory(const Mapping& mapping) noexcept;

SharedFileId file_of(const Mapping& mapping) noexcept;

/// Whether there may be such files, by mappings without flags: each of find_shared_candidates() has one of these.
bool may_share_memory(const std::vector<SharingTask>& tasks) noexcept;

/// Files that may be taken: every mapping of them in the tree is shared and not executed, is
/// not left to CRIU by its flags, and holds no staging, and one is large, and can be read and written.
std::vector<SharedFileId> find_shared_candidates(const std::vector<SharingTask>& tasks);

/// Every large run of data of `files` that a task maps to read and write, outside of a window around each
/// address in use, once. Ascending by task, then address.
std::vector<SharedPart> choose_shared_memory(const std::vector<SharingTask>& tasks,
                                             const std::map<SharedFileId, SharedFile>& files);

/// The candidates of `tasks`, opened. Each is the same file wherever it is mapped, of the
/// kernel's own or without a name on a tmpfs that the task has mounted, not sealed against writing, and used by no process outside of the tree as far as /proc tells.
/// `left` is told why another is not.
std::map<SharedFileId, SharedFile>
open_shared_files(const std::vector<SharingTask>& tasks,
                  const std::function<void(const std::string& why_not)>& left);

} // namespace gpustasis
