// SPDX-License-Identifier: Apache-2.0
/// Which memory of a frozen task its image of CPU memory holds, and which is left to CRIU.
#pragma once

#include "core/image_info.hpp"
#include "tracee/task_maps.hpp"

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace gpustasis {

/// What is smaller stays with CRIU: the mapping, and the run of pages in it.
inline constexpr std::uint64_t kMinCpuMapping = std::uint64_t{1} << 20;
inline constexpr std::uint64_t kMinCpuRun = std::uint64_t{64} << 10;
/// As much on either side of an address in use stays with CRIU.
inline constexpr std::uint64_t kCpuWindow = std::uint64_t{1} << 20;
/// Where the kernel is to use huge pages, only whole ones are taken: the first write to a smaller part would
/// fill one, with memory that the task did not have.
inline constexpr std::uint64_t kHugePage = std::uint64_t{2} << 20;
/// Of each task, at most; beyond it the smallest runs stay with CRIU.
inline constexpr std::size_t kMaxCpuRegions = 16384;

/// Appends the runs of pages in [start, end) that are in memory, mapped by this task alone, and ascending.
using FindPages = std::function<std::vector<Region>(std::uint64_t start, std::uint64_t end)>;

/// Of `mappings`, with their flags: the private anonymous ones that can be read and written, and not
/// executed, without those that `leaves_to_criu` is true of, without a window around each address of
/// `in_use`, and without `staging`. Ascending.
std::vector<Region> choose_cpu_memory(const std::vector<Mapping>& mappings,
                                      const std::vector<std::uint64_t>& in_use,
                                      const std::vector<Region>& staging, const FindPages& find);

/// Locked, huge, a device's, watched by a userfaultfd, a stack, or not to be inherited: by VmFlags.
bool leaves_to_criu(const Mapping& mapping) noexcept;

/// Of the frozen task `pid`, the runs that FindPages is to give of its `mappings`, which need no flags: what
/// choose_cpu_memory() chooses is in these, whatever the flags and the addresses in use are. Runs too small for it
/// are not among them. Ascending. Throws Error: io.
std::vector<Region> find_own_pages(pid_t pid, const std::vector<Mapping>& mappings);

/// FindPages out of such `pages`, which must outlive it.
FindPages among(const std::vector<Region>& pages);

/// Whether a character device of that number, to which `link` leads from /proc/PID/fd, is known not to write
/// to memory of a task that has it open and does nothing: null, zero, full, random, urandom, terminals, fuse,
/// tun, and those of the NVIDIA driver.
bool is_harmless_device(dev_t number, std::string_view link) noexcept;

/// Why a device may write to memory of task `pid`, so that all of it stays with CRIU; empty: none can.
/// Without flags of its `mappings` one that has only its memory mapped is not seen. Throws Error: io.
std::string why_written_by_device(pid_t pid, const std::vector<Mapping>& mappings);

} // namespace gpustasis
