// SPDX-License-Identifier: Apache-2.0
/// userfaultfd(2) of another process, in asynchronous write-protect mode (Linux 6.7): a first write
/// to a protected page is noted by the kernel, which takes the protection away and lets the
/// process go on. Nobody has to answer, so nobody's death can stop the process.
/// Source of every number: include/uapi/linux/userfaultfd.h.
#pragma once

#include "core/unique_fd.hpp"
#include "dirty_tracker/address_space.hpp"

#include <cstdint>

namespace gpustasis {

class Userfault {
public:
    /// Makes the descriptor in the process, by a system call injected into one of its threads, takes
    /// a copy and closes the one there again; in the calling process itself, by plain calls.
    /// Throws Error: unsupported, gone, io.
    explicit Userfault(const AddressSpace& space);

    /// Have pages of [start, end) tracked from now on; what is registered already stays as it is.
    /// False if the kernel refuses this mapping: another userfaultfd has it, it may never be
    /// written, or it is no more. Throws Error: io.
    bool add(std::uint64_t start, std::uint64_t end);

    /// Give up [start, end) and take all protection from it. Errors are of no consequence: the
    /// kernel does the same for all that is left when the last descriptor is closed.
    void remove(std::uint64_t start, std::uint64_t end) noexcept;

private:
    UniqueFd fd_;
};

} // namespace gpustasis
