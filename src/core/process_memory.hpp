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
    explicit ProcessMemory(pid_t pid) noexcept : pid_(pid) {}

    void read(std::uint64_t address, MutBytes out) override;
    void write(std::uint64_t address, Bytes bytes) override;
    void write_zeros(std::uint64_t address, std::uint64_t length) override;

private:
    pid_t pid_;
};

} // namespace gpustasis
