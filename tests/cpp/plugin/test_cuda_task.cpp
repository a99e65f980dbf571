// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"
#include "child.hpp"
#include "sample.hpp"

#include "cuda_plugin/proc.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

using namespace gpustasis;

namespace {

void call_it(const char* name) {
    CHECK(::prctl(PR_SET_NAME, name, 0, 0, 0) == 0);
}

void map_file(const std::string& path, int protection, int sharing) {
    const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    CHECK(fd >= 0 && ::ftruncate(fd, 4096) == 0);
    CHECK(::mmap(nullptr, 4096, protection, sharing, fd, 0) != MAP_FAILED);
    ::close(fd);
}

/// As the loader maps the code of a library.
void map_library(const std::string& path) {
    map_file(path, PROT_READ | PROT_EXEC, MAP_PRIVATE);
}

void start_threads(unsigned count) {
    for (unsigned i = 0; i < count; ++i)
        std::thread([] { ::pause(); }).detach();
}

/// As the driver names its restore thread.
void name_after(int write_end, int read_end) {
    char name[16];
    std::snprintf(name, sizeof name, "cuda%011llx",
                  static_cast<unsigned long long>(write_end) << 22 |
                      static_cast<unsigned long long>(read_end));
    call_it(name);
}

void a_name_alone_makes_no_cuda_task() {
    const Child child([] { call_it("cuda-gdb"); });
    CHECK(!proc::may_use_cuda(child.pid()));
}

void a_library_alone_makes_no_cuda_task() {
    const sample::TempDir dir;
    const Child child([&] { map_library(dir.path("libcuda.so.1")); });
    CHECK(!proc::may_use_cuda(child.pid()));
}

void both_make_one() {
    const sample::TempDir dir;
    for (const char* library : {"libcuda.so.580.95.05", "libnvidia-ml.so.1"})
        for (const unsigned more_threads :
             {0U, 10U, 300U}) { // each is looked at in a way of its own
            const Child child([&] {
                map_library(dir.path(library));
                call_it("cuda00001400006");
                start_threads(more_threads);
            });
            CHECK(proc::may_use_cuda(child.pid()));
        }
}

// Of a driver whose library has another name.
void a_device_makes_one() {
    const sample::TempDir dir;
    std::filesystem::create_directory(dir.path("dev"));
    for (const unsigned more_threads : {0U, 10U, 300U}) {
        const Child child([&] {
            map_file(dir.path("dev/nvidia0"), PROT_READ | PROT_WRITE, MAP_SHARED);
            call_it("cuda00001400006");
            start_threads(more_threads);
        });
        CHECK(proc::may_use_cuda(child.pid()));
    }
}

// The mark lies anywhere in a text that is read in blocks.
void the_library_is_found_among_many_mappings() {
    const sample::TempDir dir;
    for (std::size_t padding = 0; padding < 40; ++padding) {
        const std::string name = std::string(padding + 1, 'x');
        const Child child([&] {
            for (int i = 0; i < 250; ++i)
                map_library(dir.path(name + std::to_string(i)));
            map_library(dir.path("libcuda.so.1"));
            for (int i = 0; i < 250; ++i)
                map_library(dir.path(name + std::to_string(i)));
            call_it("cuda00001400006");
        });
        CHECK(proc::may_use_cuda(child.pid()));
    }
}

void pipes_are_what_the_driver_may_open() {
    const Child child([] {
        int request[2];
        int reply[2];
        CHECK(::pipe(request) == 0 && ::pipe(reply) == 0);
        name_after(request[1], reply[0]);
    });
    proc::require_pipes_in_thread_names(child.pid());
    const Child other([] { call_it("cuda-gdb"); });
    proc::require_pipes_in_thread_names(other.pid());
    const Child closed([] { name_after(1000, 1001); });
    proc::require_pipes_in_thread_names(closed.pid());
}

void a_name_that_leads_to_a_file_is_refused() {
    const sample::TempDir dir;
    const std::string path = dir.path("file");
    CHECK(::close(::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600)) == 0);
    CHECK(::mkfifo(dir.path("fifo").c_str(), 0600) == 0);
    const std::vector<std::pair<std::string, int>> targets = {{path, O_RDONLY},
                                                              {dir.path(), O_RDONLY | O_DIRECTORY},
                                                              {"/dev/zero", O_RDONLY},
                                                              {dir.path("fifo"), O_RDWR}};
    for (const auto& [target, flags] : targets)
        for (const bool first : {true, false}) {
            const Child child([&] {
                int pipe[2];
                CHECK(::pipe(pipe) == 0);
                const int fd = ::open(target.c_str(), flags | O_CLOEXEC);
                CHECK(fd >= 0);
                name_after(first ? fd : pipe[1], first ? pipe[0] : fd);
            });
            CHECK_THROWS(Errc::unsupported, proc::require_pipes_in_thread_names(child.pid()));
        }
}

void what_has_ended_is_told_from_what_was_killed() {
    const pid_t pid = fork_child();
    if (pid == 0)
        ::_exit(3);
    siginfo_t info{};
    CHECK(::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOWAIT) == 0);
    CHECK(proc::has_exited(pid)); // a zombie
    CHECK(proc::is_exiting(pid));
    CHECK(::waitpid(pid, nullptr, 0) == pid);
    CHECK(proc::has_exited(pid)); // gone

    // A sanitizer's handler would turn the signal into an exit.
    Child child([] { CHECK(::signal(SIGSEGV, SIG_DFL) != SIG_ERR); });
    CHECK(!proc::has_exited(child.pid()));
    CHECK(!proc::is_exiting(child.pid()));
    CHECK(::kill(child.pid(), SIGSEGV) == 0);
    CHECK(::waitid(P_PID, static_cast<id_t>(child.pid()), &info, WEXITED | WNOWAIT) == 0);
    CHECK(!proc::has_exited(child.pid()));
}

} // namespace

int main() {
    a_name_alone_makes_no_cuda_task();
    a_library_alone_makes_no_cuda_task();
    both_make_one();
    a_device_makes_one();
    the_library_is_found_among_many_mappings();
    pipes_are_what_the_driver_may_open();
    a_name_that_leads_to_a_file_is_refused();
    what_has_ended_is_told_from_what_was_killed();
}
