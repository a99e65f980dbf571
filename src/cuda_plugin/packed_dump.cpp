// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/packed_dump.hpp"

#include "core/error.hpp"
#include "core/file.hpp"
#include "cuda_plugin/complete_images.hpp"
#include "cuda_plugin/early_images.hpp"
#include "cuda_plugin/host.hpp"
#include "cuda_plugin/memory_directory.hpp"
#include "cuda_plugin/other_ways.hpp"
#include "seal/sealed_format.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <utility>

namespace gpustasis {
namespace {

constexpr const char* kProcessorImage =
    "cpuinfo.img"; // with --cpu-cap, written before any plugin is asked

// Where criu's calls find it: close() has no place for it.
std::atomic<PackedDump*> living = nullptr;
using Close = int (*)(int);
std::atomic<Close> real_close = nullptr;

// It is written before any plugin is asked, with --cpu-cap.
void copy_processor_image(int from, int to) {
    const UniqueFd source(::openat(from, kProcessorImage, O_RDONLY | O_NOFOLLOW | O_CLOEXEC));
    if (!source && errno == ENOENT)
        return;
    if (!source)
        throw io_error(std::string("cannot open ") + kProcessorImage, errno);
    PartFile copy(to, kProcessorImage);
    write_at(copy.fd(), 0, read_part(source.get(), 0, file_size(source.get())));
    copy.commit();
}

bool is_still_written(const ImageRedirect& redirect) {
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
        const int fd = std::stoi(entry.path().filename().string());
        const int flags = ::fcntl(fd, F_GETFL);
        if (flags >= 0 && (flags & O_ACCMODE) != O_RDONLY && redirect.holds(fd))
            return true;
    }
    return false;
}

} // namespace

PackedDump::PackedDump(int image_dir, Pack pack)
    : image_dir_(image_dir), pack_(std::move(pack)), process_(::getpid()) {
    refuse_pages_elsewhere(image_dir, "layout = \"packed\"");
    host::require_fail_dump();
    real_close = reinterpret_cast<Close>(ImportSlot::find_imported("close"));
    UniqueFd memory = make_memory_directory(image_dir, limit_.now());
    copy_processor_image(image_dir, memory.get());
    // What an earlier dump has left here is no checkpoint from now on.
    remove_early_images(image_dir);
    if (::unlinkat(image_dir, kPackName, 0) != 0 && errno != ENOENT)
        throw io_error(std::string("cannot remove the old ") + kPackName, errno);
    redirect_ = std::make_unique<ImageRedirect>(image_dir, std::move(memory));
    slot_.emplace("close", reinterpret_cast<void*>(&PackedDump::close_of_criu));
    living = this;
}

PackedDump::~PackedDump() {
    living = nullptr;
}

void PackedDump::leave_room(pid_t pid, std::uint64_t bytes) {
    limit_.keep_for(pid, bytes);
    const std::uint64_t limit = limit_.now();
    set_memory_limit(redirect_->memory(), limit);
    host::info("criu's images may take " + std::to_string(limit >> 20) + " MiB of memory; " +
               std::to_string(limit_.kept() >> 20) +
               " MiB are kept for what was taken out of the job");
}

int PackedDump::close_of_criu(int fd) noexcept {
    PackedDump* self = living;
    const int before = errno;
    const bool is_image = self != nullptr && !self->tried_ && self->redirect_->holds(fd);
    errno = before;
    const int result = real_close.load()(fd);
    const int after = errno;
    if (is_image && self->process_ == ::getpid()) {
        self->is_cut_ = host::images_are_cut(); // as CompleteImages
        self->look();
    } else if (is_image && !self->is_cut_) {
        end_cut_child();
    }
    errno = after;
    return result;
}

// CRIU writes the inventory last of all, and closes only then what it has kept open for all tasks.
void PackedDump::look() noexcept {
    try {
        const int directory = redirect_->memory();
        if (::faccessat(directory, kInventoryImage, F_OK, 0) != 0 || is_still_written(*redirect_))
            return;
        tried_ = true;
        if (host::images_are_cut())
            throw Error(Errc::io, "criu could not write all of an image: is there too little "
                                  "memory for them?");
        pack();
        done_ = true;
        redirect_.reset(); // scripts find the checkpoint where it is
    } catch (const std::exception& e) {
        host::error(std::string("layout = \"packed\": ") + e.what());
        tried_ = true;
        redirect_.reset();
        withdraw(); // now: this criu may be ended, or killed, before it comes to the end of the dump
        if (!host::fail_dump()) {
            host::error("this criu does not let the dump fail: it is ended, and the tasks run on");
            host::undo_dump_of_criu(); // all else its end undoes
            ::_exit(EXIT_FAILURE);
        }
    }
}

void PackedDump::pack() {
    const int directory = redirect_->memory();
    const std::vector<std::string> names = names_in(directory);
    require_all_pages(directory, names);
    began_to_pack_ = true;
    pack_(directory, names);
}

// Of a pack or a sealed file that is whole as well: what comes behind it, as its signature, may be what failed.
void PackedDump::withdraw() noexcept {
    if (!began_to_pack_) // what is there, if anything, is of an earlier dump
        return;
    try {
        remove_early_images(image_dir_);
    } catch (const std::exception& e) {
        host::error(std::string("what this dump has left is no checkpoint: remove it: ") +
                    e.what());
    }
    // Of sealed files, this one lists the others: without it they are no checkpoint to anybody.
    for (const char* name : {kPackName, seal::kSealedName})
        if (::unlinkat(image_dir_, name, 0) != 0 && errno != ENOENT)
            host::error(std::string("what this dump has left is no checkpoint: remove ") + name);
}

// What is taken out of the tasks comes back into memory next: there must be room for it.
void PackedDump::drop_images() noexcept {
    tried_ = true;
    if (!redirect_)
        return;
    const int directory = redirect_->memory();
    if (is_full(directory))
        host::error(
            "layout = \"packed\": there was no more memory for criu's images: with 7/8 of what "
            "the host, or a cgroup of criu's, had left, none would have stayed for the job");
    empty_memory_directory(directory);
    redirect_.reset();
}

bool PackedDump::end(bool succeeded) noexcept {
    if (succeeded)
        return done_;
    drop_images();
    withdraw();
    return true;
}

} // namespace gpustasis
