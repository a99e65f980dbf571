// SPDX-License-Identifier: Apache-2.0
// What a device, or the kernel by itself, may write to while a task stands still is left to criu:
// all memory of that task.
#include "check.hpp"
#include "sample.hpp"

#include "core/lineage.hpp"
#include "core/unique_fd.hpp"
#include "cuda_plugin/cpu_memory.hpp"
#include "cuda_plugin/cpu_memory_dump.hpp"
#include "tracee/proc.hpp"

#include <fcntl.h>
#include <linux/fuse.h>
#include <linux/io_uring.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

using namespace gpustasis;

namespace {

constexpr std::size_t kPinned = std::size_t{1} << 20;

/// A process that has done `prepare()`, and waits from then on.
class Task {
public:
    template <class Prepare>
    explicit Task(const Prepare& prepare) {
        int ends[2];
        CHECK(::pipe(ends) == 0);
        pid_ = fork_child();
        if (pid_ == 0) {
            ::close(ends[0]);
            prepare();
            CHECK(::write(ends[1], "x", 1) == 1);
            for (;;)
                ::pause();
        }
        ::close(ends[1]);
        char byte;
        CHECK(::read(ends[0], &byte, 1) == 1);
        ::close(ends[0]);
    }
    Task(const Task&) = delete;
    Task& operator=(const Task&) = delete;
    ~Task() {
        ::kill(pid_, SIGKILL);
        ::waitpid(pid_, nullptr, 0);
    }
    pid_t pid() const { return pid_; }
    std::string why() const { return why_written_by_device(pid_, read_maps_with_flags(pid_)); }

private:
    pid_t pid_ = 0;
};

/// A process with all of its threads, as criu holds it; TSan makes one.
class Held {
public:
    explicit Held(pid_t pid) : threads_(proc::threads(pid)) {
        for (const pid_t tid : threads_) {
            int status = 0;
            CHECK(::ptrace(PTRACE_SEIZE, tid, nullptr, nullptr) == 0 &&
                  ::ptrace(PTRACE_INTERRUPT, tid, nullptr, nullptr) == 0 &&
                  ::waitpid(tid, &status, __WALL) == tid && WIFSTOPPED(status));
        }
    }
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;
    ~Held() { // else nobody could wait for the process: its threads are ours until we wait for them
        for (const pid_t tid : threads_)
            ::ptrace(PTRACE_DETACH, tid, nullptr, nullptr);
    }

private:
    std::vector<pid_t> threads_;
};

UniqueFd new_ring(io_uring_params& made) {
    UniqueFd ring(static_cast<int>(::syscall(SYS_io_uring_setup, 4, &made)));
    CHECK(bool(ring));
    return ring;
}

/// Of CPU memory, prepared.
struct Dump {
    Dump() { dump.prepare(); }
    sample::TempDir dir;
    Lineage lineage{dir.fd()};
    Statistics statistics;
    Config config = [] {
        Config ours;
        ours.cpu_memory = CpuMemory::ours;
        return ours;
    }();
    DumpImages images{config, dir.fd(), lineage, statistics};
    std::optional<HiddenPages> pages;
    CpuMemoryDump dump{config, images, statistics, pages};
};

void memory_that_a_ring_has_pinned_is_left() {
    const Task task([] {
        io_uring_params made{};
        UniqueFd ring = new_ring(made);
        iovec buffer{.iov_base = ::mmap(nullptr, kPinned, PROT_READ | PROT_WRITE,
                                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0),
                     .iov_len = kPinned};
        CHECK(::syscall(SYS_io_uring_register, ring.get(), IORING_REGISTER_BUFFERS, &buffer, 1) ==
              0);
        // Another process holds the ring: nothing but VmPin tells of it.
        if (fork_child() == 0)
            for (;;)
                ::pause();
        ring = UniqueFd();
    });
    CHECK(task.why() == std::to_string(kPinned >> 10) + " kB of its memory are pinned (VmPin)");

    Dump of;
    CpuMemoryDump& dump = of.dump;
    const Statistics& statistics = of.statistics;
    dump.add(task.pid(), {});
    CHECK(!dump.take([] { CHECK(false && "nothing is stored"); },
                     [](const CpuMemoryDump::Noted&) { CHECK(false && "nothing is noted"); }));
    CHECK(statistics.cpu_memory.at(0).left_because == task.why());
    CHECK(statistics.cpu_memory.at(0).bytes == 0);
    dump.finish(true);
    CHECK(of.dir.empty());
}

/// What is stored as shared, of two tasks that have the same memory.
std::uint64_t shared_bytes_stored(bool has_ring) {
    void* const memory =
        ::mmap(nullptr, kPinned, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    std::memset(memory, 3, kPinned);
    const Task other([&] {
        io_uring_params made{};
        static UniqueFd ring;
        if (has_ring)
            ring = new_ring(made);
    });
    const Task storing([] {
        void* const own =
            ::mmap(nullptr, kPinned, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(own != MAP_FAILED);
        std::memset(own, 4, kPinned);
    });
    CHECK(::munmap(memory, kPinned) == 0);
    const Held held_storing(storing.pid()), held_other(other.pid());

    Dump of;
    CpuMemoryDump& dump = of.dump;
    const Statistics& statistics = of.statistics;
    dump.add(storing.pid(), {}); // the first one that has it stores what is shared
    dump.add(other.pid(), {});
    CHECK(dump.take([] {}, [](const CpuMemoryDump::Noted&) {}));
    CHECK(statistics.cpu_memory.at(0).left_because.empty());
    CHECK(statistics.cpu_memory.at(0).bytes >= kPinned); // its own
    CHECK((statistics.cpu_memory.at(1).left_because.find("io_uring") != std::string::npos) ==
          has_ring);
    dump.finish(false);
    return statistics.cpu_memory.at(0).shared_bytes + statistics.cpu_memory.at(1).shared_bytes;
}

void what_a_device_may_write_in_one_task_is_stored_of_no_other() {
    CHECK(shared_bytes_stored(false) > kPinned / 2); // but for what is near to addresses in use
    CHECK(shared_bytes_stored(true) == 0);
}

void a_ring_that_is_open_is_enough() {
    const Task task([] {
        io_uring_params made{};
        static const UniqueFd ring = new_ring(made);
    });
    CHECK(task.why() == "it has anon_inode:[io_uring] open");
}

void a_ring_that_is_mapped_is_enough() {
    const Task task([] {
        io_uring_params made{};
        const UniqueFd ring = new_ring(made);
        CHECK(::mmap(nullptr, made.sq_off.array, PROT_READ | PROT_WRITE, MAP_SHARED, ring.get(),
                     IORING_OFF_SQ_RING) != MAP_FAILED);
    });
    CHECK(task.why() == "it has anon_inode:[io_uring] mapped");
}

/// A file system with one file, "file", whose attributes are asked for anew each time.
class FuseServer {
public:
    explicit FuseServer(const std::string& place) {
        UniqueFd device(::open("/dev/fuse", O_RDWR | O_CLOEXEC));
        CHECK(bool(device));
        const std::string options =
            "fd=" + std::to_string(device.get()) + ",rootmode=40000,user_id=0,group_id=0";
        CHECK(::mount("test", place.c_str(), "fuse", MS_NOSUID | MS_NODEV, options.c_str()) == 0);
        pid_ = fork_child();
        if (pid_ == 0)
            for (;;)
                answer(device.get());
    }
    FuseServer(const FuseServer&) = delete;
    FuseServer& operator=(const FuseServer&) = delete;
    /// Whoever waits for an answer gets an error.
    ~FuseServer() {
        ::kill(pid_, SIGKILL);
        ::waitpid(pid_, nullptr, 0);
    }

    /// As criu does with a server that is in the tree.
    void freeze() const {
        int status = 0;
        CHECK(::kill(pid_, SIGSTOP) == 0 && ::waitpid(pid_, &status, WUNTRACED) == pid_ &&
              WIFSTOPPED(status));
    }

private:
    static constexpr std::uint64_t kFile = 2; // node

    template <class Body>
    static void reply(int device, std::uint64_t unique, const Body& body) {
        fuse_out_header head{};
        head.len = sizeof head + sizeof body;
        head.unique = unique;
        const iovec parts[] = {{.iov_base = &head, .iov_len = sizeof head},
                               {.iov_base = const_cast<Body*>(&body), .iov_len = sizeof body}};
        CHECK(::writev(device, parts, 2) == static_cast<ssize_t>(head.len));
    }

    static void fill(std::uint64_t node, fuse_attr& attributes) {
        attributes.ino = node;
        attributes.mode = node == kFile ? S_IFREG | 0600 : S_IFDIR | 0700;
        attributes.nlink = 1;
    }

    static void answer(int device) {
        std::array<char, 1 << 17> request;
        const ssize_t size = ::read(device, request.data(), request.size());
        CHECK(size >= static_cast<ssize_t>(sizeof(fuse_in_header)));
        fuse_in_header head;
        std::memcpy(&head, request.data(), sizeof head);
        switch (head.opcode) {
        case FUSE_INIT: {
            fuse_init_out made{};
            made.major = FUSE_KERNEL_VERSION;
            made.minor = FUSE_KERNEL_MINOR_VERSION;
            made.max_write = 4096;
            reply(device, head.unique, made);
            break;
        }
        case FUSE_LOOKUP: {
            fuse_entry_out found{};
            found.nodeid = kFile;
            fill(kFile, found.attr);
            reply(device, head.unique, found);
            break;
        }
        case FUSE_GETATTR: {
            fuse_attr_out found{};
            fill(head.nodeid, found.attr);
            reply(device, head.unique, found);
            break;
        }
        case FUSE_OPEN: reply(device, head.unique, fuse_open_out{}); break;
        case FUSE_FORGET: break; // wants no answer
        default: {
            const fuse_out_header refused{
                .len = sizeof refused, .error = -ENOSYS, .unique = head.unique};
            CHECK(::write(device, &refused, sizeof refused) == sizeof refused);
        }
        }
    }

    pid_t pid_ = 0;
};

void a_server_of_files_that_stands_still_is_not_waited_for() {
    const sample::TempDir dir;
    CHECK(::unshare(CLONE_NEWNS) == 0 && // what is mounted goes away with this program
          ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0);
    CHECK(::mkdirat(dir.fd(), "files", 0700) == 0);
    const std::string place = dir.path("files");
    std::optional<FuseServer> server(place);
    const Task task([&] {
        static const UniqueFd file(::open((place + "/file").c_str(), O_RDONLY | O_CLOEXEC));
        CHECK(bool(file));
    });
    server->freeze();
    const pid_t asking = fork_child();
    if (asking == 0)
        ::_exit(task.why().empty() ? 0 : 1);
    int status = -1;
    CHECK(comes_true([&] { return ::waitpid(asking, &status, WNOHANG) == asking; }));
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    server.reset(); // the task waits for it when it ends
    CHECK(::umount2(place.c_str(), MNT_DETACH) == 0);
}

} // namespace

int main() {
    memory_that_a_ring_has_pinned_is_left();
    what_a_device_may_write_in_one_task_is_stored_of_no_other();
    a_ring_that_is_open_is_enough();
    a_ring_that_is_mapped_is_enough();
    a_server_of_files_that_stands_still_is_not_waited_for();
}
