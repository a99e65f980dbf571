// SPDX-License-Identifier: Apache-2.0
/// The memory of a task for its image, of which other tasks share a part.
#pragma once

#include "core/process_memory.hpp"
#include "cuda_plugin/shared_memory.hpp"

#include <cstdint>
#include <map>
#include <vector>

namespace gpustasis {

/// Shared parts are read from their files: through the task's mapping, pages that only others have touched would
/// become its own in all figures of the kernel, such as the one that chooses whom to kill for want of memory.
class SharedSource : public ProcessMemory {
public:
    /// `parts`, ascending by address, and `files`, which has the file of each, outlive it.
    SharedSource(pid_t pid, const std::vector<SharedPart>& parts,
                 const std::map<SharedFileId, SharedFile>& files)
        : ProcessMemory(pid), parts_(parts), files_(files) {}

    /// What is asked for is in one part, or in none.
    void read(std::uint64_t address, MutBytes out) override;

private:
    const std::vector<SharedPart>& parts_;
    const std::map<SharedFileId, SharedFile>& files_;
};

} // namespace gpustasis
