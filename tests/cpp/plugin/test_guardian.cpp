// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"
#include "core/error.hpp"
#include "core/image_writer.hpp"
#include "core/lineage.hpp"
#include "core/manifest.hpp"
#include "core/process_memory.hpp"
#include "cuda_plugin/guardian.hpp"
#include "sample.hpp"
#include "tracee/proc.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstddef>
#include <fstream>
#include <string>

using namespace gpustasis;

namespace {

constexpr std::size_t kSize = 1 << 20;

/// A task of a dump, this process, whose image the directory does not hold.
struct Rig {
    Rig()
        : dir(::open(images.path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)),
          lineage(dir.get()), undo_images(lineage),
          pages(UniqueFd(static_cast<int>(::syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK)))),
          record(table->tasks[0]) {
        record.pid = ::getpid();
        record.image_pid = 1;
        record.start_time = proc::start_time(::getpid());
    }
    /// Its image, of memory of this process.
    void write() {
        auto* bytes = static_cast<std::byte*>(
            ::mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        ImageInfo info;
        info.pid = 1;
        info.start_time = record.start_time;
        info.boot_id = proc::boot_id();
        info.regions = {{reinterpret_cast<std::uint64_t>(bytes), kSize, PROT_READ | PROT_WRITE,
                         RegionKind::private_anonymous}};
        ProcessMemory self(::getpid());
        const WriteResult written =
            write_image(dir.get(), image_name(1), info, self, {.threads = 1});
        record.digest = written.digest;
        record.checkpoint_id = info.checkpoint_id;
    }
    void start() { start_guardians(record, *table, pages, undo_images, 1); }

    sample::TempDir images;
    UniqueFd dir;
    Lineage lineage;
    UndoImages undo_images;
    MissingPages pages;
    SharedTaskTable table{OnOrphaned::undo};
    TaskRecord& record;
};

/// How many guardians are left to this process, which has become their parent. Those that have ended
/// are taken away.
int guardians_left() {
    while (::waitpid(-1, nullptr, WNOHANG | __WALL) > 0)
        ;
    const std::string self = std::to_string(::getpid());
    std::ifstream children("/proc/self/task/" + self + "/children");
    int count = 0;
    for (pid_t pid = 0; children >> pid;)
        count += proc::comm(pid) == kGuardianName ? 1 : 0;
    return count;
}

void wait_for_guardians(int count) {
    for (int i = 0; guardians_left() != count; ++i) {
        CHECK(i < 1000);
        ::poll(nullptr, 0, 10);
    }
}

void one_that_cannot_start_says_why_at_once() {
    Rig rig;
    const auto before = std::chrono::steady_clock::now();
    std::string why;
    try {
        rig.start();
    } catch (const Error& e) {
        CHECK(e.code() == Errc::io);
        why = e.what();
    }
    CHECK(std::chrono::steady_clock::now() - before < std::chrono::seconds(20));
    CHECK(why.find("a guardian of dropped memory does not start: ") == 0);
    CHECK(why.find(image_name(1)) != std::string::npos);
    CHECK(!rig.record.guarded);
    wait_for_guardians(0);
}

void both_hold_on_until_the_pages_are_back() {
    Rig rig;
    rig.write();
    rig.start();
    CHECK(rig.record.guarded && is_guarded(rig.record));
    for (const auto& guardian : rig.record.guardians) // as who stops criu's service does
        for (const int signal : {SIGTERM, SIGHUP, SIGINT})
            CHECK(::kill(guardian, signal) == 0);
    ::poll(nullptr, 0, 100);
    CHECK(guardians_left() == TaskRecord::kGuardians);
    rig.record.refilled = true;
    wait_for_guardians(0);
}

} // namespace

int main() {
    CHECK(::prctl(PR_SET_CHILD_SUBREAPER, 1) == 0);
    one_that_cannot_start_says_why_at_once();
    both_hold_on_until_the_pages_are_back();
}
