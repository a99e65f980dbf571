// SPDX-License-Identifier: Apache-2.0
/// A descriptor that another process has to make, fetched from it.
#pragma once

#include "core/unique_fd.hpp"
#include "dirty_tracker/address_space.hpp"

#include <cstdint>

namespace gpustasis {

/// Has a thread of the process make system call `number`, whose result is a descriptor; takes a
/// copy of it and has the thread close it: the process's table of descriptors is as before. One
/// thread is stopped for that time, about a millisecond; what it does goes on after
/// it, also if this process is killed at any instant. At worst, if that instant lies between the
/// call and its being noticed (some microseconds), the descriptor is left open there, unused.
///
/// Takes a thread only if its stack is known to have room for the way back: the main thread, or
/// one whose stack lies above a guard. Throws Error: unsupported, gone, io; the process goes on.
UniqueFd make_descriptor_in(const AddressSpace& space, std::uint64_t number,
                            std::uint64_t argument);

} // namespace gpustasis
