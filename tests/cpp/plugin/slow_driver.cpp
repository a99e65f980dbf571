// SPDX-License-Identifier: Apache-2.0
// A libcuda whose calls take a time: cuInit SLOW_DRIVER_INIT_MS milliseconds, Checkpoint
// SLOW_DRIVER_CHECKPOINT_MS, Restore SLOW_DRIVER_RESTORE_MS; a file SLOW_DRIVER_MARK says that one
// has begun. All succeed but cuInit, which returns SLOW_DRIVER_INIT_RESULT, and Lock where SLOW_DRIVER_MEET
// calls of it do not meet: none returns before so many are under way at once. Every process is in state
// SLOW_DRIVER_STATE, from which it moves on with SLOW_DRIVER_MOVES; a Checkpoint of pid SLOW_DRIVER_HANGS, or a
// GetState of SLOW_DRIVER_MUTE, never returns.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

namespace {

int number(const char* variable) {
    const char* text = std::getenv(variable);
    return text == nullptr ? 0 : std::atoi(text);
}

int take(const char* variable) {
    const int milliseconds = number(variable);
    if (const char* mark = std::getenv("SLOW_DRIVER_MARK"); milliseconds != 0 && mark)
        if (std::FILE* file = std::fopen(mark, "w"))
            std::fclose(file);
    std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
    return 0;
}

std::atomic<int> locking{0};
std::atomic<int> moved{-1}; // the state by now

int move_to(int state) {
    if (number("SLOW_DRIVER_MOVES") != 0)
        moved = state;
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
    return 0;
}
int cuCheckpointProcessGetRestoreThreadId(int pid, int* tid) {
    *tid = pid;
    return 0;
}
int cuCheckpointProcessGetState(int pid, int* state) {
    while (pid == number("SLOW_DRIVER_MUTE"))
        std::this_thread::sleep_for(std::chrono::hours(1));
    *state = moved >= 0 ? moved.load() : number("SLOW_DRIVER_STATE");
    return 0;
}
int cuCheckpointProcessLock(int, void*) {
    const int wanted = number("SLOW_DRIVER_MEET");
    ++locking;
    for (int waited = 0; locking < wanted; ++waited) {
        if (waited == 3'000)
            return 600; // CUDA_ERROR_NOT_READY
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return 0;
}
int cuCheckpointProcessCheckpoint(int pid, void*) {
    while (pid == number("SLOW_DRIVER_HANGS"))
        std::this_thread::sleep_for(std::chrono::hours(1));
    return take("SLOW_DRIVER_CHECKPOINT_MS");
}
int cuCheckpointProcessRestore(int, void*) {
    take("SLOW_DRIVER_RESTORE_MS");
    return move_to(1);
}
int cuCheckpointProcessUnlock(int, void*) {
    return move_to(0);
}
}
