// SPDX-License-Identifier: Apache-2.0
// This program is its own criu: its calls of lseek and fstat are those that the plugin changes.
#include "check.hpp"

#include "core/error.hpp"
#include "core/unique_fd.hpp"
#include "cuda_plugin/hidden_data.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

using namespace gpustasis;

namespace {

constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kPages = 64;
constexpr std::uint64_t kTail = 100; // of one more page

using Pages = std::vector<std::uint64_t>;

bool is_there(std::uint64_t page) {
    return page % 8 != 7;
}

AddressRange pages(std::uint64_t first, std::uint64_t count) {
    return {first * kPage, (first + count) * kPage};
}

/// A memfd of kPages pages, every eighth of them absent, and a part of one more.
class Memfd {
public:
    Memfd() : fd_(::memfd_create("test", MFD_CLOEXEC)) {
        CHECK(bool(fd_) && ::ftruncate(fd_.get(), kPages * kPage + kTail) == 0);
        for (std::uint64_t page = 0; page <= kPages; ++page)
            if (is_there(page))
                CHECK(::pwrite(fd_.get(), "x", 1, static_cast<off_t>(page * kPage)) == 1);
    }
    int fd() const { return fd_.get(); }
    UniqueFd copy() const {
        return UniqueFd(
            ::open(("/proc/self/fd/" + std::to_string(fd_.get())).c_str(), O_RDONLY | O_CLOEXEC));
    }

private:
    UniqueFd fd_;
};

/// As do_dump_one_shmem() of CRIU goes through a segment.
Pages walk(int fd) {
    Pages found;
    std::uint64_t data = 0;
    std::uint64_t hole = 0;
    for (std::uint64_t page = 0; page <= kPages; ++page) {
        if (page >= hole) {
            off_t at = ::lseek(fd, static_cast<off_t>(page * kPage), SEEK_DATA);
            if (at < 0) {
                CHECK(errno == ENXIO);
                break;
            }
            CHECK(::lseek(fd, 0, SEEK_CUR) == at);
            data = static_cast<std::uint64_t>(at) / kPage;
            at = ::lseek(fd, at, SEEK_HOLE);
            CHECK(at >= 0 && ::lseek(fd, 0, SEEK_CUR) == at);
            hole = static_cast<std::uint64_t>(at) / kPage;
        }
        if (page >= data)
            found.push_back(page);
    }
    return found;
}

Pages expected(const std::vector<AddressRange>& hidden) {
    Pages found;
    for (std::uint64_t page = 0; page <= kPages; ++page) {
        bool is_hidden = false;
        for (const AddressRange& range : hidden)
            is_hidden = is_hidden || (range.start <= page * kPage && page * kPage < range.end);
        if (is_there(page) && !is_hidden)
            found.push_back(page);
    }
    return found;
}

void hidden_data_is_a_hole() {
    const Memfd memfd;
    CHECK(walk(memfd.fd()) == expected({}));
    const std::vector<std::vector<AddressRange>> choices = {
        {pages(0, 7)},
        {pages(2, 3)},
        {pages(56, 7)},
        {pages(56, 8)},
        {pages(3, 20)},
        {pages(0, kPages)},
        {pages(8, 2), pages(11, 1), pages(20, 30)},
        {pages(7, 1)}, // nothing is there
    };
    for (const std::vector<AddressRange>& hidden : choices) {
        HiddenData hiding;
        hiding.hide(memfd.copy(), hidden);
        CHECK(walk(memfd.fd()) == expected(hidden));
        CHECK(walk(memfd.copy().get()) == expected(hidden)); // whoever has it open
    }
    CHECK(walk(memfd.fd()) == expected({})); // and now it is data
}

void parts_of_one_file_add_up() {
    const Memfd memfd;
    HiddenData hiding;
    hiding.hide(memfd.copy(), {pages(16, 4)});
    hiding.hide(memfd.copy(), {pages(0, 3), pages(20, 2)});
    CHECK(hiding.answered().wanted == 9 * kPage && hiding.answered().hidden == 0);
    CHECK(walk(memfd.fd()) == expected({pages(0, 3), pages(16, 6)}));
    CHECK(hiding.answered().hidden == 9 * kPage);
    walk(memfd.fd()); // again
    CHECK(hiding.answered().hidden == 9 * kPage);
}

void other_files_and_other_questions_are_answered_by_the_kernel() {
    const Memfd memfd;
    const Memfd other;
    HiddenData hiding;
    hiding.hide(memfd.copy(), {pages(0, kPages)});
    CHECK(walk(other.fd()) == expected({}));
    CHECK(::lseek(memfd.fd(), 5, SEEK_SET) == 5 && ::lseek(memfd.fd(), 5, SEEK_CUR) == 10);
    CHECK(::lseek(memfd.fd(), 0, SEEK_END) == kPages * kPage + kTail);
    errno = 0;
    CHECK(::lseek(memfd.fd(), kPages * kPage + kTail, SEEK_DATA) == -1 && errno == ENXIO);
    CHECK(::lseek(memfd.fd(), kPages * kPage + kTail, SEEK_HOLE) == -1 && errno == ENXIO);
    CHECK(::lseek(memfd.fd(), -1, SEEK_DATA) == -1 && errno == ENXIO);
    CHECK(::lseek(-1, 0, SEEK_DATA) == -1 && errno == EBADF);
    CHECK(hiding.answered().hidden == 0);
}

void a_file_that_has_changed_its_size_fails_the_dump() {
    const Memfd memfd;
    HiddenData hiding;
    hiding.hide(memfd.copy(), {pages(0, 7)});
    CHECK(::ftruncate(memfd.fd(), kPages * kPage) == 0);
    for (const int whence : {SEEK_DATA, SEEK_HOLE}) {
        errno = 0;
        CHECK(::lseek(memfd.fd(), 0, whence) == -1 && errno == EIO);
    }
    CHECK(hiding.answered().hidden == 0);
}

// As dump_ghost_remap() of CRIU asks whether a file without a name is below its limit.
std::int64_t blocks(int fd) {
    struct stat status {};
    CHECK(::fstat(fd, &status) == 0);
    CHECK(status.st_size == kPages * kPage + kTail);
    return status.st_blocks;
}

void hidden_data_is_no_block() {
    const Memfd memfd;
    const Memfd other;
    const std::int64_t all = blocks(memfd.fd());
    CHECK(all == (kPages / 8 * 7 + 1) * kPage / 512);
    {
        HiddenData hiding;
        CHECK(blocks(memfd.fd()) == all);
        hiding.hide(memfd.copy(), {pages(0, 7), pages(16, 2)});
        CHECK(blocks(memfd.fd()) == all - static_cast<std::int64_t>(9 * kPage / 512));
        CHECK(blocks(memfd.copy().get()) == blocks(memfd.fd()) && blocks(other.fd()) == all);
        hiding.hide(memfd.copy(), {pages(0, kPages)}); // more than there are
        CHECK(blocks(memfd.fd()) == 0);
        errno = 0;
        struct stat status {};
        CHECK(::fstat(-1, &status) == -1 && errno == EBADF);
    }
    CHECK(blocks(memfd.fd()) == all);
}

} // namespace

int main() {
    hidden_data_is_a_hole();
    parts_of_one_file_add_up();
    other_files_and_other_questions_are_answered_by_the_kernel();
    a_file_that_has_changed_its_size_fails_the_dump();
    hidden_data_is_no_block();
}
