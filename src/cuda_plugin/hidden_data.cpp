// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/hidden_data.hpp"

#include "core/error.hpp"
#include "cuda_plugin/host.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <string>
#include <utility>

namespace gpustasis {
namespace {

// Each has two names, and is one function.
static_assert(sizeof(off_t) == 8 && sizeof(struct stat) == sizeof(struct stat64));
constexpr std::int64_t kBlock = 512; // of st_blocks

// Where criu's calls find it: lseek() has no place for it.
std::atomic<HiddenData*> living = nullptr;
// Not by name: in a test, this is the main program itself.
using Seek = off_t (*)(int, off_t, int);
std::atomic<Seek> real_lseek = nullptr;
using Examine = int (*)(int, struct stat*);
std::atomic<Examine> real_fstat = nullptr;

off_t at(std::uint64_t offset) noexcept {
    return static_cast<off_t>(offset);
}

} // namespace

HiddenData::HiddenData() {
    real_lseek = reinterpret_cast<Seek>(ImportSlot::find_imported("lseek"));
    real_fstat = reinterpret_cast<Examine>(ImportSlot::find_imported("fstat"));
    using Names = std::initializer_list<const char*>;
    slots_.emplace_back(Names{"lseek64", "lseek"},
                        reinterpret_cast<void*>(&HiddenData::lseek_of_criu));
    slots_.emplace_back(Names{"fstat64", "fstat"},
                        reinterpret_cast<void*>(&HiddenData::fstat_of_criu));
    living = this;
}

HiddenData::~HiddenData() {
    living = nullptr;
}

void HiddenData::hide(UniqueFd file, std::vector<AddressRange> ranges) {
    struct stat status {};
    if (real_fstat.load()(file.get(), &status) != 0)
        throw io_error("cannot examine shared memory", errno);
    File* found = find(status);
    if (found == nullptr) {
        files_.push_back({.fd = std::move(file),
                          .device = status.st_dev,
                          .inode = status.st_ino,
                          .size = status.st_size,
                          .ranges = {},
                          .told_until = {}});
        found = &files_.back();
    }
    ranges.insert(ranges.end(), found->ranges.begin(), found->ranges.end());
    found->ranges = join(std::move(ranges));
    found->told_until.clear();
    for (const AddressRange& range : found->ranges)
        found->told_until.push_back(range.start);
}

HiddenData::Answered HiddenData::answered() const noexcept {
    Answered all;
    for (const File& file : files_)
        for (std::size_t i = 0; i < file.ranges.size(); ++i) {
            all.wanted += file.ranges[i].end - file.ranges[i].start;
            all.hidden += file.told_until[i] - file.ranges[i].start;
        }
    return all;
}

HiddenData::File* HiddenData::find(const struct stat& status) noexcept {
    const auto found = std::ranges::find_if(files_, [&](const File& one) {
        return one.device == status.st_dev && one.inode == status.st_ino;
    });
    return found == files_.end() ? nullptr : &*found;
}

// What counts as much as the data of a file that lacks what is hidden.
int HiddenData::fstat_of_criu(int fd, struct stat* status) noexcept {
    const int result = real_fstat.load()(fd, status);
    HiddenData* self = living;
    const File* file = result == 0 && self != nullptr ? self->find(*status) : nullptr;
    if (file == nullptr)
        return result;
    for (const AddressRange& range : file->ranges)
        status->st_blocks -= std::min<std::int64_t>(
            status->st_blocks, static_cast<std::int64_t>(range.end - range.start) / kBlock);
    return result;
}

off_t HiddenData::lseek_of_criu(int fd, off_t offset, int whence) noexcept {
    HiddenData* self = living;
    if (self == nullptr || offset < 0 || (whence != SEEK_DATA && whence != SEEK_HOLE))
        return real_lseek.load()(fd, offset, whence);
    return self->seek(fd, offset, whence);
}

off_t HiddenData::seek(int fd, off_t offset, int whence) noexcept {
    const int error = errno;
    struct stat status {};
    File* file = real_fstat.load()(fd, &status) == 0 ? find(status) : nullptr;
    errno = error;
    if (file == nullptr)
        return real_lseek.load()(fd, offset, whence);
    if (status.st_size != file->size) {
        try {
            host::error(
                "a process outside of the tree has changed the size of shared memory in the "
                "dump, from " +
                std::to_string(file->size) + " to " + std::to_string(status.st_size) +
                " bytes: try again");
        } catch (const std::exception&) { // it fails all the same
            errno = ENOMEM;
            return -1;
        }
        errno = EIO;
        return -1;
    }
    return whence == SEEK_DATA ? seek_data(fd, offset, *file) : seek_hole(fd, offset, *file);
}

off_t HiddenData::seek_data(int fd, off_t offset, File& file) noexcept {
    for (off_t found = offset;;) {
        found = real_lseek.load()(fd, found, SEEK_DATA);
        if (found < 0)
            return found;
        const auto position = static_cast<std::uint64_t>(found);
        const auto range = std::ranges::upper_bound(file.ranges, position, {}, &AddressRange::end);
        if (range == file.ranges.end() || position < range->start)
            return found;
        // CRIU asks in ascending order, and may ask again.
        std::uint64_t& told =
            file.told_until[static_cast<std::size_t>(range - file.ranges.begin())];
        told = std::max(told, range->end);
        found = at(range->end);
    }
}

off_t HiddenData::seek_hole(int fd, off_t offset, const File& file) noexcept {
    const off_t found = real_lseek.load()(fd, offset, SEEK_HOLE);
    if (found < 0)
        return found;
    const auto range = std::ranges::upper_bound(file.ranges, static_cast<std::uint64_t>(offset), {},
                                                &AddressRange::end);
    if (range == file.ranges.end() || found <= at(range->start))
        return found;
    return real_lseek.load()(fd, std::max(offset, at(range->start)), SEEK_SET);
}

} // namespace gpustasis
