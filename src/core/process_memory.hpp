// SPDX-License-Identifier: Apache-2.0
/// The memory of another process, by process_vm_readv and process_vm_writev.
#pragma once

#include "core/memory_port.hpp"

#include <sys/types.h>

namespace gpustasis {

/// Reads and writes the memory of task `pid` (as this process sees it). The caller needs
/// ptrace access to it (ptrace(2), PTRACE_MODE_ATTACH). Not stopping the task is the caller's
/// risk. Errors name the pid and the address.
class ProcessMemory : public MemorySource, public MemorySink {
public:
    /// `mem`, if any: /proc/PID/mem, opened for writing, through which all is written. It is of the program that
    /// ran then, and of no other that has the pid later. It must outlive this object.
    explicit ProcessMemory(pid_t pid, int mem = -1) noexcept : pid_(pid), mem_(mem) {}

    void read(std::uint64_t address, MutBytes out) override;
    void write(std::uint64_t address, Bytes bytes) override;
    void write_zeros(std::uint64_t address, std::uint64_t length) override;

private:
    pid_t pid_;
    int mem_;
};

} // namespace gpustasis
