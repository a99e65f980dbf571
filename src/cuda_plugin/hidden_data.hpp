// SPDX-License-Identifier: Apache-2.0
/// Data of shared memory that criu does not dump, because an image of ours holds it already.
#pragma once

#include "core/unique_fd.hpp"
#include "cuda_plugin/address_ranges.hpp"
#include "cuda_plugin/import_slot.hpp"

#include <sys/stat.h>
#include <sys/types.h>

#include <cstdint>
#include <list>
#include <vector>

namespace gpustasis {

/// Nothing is done to the memory. CRIU asks the kernel where a segment of shared memory has data, by
/// lseek(SEEK_DATA) and lseek(SEEK_HOLE), and compares st_blocks of a file that has no name with its ghost-limit. The
/// criu process's calls of lseek and fstat lead here: what is hidden is a hole in the answer, and no block of the
/// file. Every other call passes unchanged, with its errno. If criu asks in another way, it finds all data, and
/// dumps it, or refuses it: answered() tells.
class HiddenData {
public:
    /// At most one of them lives. Throws Error: unsupported if criu's calls cannot be led here; io.
    HiddenData();
    HiddenData(const HiddenData&) = delete;
    HiddenData& operator=(const HiddenData&) = delete;
    /// criu's calls lead to the C library again.
    ~HiddenData();

    /// Hide `ranges` of `file`, whole pages, beside what of it is hidden already. Should its size change after
    /// that, criu's questions about it fail, and with them the dump. Throws Error: io.
    void hide(UniqueFd file, std::vector<AddressRange> ranges);

    /// What criu has been told of all files.
    struct Answered {
        std::uint64_t hidden = 0; ///< bytes that its answers lack, each counted once
        std::uint64_t wanted = 0; ///< bytes that they should lack
    };
    Answered answered() const noexcept;

private:
    struct File {
        UniqueFd fd; ///< held, so that no other file gets its inode number
        std::uint64_t device = 0;
        std::uint64_t inode = 0;
        std::int64_t size = 0;
        std::vector<AddressRange> ranges;      ///< as join() gives them
        std::vector<std::uint64_t> told_until; ///< of each range, up to where answers lacked it
    };

    File* find(const struct stat& status) noexcept;
    static int fstat_of_criu(int fd, struct stat* status) noexcept;
    static off_t lseek_of_criu(int fd, off_t offset, int whence) noexcept;
    off_t seek(int fd, off_t offset, int whence) noexcept;
    static off_t seek_data(int fd, off_t offset, File& file) noexcept;
    static off_t seek_hole(int fd, off_t offset, const File& file) noexcept;

    std::list<File> files_;
    std::list<ImportSlot> slots_; ///< each function has two names, and a criu may import either
};

} // namespace gpustasis
