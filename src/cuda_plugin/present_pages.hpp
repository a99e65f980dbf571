// SPDX-License-Identifier: Apache-2.0
/// Memory that a file of a tmpfs has already, written by several threads at once.
#pragma once

#include "core/bytes.hpp"

#include <cstdint>

namespace gpustasis {

/// Write `bytes` at `offset` of `file`, of which the first `present` bytes have their memory, through a mapping that is gone
/// on return: neither page tables nor resident memory of this process grow with the file. From several threads at once:
/// write(2) lets one at a time into a file, and is for one alone a third faster (docs/performance.md). False: nothing was
/// written, as where it is not all present, the file was cut meanwhile, a page is missing after all and there is no memory
/// for it, or the kernel cannot say so (before Linux 5.14). Then write(2) says why.
/// A file that is cut at that very moment is a signal: nobody may.
bool try_write_present(int file, std::uint64_t present, std::uint64_t offset, Bytes bytes) noexcept;

} // namespace gpustasis
