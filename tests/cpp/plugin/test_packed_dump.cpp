// SPDX-License-Identifier: Apache-2.0
// When images are packed, and when never. This program takes criu's place: what the plugin calls of criu it
// finds here, and criu's calls of close() are its own.
#include "check.hpp"
#include "pagemap.hpp"
#include "sample.hpp"

#include "core/error.hpp"
#include "cuda_plugin/early_images.hpp"
#include "cuda_plugin/packed_dump.hpp"
#include "seal/sealed_format.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <optional>

using namespace gpustasis;

namespace {

int image_dir = -1;
bool cut = false;
bool stubborn = false; // a criu that does not take an image for cut
int undone = 0;
int unwritable = -1; // what the plugin has opened as an image that cannot be written

} // namespace

extern "C" {
int criu_get_image_dir(void) {
    return image_dir;
}
int bfdopenw(void* file) {
    unwritable = *static_cast<int*>(file);
    return 0;
}
int bwrite(void* /*file*/, const void* /*bytes*/, int size) {
    return size;
}
void bclose(void* file) {
    const int fd = *static_cast<int*>(file);
    cut = cut || ::write(fd, "", 1) != 1;
    ::close(fd);
}
int bfd_flush_images(void) {
    return cut && !stubborn ? -1 : 0;
}
int unsuspend_lsm(void) {
    undone |= 1;
    return 0;
}
void network_unlock(void) {
    undone |= 2;
}
void delete_link_remaps(void) {
    undone |= 4;
}
// The plugin ends the process that stands for criu; this tells what it has done before.
void _exit(int status) {
    if (stubborn && ::faccessat(image_dir, gpustasis::kPackName, F_OK, 0) == 0)
        undone |= 8; // which it is to leave to nobody
    ::syscall(SYS_exit_group, stubborn ? 16 + undone : status);
    std::abort();
}
}

namespace {

constexpr const char* kOther = "gpustasis-1.img"; // the undo may still need it

struct Dump {
    sample::TempDir dir;
    std::vector<std::string> packed;
    std::optional<PackedDump> made;

    explicit Dump(bool fails = false) {
        cut = false;
        unwritable = -1;
        image_dir = ::open(dir.path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        made.emplace(dir.fd(), [this, fails](int memory, const std::vector<std::string>& names) {
            packed = names;
            copy_early_images(memory, names, dir.fd());
            for (const char* name : {kPackName, seal::kSealedName, kOther})
                sample::write_file(dir.fd(), name, sample::pattern_bytes(5));
            if (fails) // all is whole by then: what signs it comes last
                throw io_error("test", ENOSPC);
        });
    }
    ~Dump() {
        made.reset();
        ::close(image_dir);
    }
    static int open(const char* name, const sample::Buffer& bytes = sample::pagemap({6})) {
        const int fd = ::openat(image_dir, name, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
        CHECK(fd >= 0 &&
              ::write(fd, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
        return fd;
    }
    /// All of a dump up to the last image, which is given.
    static int write_all() {
        const int global = open("files.img");
        for (const char* name : {"pagemap-1.img", "pstree.img", "ids-1.img", kInventoryImage})
            CHECK(::close(open(name)) == 0);
        return global;
    }
    bool is_checkpoint() const { return dir.has(kInventoryImage); }
    bool has_files() const { return dir.has(kPackName) || dir.has(seal::kSealedName); }
};

void the_last_close_packs() {
    Dump dump;
    const int last = Dump::write_all();
    CHECK(dump.packed.empty() && !dump.is_checkpoint() && !dump.made->is_done());
    CHECK(::close(last) == 0);
    CHECK(dump.made->is_done() && dump.is_checkpoint() && !cut);
    CHECK(dump.packed.size() == 5 && !dump.dir.has("files.img") && dump.dir.has("ids-1.img"));
    struct stat led {
    }, real{};
    CHECK(::fstat(image_dir, &led) == 0 && ::fstat(dump.dir.fd(), &real) == 0);
    CHECK(led.st_ino == real.st_ino && led.st_dev == real.st_dev);
    CHECK(dump.made->end(true) && dump.is_checkpoint());
    CHECK(dump.dir.has(kPackName) && dump.dir.has(seal::kSealedName));
    CHECK(dump.made->end(false));
    CHECK(!dump.is_checkpoint() && !dump.dir.has("ids-1.img"));
    CHECK(!dump.has_files() && dump.dir.has(kOther));
}

void what_criu_could_not_write_is_not_packed() {
    Dump dump;
    const int last = Dump::write_all();
    cut = true;
    ::close(last);
    CHECK(!dump.made->is_done() && dump.packed.empty() && !dump.is_checkpoint());
    CHECK(dump.made->end(false) && !dump.made->end(true));
}

void a_pack_that_fails_fails_the_dump() {
    Dump dump(true);
    CHECK(::close(Dump::write_all()) == 0);
    CHECK(cut && unwritable >= 0 && !dump.made->is_done());
    for (int turn = 0; turn < 2; ++turn) { // before criu comes to the end of the dump, and then
        CHECK(!dump.has_files() && dump.dir.has(kOther));
        CHECK(!dump.is_checkpoint() && !dump.dir.has("ids-1.img"));
        sample::write_file(dump.dir.fd(), seal::kSealedName, {}); // as if it could not be removed
        CHECK(dump.made->end(false));
    }
}

// Until something is packed, whatever has these names is of a checkpoint that may be good.
void a_dump_that_packs_nothing_removes_nothing() {
    Dump dump;
    for (const char* name : {kPackName, seal::kSealedName})
        sample::write_file(dump.dir.fd(), name, sample::pattern_bytes(5));
    const int last = Dump::write_all();
    cut = true;
    ::close(last);
    CHECK(!dump.made->is_done() && dump.packed.empty() && dump.made->end(false));
    CHECK(dump.dir.has(kPackName) && dump.dir.has(seal::kSealedName));
}

void pages_that_went_elsewhere_fail_the_dump() {
    Dump dump;
    ::close(Dump::open("files.img"));
    ::close(Dump::open(kInventoryImage));
    CHECK(cut && !dump.made->is_done() && dump.packed.empty());
}

void pages_that_are_in_no_image_fail_the_dump() {
    Dump dump;
    ::close(Dump::open("pagemap-2.img", sample::pagemap({6, 2})));
    ::close(Dump::write_all());
    CHECK(cut && !dump.made->is_done() && dump.packed.empty() && !dump.is_checkpoint());
}

int end_of_child(const std::function<void()>& body) {
    const pid_t child = fork_child();
    if (child == 0) {
        body();
        ::_exit(0);
    }
    int status = -1;
    CHECK(::waitpid(child, &status, 0) == child);
    return status;
}

// criu asks nothing but how such a child has ended.
void a_child_that_could_not_write_its_image_says_so() {
    Dump dump;
    const int before = Dump::open("utsns-1.img");
    CHECK(end_of_child([&] { ::close(before); }) == 0);
    const int status = end_of_child([&] {
        const int image = Dump::open("ipcns-var-1.img");
        cut = true;
        ::close(image);
    });
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == EXIT_FAILURE);
    CHECK(!dump.made->is_done());
    ::close(before);
}

void a_criu_that_cannot_fail_the_dump_is_ended() {
    Dump dump(true);
    const int last = Dump::write_all();
    const int status = end_of_child([&] {
        dump.made.reset(); // the child is criu now
        Dump of_child(true);
        stubborn = true;
        ::close(Dump::write_all());
    });
    ::close(last);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 16 + 7);
}

std::uint64_t size_of(int directory) {
    struct statvfs status {};
    CHECK(::fstatvfs(directory, &status) == 0);
    return status.f_blocks * status.f_frsize;
}

void what_is_put_back_has_its_place() {
    Dump dump;
    const std::uint64_t before = size_of(image_dir);
    dump.made->leave_room(::getpid(), before / 2);
    CHECK(size_of(image_dir) < before / 4 * 3);
    dump.made->leave_room(::getpid(), before);
    CHECK(size_of(image_dir) == 4096);
}

// The memory that the tasks get back may be what criu's images took.
void a_dump_that_fails_frees_the_memory_first() {
    Dump dump;
    const UniqueFd held(Dump::open("pages-1.img", sample::pattern_bytes(1 << 20)));
    struct statvfs status {};
    CHECK(::fstatvfs(held.get(), &status) == 0 && status.f_bfree < status.f_blocks);
    CHECK(dump.made->end(false));
    CHECK(::fstatvfs(held.get(), &status) == 0 && status.f_bfree == status.f_blocks);
    CHECK(size_of(image_dir) == size_of(dump.dir.fd())); // criu is led to its own again
    ::close(Dump::open("later.img"));
    CHECK(dump.dir.has("later.img"));
}

void a_child_packs_nothing() {
    Dump dump;
    const int last = Dump::write_all();
    const pid_t child = fork_child();
    if (child == 0) {
        ::close(last);
        ::_exit(dump.made->is_done() ? 1 : 0);
    }
    int status = -1;
    CHECK(::waitpid(child, &status, 0) == child && status == 0 && !dump.is_checkpoint());
    ::close(last);
    CHECK(dump.is_checkpoint());
}

void what_was_there_before_is_no_checkpoint() {
    const sample::TempDir dir;
    for (const char* name : {kInventoryImage, "pstree.img", "ids-9.img", kPackName, "core-1.img"})
        sample::write_file(dir.fd(), name, {});
    image_dir = ::dup(dir.fd());
    {
        const PackedDump dump(dir.fd(), [](int, const std::vector<std::string>&) {});
        CHECK(!dir.has(kInventoryImage) && !dir.has("pstree.img") && !dir.has("ids-9.img"));
        CHECK(!dir.has(kPackName) && dir.has("core-1.img"));
    }
    CHECK(::symlinkat("..", dir.fd(), "parent") == 0);
    CHECK_THROWS(Errc::unsupported,
                 PackedDump(dir.fd(), [](int, const std::vector<std::string>&) {}));
    ::close(image_dir);
}

} // namespace

int main() {
    the_last_close_packs();
    what_criu_could_not_write_is_not_packed();
    a_pack_that_fails_fails_the_dump();
    a_dump_that_packs_nothing_removes_nothing();
    pages_that_went_elsewhere_fail_the_dump();
    pages_that_are_in_no_image_fail_the_dump();
    a_child_packs_nothing();
    a_child_that_could_not_write_its_image_says_so();
    a_criu_that_cannot_fail_the_dump_is_ended();
    what_is_put_back_has_its_place();
    a_dump_that_fails_frees_the_memory_first();
    what_was_there_before_is_no_checkpoint();
}
