// SPDX-License-Identifier: Apache-2.0
/// The memory of one process, held on to: never that of a later one with the same id, nor of a
/// program that the process has executed since.
#pragma once

#include "core/unique_fd.hpp"
#include "tracee/task_maps.hpp"

#include <sys/types.h>

#include <vector>

namespace gpustasis {

/// What a mapping is to somebody who looks for writes.
enum class MappingUse {
    ignored, ///< no write to it is the process's own memory: code, devices, the kernel's pages
    private_memory, ///< a page of a file in it has not been written
    shared_memory,  ///< memory without a name or a disk; another process may write to it, unseen
    untracked,      ///< writable, but a file's
};

MappingUse use_of(const Mapping& mapping) noexcept;

class AddressSpace {
public:
    /// Throws Error: gone if there is no such process, bad_argument if `pid` is a thread's or no id,
    /// unsupported if it shows no memory (the kernel's, or its main thread has ended), io.
    explicit AddressSpace(pid_t pid);

    pid_t pid() const noexcept { return pid_; }
    int pidfd() const noexcept { return pidfd_.get(); }
    /// /proc/PID/pagemap, of this address space for good.
    int pagemap() const noexcept { return pagemap_.get(); }

    /// As of now; ascending. Throws Error: gone if the process or its main thread has ended, or it
    /// has executed another program; io.
    std::vector<Mapping> mappings() const;

    /// Throws Error: gone if the process has ended; a zombie has.
    void require_alive() const;

private:
    UniqueFd open_file(const char* file) const;

    pid_t pid_;
    UniqueFd pidfd_;
    UniqueFd maps_;
    UniqueFd pagemap_;
};

} // namespace gpustasis
