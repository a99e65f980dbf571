// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/early_images.hpp"

#include "core/error.hpp"
#include "core/file.hpp"
#include "core/manifest.hpp"
#include "cuda_plugin/memory_directory.hpp"
#include "seal/sealed_format.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <list>
#include <string_view>

namespace gpustasis {
namespace {

constexpr mode_t kModeBits = 0777;
constexpr std::uint64_t kMaxEarly = 64U << 20; // of one; CRIU holds each of them whole

std::vector<std::byte> read_whole(int dir, const std::string& name) {
    const UniqueFd fd = open_regular(dir, name);
    const std::uint64_t size = file_size(fd.get());
    if (size > kMaxEarly)
        throw Error(Errc::corrupt_data, name + " is too large");
    return read_part(fd.get(), 0, size);
}

/// With the mode that criu has given it: an engine may look at it as somebody else.
void copy_into(const PartFile& copy, int from, const std::string& name) {
    write_at(copy.fd(), 0, read_whole(from, name));
    struct stat status {};
    if (::fstatat(from, name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0 ||
        ::fchmod(copy.fd(), status.st_mode & kModeBits) != 0)
        throw io_error("cannot copy the mode of " + name, errno);
}

} // namespace

bool is_read_early(const std::string& name) {
    return name == kInventoryImage || name == "pstree.img" || name == "cpuinfo.img" ||
           (name.starts_with("ids-") && name.ends_with(".img"));
}

void remove_early_images(int image_dir) {
    // First what makes the others a checkpoint, whatever becomes of those.
    if (::unlinkat(image_dir, kInventoryImage, 0) != 0 && errno != ENOENT)
        throw io_error(std::string("cannot remove the old ") + kInventoryImage, errno);
    for (const std::string& name : names_in(image_dir))
        if (is_read_early(name) && ::unlinkat(image_dir, name.c_str(), 0) != 0 && errno != ENOENT)
            throw io_error("cannot remove the old " + name, errno);
}

// Not the parts of images: the worker of a dump that was broken off may be writing them still.
void remove_unfinished(int image_dir) {
    for (const std::string& name :
         {PartFile::part_name(kManifestName), PartFile::part_name(seal::kSealedName),
          std::string(kInventoryImage)})
        if (::unlinkat(image_dir, name.c_str(), 0) != 0 && errno != ENOENT &&
            errno != EISDIR) // criu will not write there either, and says so itself
            throw io_error("cannot remove the old " + name, errno);
}

void copy_early_images(int from, const std::vector<std::string>& names, int image_dir) {
    try {
        std::list<PartFile> copies;
        for (const std::string& name : names) {
            if (!is_read_early(name) || name == kInventoryImage)
                continue;
            copy_into(copies.emplace_back(image_dir, name), from, name);
        }
        for (PartFile& copy : copies)
            copy.sync();
        for (PartFile& copy : copies)
            copy.commit();
        PartFile inventory(image_dir, kInventoryImage);
        copy_into(inventory, from, kInventoryImage);
        inventory.commit();
    } catch (const Error&) {
        for (const std::string& name : names)
            if (is_read_early(name))
                ::unlinkat(image_dir, name.c_str(), 0);
        throw;
    }
}

void require_early_images(int unpacked, int image_dir) {
    const auto early_in = [](int dir) {
        std::vector<std::string> names = names_in(dir);
        std::erase_if(names, [](const std::string& name) { return !is_read_early(name); });
        std::ranges::sort(names);
        return names;
    };
    const auto refuse = [](const std::string& name) {
        throw Error(Errc::corrupt_data,
                    name + ", which CRIU has read, is not the one that was packed with the others");
    };
    const std::vector<std::string> packed = early_in(unpacked);
    const std::vector<std::string> beside = early_in(image_dir);
    std::vector<std::string> in_one;
    std::ranges::set_symmetric_difference(packed, beside, std::back_inserter(in_one));
    if (!in_one.empty())
        refuse(in_one.front());
    for (const std::string& name : beside)
        if (read_whole(image_dir, name) != read_whole(unpacked, name))
            refuse(name);
    if (!std::ranges::binary_search(
            packed, kInventoryImage, {},
            [](const std::string& name) -> std::string_view { return name; }))
        refuse(kInventoryImage);
}

} // namespace gpustasis
