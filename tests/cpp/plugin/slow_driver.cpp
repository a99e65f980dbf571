// SPDX-License-Identifier: Apache-2.0
// A libcuda whose calls take a time: cuInit SLOW_DRIVER_INIT_MS milliseconds, Checkpoint
// SLOW_DRIVER_CHECKPOINT_MS, Restore SLOW_DRIVER_RESTORE_MS; a file SLOW_DRIVER_MARK says that one
// has begun. All succeed but cuInit, which returns SLOW_DRIVER_INIT_RESULT. Every process is in state
// SLOW_DRIVER_STATE.
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
int cuCheckpointProcessGetState(int, int* state) {
    *state = number("SLOW_DRIVER_STATE");
    return 0;
}
int cuCheckpointProcessLock(int, void*) {
    return 0;
}
int cuCheckpointProcessCheckpoint(int, void*) {
    return take("SLOW_DRIVER_CHECKPOINT_MS");
}
int cuCheckpointProcessRestore(int, void*) {
    return take("SLOW_DRIVER_RESTORE_MS");
}
int cuCheckpointProcessUnlock(int, void*) {
    return 0;
}
}
