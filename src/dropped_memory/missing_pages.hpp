// SPDX-License-Identifier: Apache-2.0
/// Memory of another process whose missing pages are not zeros: userfaultfd(2) in missing mode.
/// Source of every number: include/uapi/linux/userfaultfd.h.
///
/// A thread that touches such a page waits, in a system call as well, until the page is there. The
/// kernel lets it go on, and sees zeros, when the last descriptor is closed: so several processes
/// hold one. A page is put in its place in one step, and never over one that is there: any number
/// of processes can fill the same memory at once.
#pragma once

#include "core/image_reader.hpp"
#include "core/unique_fd.hpp"
#include "tracee/injected_syscall.hpp"
#include "tracee/userfaultfd_record.hpp"

#include <cstdint>
#include <set>
#include <vector>

namespace gpustasis {

class MissingPages {
public:
    /// `fd`: a userfaultfd of the process, not used before. Throws Error: io.
    explicit MissingPages(UniqueFd fd);

    int fd() const noexcept { return fd_.get(); }

    /// From now on pages of `region` that are missing are waited for. Throws Error: io, also if
    /// another userfaultfd has this memory.
    void add(const Region& region);

    /// Put every page with data that is missing in the regions of `image` in its place; what is still
    /// missing is zero. All stay guarded. A chunk that cannot be read keeps no other from its place:
    /// its pages stay missing, and another fill() tries only what an earlier one has left.
    /// Throws Error: gone if the process has ended; if chunks are left, what the first failed with
    /// (corrupt_data, io), saying how many and where.
    void fill(const ImageReader& image, unsigned threads);

    /// Let go of all regions: what is missing in them is zero from now on.
    void release() noexcept;

    /// Answer those who wait, from `image`. Whoever waits for a chunk that cannot be read waits on.
    /// Throws Error: gone if the process has ended; io. Not from two threads at once, nor with
    /// answer_again(); fill() may run beside both.
    void answer(const ImageReader& image);

    /// Try what answer() could not. Throws as answer().
    void answer_again(const ImageReader& image);

private:
    void fill_left(const ImageReader& image, unsigned threads);
    void put_chunk(const ImageReader& image, std::uint64_t number) const;

    UniqueFd fd_;
    std::vector<Region> regions_;        ///< those that were added
    std::vector<std::uint64_t> left_;    ///< chunks that the last fill() could not put back
    std::set<std::uint64_t> unanswered_; ///< chunks that somebody waits for
};

/// A userfaultfd of process `pid`, made in the name of the thread of `calls`, that also catches what the
/// kernel touches. Needs in that process CAP_SYS_PTRACE or vm.unprivileged_userfaultfd = 1: without
/// the one, the other is set for the moment of the call (userfaultfd_setting.hpp).
/// Throws Error: unsupported, saying why the kernel refuses; io.
/// If this process is killed at a certain instant (take_descriptor), the descriptor is left open there:
/// `record` begins here, and ends with the caller.
UniqueFd make_userfaultfd(InjectedSyscalls& calls, pid_t pid, UserfaultfdRecord& record);

} // namespace gpustasis
