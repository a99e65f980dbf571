// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"
#include "child.hpp"
#include "fake_root.hpp"

#include "cuda_plugin/findings.hpp"
#include "cuda_plugin/proc.hpp"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <string>

using namespace gpustasis;
using sample::kMib;
using sample::kPid;
using sample::Root;

namespace {

std::string text_of(const std::optional<Finding>& finding) {
    CHECK(finding && finding->risk == std::string("memory"));
    return finding ? finding->text : "";
}

bool names(const std::optional<Finding>& finding, const std::string& what) {
    return text_of(finding).find(what) != std::string::npos;
}

void without_a_limit_the_host_counts() {
    const Root root;
    root.cgroups("0::/pod/job\n4:memory:/job\n");
    root.put("/cg/v2/job/memory.max", "max\n");
    root.put("/cg/v2/job/memory.current", "5\n");
    root.put("/cg/memory/job/memory.limit_in_bytes", "9223372036854771712\n");
    root.put("/cg/memory/job/memory.usage_in_bytes", "5\n");
    StagingRoom room(root.path());
    CHECK(!room.add(kPid, 960 * kMib));
    CHECK(names(room.add(kPid, kMib), "this host")); // 64 MiB are to stay free
    CHECK(!room.add(kPid, 0));                       // nothing is known of this one
}

void limits_of_every_level_count() {
    for (const bool v2 : {false, true}) {
        const Root root;
        root.cgroups(v2 ? "0::/pod/a/b\n" : "9:name=systemd:/x\n4:cpu,memory:/a/b\n0::/\n");
        const std::string base = v2 ? "/cg/v2" : "/cg/memory";
        const std::string limit = v2 ? "/memory.max" : "/memory.limit_in_bytes";
        const std::string usage = v2 ? "/memory.current" : "/memory.usage_in_bytes";
        for (const std::string level : {"", "/a", "/a/b"}) {
            StagingRoom fits(root.path());
            CHECK(!fits.add(kPid, 100 * kMib));
            root.put(base + level + limit, std::to_string(300 * kMib) + "\n");
            root.put(base + level + usage, std::to_string(200 * kMib) + "\n");
            StagingRoom room(root.path());
            CHECK(!room.add(kPid, 36 * kMib));
            CHECK(names(room.add(kPid, kMib), "cgroup " + level + "/"));
            root.put(base + level + limit, v2 ? "max\n" : "9223372036854771712\n");
        }
    }
}

void pages_of_files_can_be_given_up() {
    const Root root;
    root.cgroups("0::/pod/job\n");
    root.put("/cg/v2/job/memory.max", std::to_string(300 * kMib));
    root.put("/cg/v2/job/memory.current", std::to_string(290 * kMib));
    StagingRoom full(root.path());
    CHECK(names(full.add(kPid, kMib), "room for 10 MiB"));
    root.put("/cg/v2/job/memory.stat", "anon 5\ninactive_file " + std::to_string(100 * kMib) +
                                           "\nactive_file " + std::to_string(100 * kMib) + "\n");
    StagingRoom room(root.path());
    CHECK(!room.add(kPid, 146 * kMib));
}

void tasks_of_one_cgroup_add_up() {
    const Root root;
    root.put("/cg/v2/job/memory.max", std::to_string(264 * kMib));
    root.put("/cg/v2/job/memory.current", "0");
    for (const pid_t pid : {1, 2, 3})
        root.cgroups(pid == 2 ? "0::/pod/other\n" : "0::/pod/job\n", pid);
    StagingRoom room(root.path());
    CHECK(!room.add(1, 150 * kMib));
    CHECK(!room.add(2, 150 * kMib));
    CHECK(names(room.add(3, 150 * kMib), "stages 300 MiB"));
}

void a_thread_that_runs_answers() {
    require_answering(::getpid(), ::getpid());
}

/// Whether that process has one. The kernel names its program first, and says later where it is.
bool has_environment(pid_t pid) {
    std::ifstream file("/proc/" + std::to_string(pid) + "/environ");
    return file.peek() != std::ifstream::traits_type::eof();
}

/// A process with that environment. It has it once its program is another one.
bool comes_to_be_of_one(const char* const* environ) {
    const pid_t child = ::fork();
    if (child == 0) {
        ::execle("/bin/sleep", "sleep", "1000", nullptr, environ);
        ::_exit(1);
    }
    CHECK(comes_true([&] { return proc::comm(child) == "sleep" && has_environment(child); }));
    const bool is_one = is_of_ipc_job(child);
    CHECK(::kill(child, SIGKILL) == 0 && ::waitpid(child, nullptr, 0) == child);
    return is_one;
}

void who_is_of_an_ipc_job_says_so_in_its_environment() {
    CHECK(!is_of_ipc_job(::getpid()));
    const char* const name = "CUDA_CHECKPOINT_JOB_FILE=/y";
    for (const bool is_first : {true, false}) {
        const char* environ[] = {is_first ? name : "NOT_CUDA_CHECKPOINT_JOB_FILE=/x",
                                 is_first ? "A=B" : name, nullptr};
        CHECK(comes_to_be_of_one(environ));
    }
    const char* environ[] = {"NOT_CUDA_CHECKPOINT_JOB_FILE=/x", nullptr};
    CHECK(!comes_to_be_of_one(environ));
    Child ended;
    const pid_t pid = ended.pid();
    ended.end();
    CHECK(!is_of_ipc_job(pid));
    rlimit limit{};
    CHECK(::getrlimit(RLIMIT_NOFILE, &limit) == 0);
    const rlimit none{.rlim_cur = 0, .rlim_max = limit.rlim_max};
    CHECK(::setrlimit(RLIMIT_NOFILE, &none) == 0);
    CHECK(is_of_ipc_job(::getpid())); // nobody can tell
    CHECK(::setrlimit(RLIMIT_NOFILE, &limit) == 0);
}

} // namespace

int main() {
    who_is_of_an_ipc_job_says_so_in_its_environment();
    without_a_limit_the_host_counts();
    limits_of_every_level_count();
    pages_of_files_can_be_given_up();
    tasks_of_one_cgroup_add_up();
    a_thread_that_runs_answers();
}
