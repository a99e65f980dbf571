// SPDX-License-Identifier: Apache-2.0
/// The mappings of a task, from /proc/PID/maps (proc_pid_maps(5)).
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace gpustasis {

struct Mapping {
    std::uint64_t start = 0;
    std::uint64_t end = 0;
    std::uint32_t protection = 0; ///< PROT_*
    bool shared = false;
    dev_t device = 0; ///< of the file, or 0
    std::uint64_t inode = 0;
    std::uint64_t offset = 0;         ///< of the first byte in the file
    std::string name;                 ///< path, "[heap]", "[anon:...]" or empty
    std::vector<std::string> flags{}; ///< VmFlags, two letters each; of read_maps_with_flags() only

    /// Anonymous memory that only this task's address space refers to.
    bool is_private_anonymous() const noexcept;
    /// MAP_SHARED | MAP_ANONYMOUS: a shmem file without a name, also after a restore by CRIU.
    bool is_shared_anonymous() const noexcept;
};

/// Throws Error: corrupt_data for a line that is no mapping.
std::vector<Mapping> parse_maps(std::string_view text);

/// As parse_maps, of /proc/PID/smaps, with the flags.
std::vector<Mapping> parse_smaps(std::string_view text);

/// Ascending by address. Throws Error: io.
std::vector<Mapping> read_maps(pid_t pid);

/// The same with the flags, for which the kernel goes through the page tables.
std::vector<Mapping> read_maps_with_flags(pid_t pid);

} // namespace gpustasis
