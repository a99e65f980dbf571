// SPDX-License-Identifier: Apache-2.0
/// A worker with a driver that takes its time (slow_driver.cpp), for tests.
#pragma once

#include "child.hpp"
#include "sample.hpp"

#include "cuda_plugin/proc.hpp"
#include "cuda_plugin/worker.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <optional>
#include <string>
#include <utility>

namespace sample {

using namespace gpustasis;

/// A worker and what it needs.
struct Rig {
    explicit Rig(OnOrphaned on_orphaned, std::string driver = SLOW_DRIVER)
        : table(on_orphaned),
          dir(::open(images.path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)),
          lineage(dir.get()), undo_images(lineage) {
        config.driver = std::move(driver);
        config.nvml = "/nonexistent/libnvidia-ml.so.1";
        worker.emplace(config, table, undo_images);
    }
    Config config;
    SharedTaskTable table;
    TempDir images;
    UniqueFd dir;
    Lineage lineage;
    UndoImages undo_images;
    std::optional<Worker> worker;
};

/// Ours by now: its parent has ended, and this process takes what is left behind. 0: none is there.
inline pid_t find_worker() {
    std::ifstream children("/proc/self/task/" + std::to_string(::getpid()) + "/children");
    for (pid_t pid = 0; children >> pid;)
        if (proc::comm(pid) == "gpustasis-work" && proc::state(pid) != 'Z')
            return pid;
    return 0;
}

/// For workers that are started meanwhile: the driver has a call that takes its time.
class Slow {
public:
    Slow(const char* variable, const char* milliseconds, const char* state = "0")
        : variable_(variable) {
        ::setenv(variable, milliseconds, 1);
        ::setenv("SLOW_DRIVER_STATE", state, 1);
        ::setenv("SLOW_DRIVER_MARK", dir_.path("mark").c_str(), 1);
    }
    Slow(const Slow&) = delete;
    Slow& operator=(const Slow&) = delete;
    ~Slow() {
        for (const char* name : {variable_, "SLOW_DRIVER_STATE", "SLOW_DRIVER_MARK"})
            ::unsetenv(name);
    }
    /// Whether that call has begun.
    bool is_in_it() const { return ::access(dir_.path("mark").c_str(), F_OK) == 0; }

private:
    TempDir dir_;
    const char* variable_;
};

/// A process that does nothing until it is killed.
class Bystander : public Child {
public:
    bool dies_within(int milliseconds) const {
        for (int waited = 0; waited <= milliseconds; ++waited) {
            siginfo_t info{};
            if (::waitid(P_PID, static_cast<id_t>(pid()), &info, WEXITED | WNOHANG | WNOWAIT) ==
                    0 &&
                info.si_pid == pid())
                return true;
            ::poll(nullptr, 0, 1);
        }
        return false;
    }
};

/// A variable of the driver's, for workers that are started meanwhile.
class Variable {
public:
    Variable(const char* name, const std::string& value) : name_(name) {
        ::setenv(name, value.c_str(), 1);
    }
    Variable(const Variable&) = delete;
    Variable& operator=(const Variable&) = delete;
    ~Variable() { ::unsetenv(name_); }

private:
    const char* name_;
};

} // namespace sample
