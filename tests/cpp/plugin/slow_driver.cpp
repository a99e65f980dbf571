// SPDX-License-Identifier: Apache-2.0
// A libcuda whose calls take a time: cuInit SLOW_DRIVER_INIT_MS milliseconds, Checkpoint
// SLOW_DRIVER_CHECKPOINT_MS, Restore SLOW_DRIVER_RESTORE_MS; a file SLOW_DRIVER_MARK says that one
// has begun. All succeed but cuInit, which returns SLOW_DRIVER_INIT_RESULT, and Lock where SLOW_DRIVER_MEET
// calls of it do not meet within SLOW_DRIVER_MEET_MS (3000): none returns before so many are under way at once.
// Every process is in state SLOW_DRIVER_STATE, from which it moves on with SLOW_DRIVER_MOVES; a Checkpoint or
// Restore of pid SLOW_DRIVER_HANGS, a Restore of SLOW_DRIVER_HANGS_LATER once there is a file SLOW_DRIVER_GATE,
// or a GetState of SLOW_DRIVER_MUTE, never returns; each other GetState takes SLOW_DRIVER_STATE_MS. The first
// SLOW_DRIVER_REFUSES Restores and
// SLOW_DRIVER_REFUSES_UNLOCKS Unlocks fail. Until there is a file SLOW_DRIVER_GATE, a Restore of pid SLOW_DRIVER_GATED does
// not return, which a file SLOW_DRIVER_GATE.reached says, and fails before SLOW_DRIVER_GATED_AFTER others were made; and each of pid SLOW_DRIVER_REFUSES_PID fails. The first Unlock of SLOW_DRIVER_RELAPSES fails, for that is checkpointed again;
// with SLOW_DRIVER_RELAPSE_MS so does the second, and the Restore between them takes so long.
// Each Restore of SLOW_DRIVER_REFUSES_ALWAYS fails, each but of SLOW_DRIVER_RESTORES_ONLY, and each Unlock but of
// SLOW_DRIVER_UNLOCKS_ONLY, after SLOW_DRIVER_REFUSAL_MS. With SLOW_DRIVER_IN_TURN one Checkpoint begins when the one before
// has ended. A file SLOW_DRIVER_NOTES says which Restore and Unlock were made, one a line, and with
// SLOW_DRIVER_NOTES_REFUSALS that one is refused from now on. What is refused while there is a file SLOW_DRIVER_HOLD is
// noted as held, and does not return before that file is gone. Unlock and GetState fail as long as no DriverGetVersion has
// returned.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <thread>

namespace {

int number(const char* variable) {
    const char* text = std::getenv(variable);
    return text == nullptr ? 0 : std::atoi(text);
}

bool is_gate_shut() {
    const char* gate = std::getenv("SLOW_DRIVER_GATE");
    return gate != nullptr && ::access(gate, F_OK) != 0;
}

void reach_gate() {
    if (const char* gate = std::getenv("SLOW_DRIVER_GATE"))
        if (std::FILE* file = std::fopen((std::string(gate) + ".reached").c_str(), "w"))
            std::fclose(file);
}

bool is_held() {
    const char* hold = std::getenv("SLOW_DRIVER_HOLD");
    return hold != nullptr && ::access(hold, F_OK) == 0;
}

void make_mark() {
    if (const char* mark = std::getenv("SLOW_DRIVER_MARK"))
        if (std::FILE* file = std::fopen(mark, "w"))
            std::fclose(file);
}

int take(const char* variable) {
    const int milliseconds = number(variable);
    if (milliseconds != 0)
        make_mark();
    using Clock = std::chrono::steady_clock;
    constexpr Clock::duration kStep = std::chrono::milliseconds(50);
    // A busy machine wakes it late, and it takes no longer for that. While the process is stopped, nothing is done.
    constexpr Clock::duration kStopped = 5 * kStep;
    for (Clock::duration left = std::chrono::milliseconds(milliseconds); left.count() > 0;) {
        const auto begin = Clock::now();
        std::this_thread::sleep_for(std::min(left, kStep));
        left -= std::min(Clock::now() - begin, kStopped);
    }
    return 0;
}

std::atomic<int> locking{0};
std::atomic<int> refused{0}, unlocks_refused{0}, relapses{0}, restored{0};
std::atomic<bool> is_ready{false};
std::mutex in_turn;
std::mutex states;
std::map<int, int> moved; // states by now

void note(const char* what) {
    if (const char* notes = std::getenv("SLOW_DRIVER_NOTES"))
        if (std::FILE* file = std::fopen(notes, "a")) {
            std::fprintf(file, "%s\n", what);
            std::fclose(file);
        }
}

int refuse() {
    if (std::getenv("SLOW_DRIVER_NOTES_REFUSALS") != nullptr)
        note("refuse");
    for (bool is_noted = false; is_held(); is_noted = true) {
        if (!is_noted)
            note("held");
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(number("SLOW_DRIVER_REFUSAL_MS")));
    return 304; // CUDA_ERROR_OPERATING_SYSTEM
}

int move_to(int pid, int state, const char* how) {
    const std::lock_guard<std::mutex> lock(states);
    if (number("SLOW_DRIVER_MOVES") != 0)
        moved[pid] = state;
    note(how);
    return 0;
}

} // namespace

extern "C" {
int cuInit(unsigned) {
    take("SLOW_DRIVER_INIT_MS");
    return number("SLOW_DRIVER_INIT_RESULT");
}
int cuDriverGetVersion(int* version) {
    *version = 13000;
    is_ready = true;
    return 0;
}
int cuCheckpointProcessGetRestoreThreadId(int pid, int* tid) {
    *tid = pid;
    return 0;
}
int cuCheckpointProcessGetState(int pid, int* state) {
    while (pid == number("SLOW_DRIVER_MUTE")) {
        make_mark();
        std::this_thread::sleep_for(std::chrono::hours(1));
    }
    take("SLOW_DRIVER_STATE_MS");
    const std::lock_guard<std::mutex> lock(states);
    *state = moved.contains(pid) ? moved[pid] : number("SLOW_DRIVER_STATE");
    return is_ready ? 0 : 3; // CUDA_ERROR_NOT_INITIALIZED
}
int cuCheckpointProcessLock(int, void*) {
    const int wanted = number("SLOW_DRIVER_MEET");
    const int alone_ms = number("SLOW_DRIVER_MEET_MS");
    const auto begin = std::chrono::steady_clock::now();
    ++locking;
    while (locking < wanted) {
        if (std::chrono::steady_clock::now() - begin >=
            std::chrono::milliseconds(alone_ms != 0 ? alone_ms : 3'000))
            return 600; // CUDA_ERROR_NOT_READY
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return 0;
}
int cuCheckpointProcessCheckpoint(int pid, void*) {
    while (pid == number("SLOW_DRIVER_HANGS")) {
        make_mark();
        std::this_thread::sleep_for(std::chrono::hours(1));
    }
    std::unique_lock<std::mutex> turn(in_turn, std::defer_lock);
    if (number("SLOW_DRIVER_IN_TURN") != 0)
        turn.lock();
    return take("SLOW_DRIVER_CHECKPOINT_MS");
}
int cuCheckpointProcessRestore(int pid, void*) {
    while (pid == number("SLOW_DRIVER_HANGS")) {
        make_mark();
        std::this_thread::sleep_for(std::chrono::hours(1));
    }
    while (pid == number("SLOW_DRIVER_HANGS_LATER") && !is_gate_shut())
        std::this_thread::sleep_for(std::chrono::hours(1));
    if (refused++ < number("SLOW_DRIVER_REFUSES"))
        return 304; // CUDA_ERROR_OPERATING_SYSTEM
    if (pid == number("SLOW_DRIVER_REFUSES_PID") && is_gate_shut())
        return refuse();
    if (const int only = number("SLOW_DRIVER_RESTORES_ONLY"); only != 0 && pid != only)
        return refuse();
    if (pid == number("SLOW_DRIVER_REFUSES_ALWAYS"))
        return refuse();
    take("SLOW_DRIVER_RESTORE_MS");
    if (pid == number("SLOW_DRIVER_GATED") && restored < number("SLOW_DRIVER_GATED_AFTER"))
        return 304;
    if (pid == number("SLOW_DRIVER_GATED"))
        reach_gate();
    while (pid == number("SLOW_DRIVER_GATED") && is_gate_shut())
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (pid == number("SLOW_DRIVER_RELAPSES") && relapses == 1)
        take("SLOW_DRIVER_RELAPSE_MS");
    ++restored;
    return move_to(pid, 1, "restore");
}
int cuCheckpointProcessUnlock(int pid, void*) {
    if (const int only = number("SLOW_DRIVER_UNLOCKS_ONLY"); only != 0 && pid != only)
        return refuse();
    if (pid == number("SLOW_DRIVER_RELAPSES") &&
        relapses++ < (number("SLOW_DRIVER_RELAPSE_MS") != 0 ? 2 : 1)) {
        move_to(pid, 2, "relapse");
        return 304;
    }
    if (unlocks_refused++ < number("SLOW_DRIVER_REFUSES_UNLOCKS"))
        return 304;
    return is_ready ? move_to(pid, 0, "unlock") : 3;
}
}
