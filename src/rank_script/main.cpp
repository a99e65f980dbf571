// SPDX-License-Identifier: Apache-2.0
/// CRIU's action script: a container that is a rank of a job is dumped, killed and let run only as its job has
/// decided. CRIU runs it at each of its steps (docs/jobs.md), for whatever is dumped on this host: where there
/// is nothing to ask it ends at once. Status 0: criu goes on.
#include "core/error.hpp"
#include "rank_script/membership.hpp"
#include "rank_script/talk.hpp"

#include <poll.h>
#include <unistd.h>

#include <array>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string_view>
#include <utility>

namespace gpustasis {
namespace {

constexpr int kAgainMs = 100;

/// holds: the tasks stand by now, and what has become of them may be decided already.
struct Step {
    std::string_view action;
    Way way;
    bool holds;
};

constexpr std::array<Step, 4> kSteps = {{
    {"pre-dump", Way::dump, false},
    {"post-dump", Way::dump, true},
    {"post-restore", Way::restore, false},
    {"pre-resume", Way::restore, true},
}};

const Step* find_step() {
    const char* action = std::getenv("CRTOOLS_SCRIPT_ACTION"); // NOLINT(concurrency-mt-unsafe)
    for (const Step& step : kSteps)
        if (action != nullptr && step.action == action)
            return &step;
    return nullptr;
}

/// 0: criu has not said it.
pid_t root_task() {
    const char* text = std::getenv("CRTOOLS_INIT_PID"); // NOLINT(concurrency-mt-unsafe)
    pid_t pid = 0;
    if (text != nullptr) {
        const std::string_view digits(text);
        std::from_chars(digits.data(), digits.data() + digits.size(), pid);
    }
    return pid;
}

std::string image_directory() {
    const char* text = std::getenv("CRTOOLS_IMAGE_DIR"); // NOLINT(concurrency-mt-unsafe)
    return text == nullptr ? "" : text;
}

/// Supervisors tell all that they have started to end: only a decision, or criu's end, ends this.
void ignore_signals() {
    for (const int number : {SIGHUP, SIGINT, SIGQUIT, SIGALRM, SIGTERM, SIGUSR1, SIGUSR2, SIGPIPE})
        std::signal(number, SIG_IGN);
}

/// What a script says lies in CRIU's log, which is what an engine shows: a line as of CRIU's own.
int refuse(const std::string& text) {
    std::fprintf(stderr, "(00.000000) Error (rank-script): gpustasis: %s\n", text.c_str());
    return 1;
}

/// At `pre-resume` the tasks run when this has ended, whatever its status is: CRIU does not heed it. What cannot
/// be told there is asked again, and the tasks stand.
std::optional<Membership> membership_at(const Step& step, pid_t pid, pid_t criu) {
    for (bool told = false;; told = true) {
        try {
            return find_membership(pid, step.way);
        } catch (const Error& e) {
            const bool stands = step.way == Way::restore && step.holds && ::kill(pid, 0) == 0;
            if (!stands || ::getppid() != criu)
                throw;
            if (!told)
                refuse(std::string("the restored tasks stand until this is mended: ") + e.what());
        }
        ::poll(nullptr, 0, kAgainMs);
    }
}

int run() {
    const Step* step = find_step();
    const pid_t pid = root_task();
    if (step == nullptr || pid <= 0)
        return 0;
    ignore_signals();
    const pid_t criu = ::getppid();
    const std::string what = step->way == Way::dump ? "checkpoint" : "restore";
    std::optional<Membership> rank;
    try {
        rank = membership_at(*step, pid, criu);
    } catch (const Error& e) {
        return refuse("the " + what +
                      " is refused, since it cannot be told whether the container is a "
                      "rank of a job: " +
                      e.what());
    }
    if (!rank)
        return 0;
    const std::string name = "job " + rank->job + ", rank " + rank->rank;
    const std::string line = std::string(step->action) + " " + rank->container + " " +
                             std::to_string(pid) + " " + image_directory() + "\n";
    try {
        const Answer answer = step->holds ? ask_until_answered(line, criu) : ask(line, criu);
        return answer.go ? 0 : refuse(name + ": " + answer.reason);
    } catch (const Error& e) {
        return refuse(name + ": the " + what + " of container " + rank->container +
                      " is refused: " + e.what() +
                      "; ranks of a job are checkpointed together, through the agent of "
                      "their node: start gpustasis-agent");
    }
}

} // namespace
} // namespace gpustasis

// Nothing leaves main(). The C++ library's own would bring what tells types by name, a tenth of the program.
// NOLINTNEXTLINE(bugprone-reserved-identifier,cert-dcl37-c,cert-dcl51-cpp)
namespace __gnu_cxx {
// NOLINTNEXTLINE(bugprone-reserved-identifier,cert-dcl37-c,cert-dcl51-cpp,misc-use-internal-linkage)
void __verbose_terminate_handler() {
    std::abort();
}
} // namespace __gnu_cxx

int main() {
    try {
        return gpustasis::run();
    } catch (const std::exception& e) {
        return gpustasis::refuse(e.what());
    }
}
