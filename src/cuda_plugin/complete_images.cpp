// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/complete_images.hpp"

#include "core/error.hpp"
#include "core/lineage.hpp"
#include "cuda_plugin/early_images.hpp"
#include "cuda_plugin/host.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>

namespace gpustasis {
namespace {

// Where criu's calls find it: close() has no place for it.
std::atomic<CompleteImages*> living = nullptr;
using Close = int (*)(int);
std::atomic<Close> real_close = nullptr;

bool is_written(int fd) noexcept {
    const int flags = ::fcntl(fd, F_GETFL);
    return flags >= 0 && (flags & O_ACCMODE) != O_RDONLY;
}

} // namespace

void end_cut_child() noexcept {
    if (!host::images_are_cut())
        return;
    host::error("a child of criu could not write all of an image: is there too little room, or "
                "memory, for them?");
    ::_exit(EXIT_FAILURE);
}

CompleteImages::CompleteImages(int image_dir, Then then)
    : image_dir_(image_dir), then_(std::move(then)), process_(::getpid()) {
    host::require_fail_dump();
    real_close = reinterpret_cast<Close>(ImportSlot::find_imported("close"));
    slot_.emplace("close", reinterpret_cast<void*>(&CompleteImages::close_of_criu));
    living = this;
}

CompleteImages::~CompleteImages() {
    living = nullptr;
}

int CompleteImages::close_of_criu(int fd) noexcept {
    CompleteImages* const self = living;
    const bool looks = self != nullptr && !self->tried_ && is_written(fd);
    const int result = real_close.load()(fd);
    const int after = errno;
    if (looks && self->process_ == ::getpid()) {
        self->is_cut_ = host::images_are_cut(); // which children inherit that have not cut any
        self->look();
    } else if (looks && !self->is_cut_) {
        end_cut_child();
    }
    errno = after;
    return result;
}

// CRIU writes the inventory last of all, and closes only then what it has kept open for all tasks.
bool CompleteImages::is_complete() const {
    struct stat inventory {};
    if (::fstatat(image_dir_, kInventoryImage, &inventory, AT_SYMLINK_NOFOLLOW) != 0 ||
        !S_ISREG(inventory.st_mode)) // criu cannot write another, and says so itself
        return false;
    const std::string images = directory_path(image_dir_) + "/";
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
        if (!is_written(std::stoi(entry.path().filename().string())))
            continue;
        std::error_code gone;
        const std::string path = std::filesystem::read_symlink(entry.path(), gone).string();
        if (path.starts_with(images) && path.ends_with(".img"))
            return false;
    }
    return true;
}

void CompleteImages::look() noexcept {
    try {
        if (!is_complete())
            return;
        tried_ = true;
        if (host::images_are_cut())
            throw Error(Errc::io, "criu could not write all of an image");
        then_();
    } catch (const std::exception& e) {
        tried_ = true;
        host::error(e.what());
        if (!host::fail_dump()) {
            host::error("this criu does not let the dump fail: it is ended, and the tasks run on");
            host::undo_dump_of_criu(); // all else its end undoes
            ::_exit(EXIT_FAILURE);
        }
    }
}

} // namespace gpustasis
