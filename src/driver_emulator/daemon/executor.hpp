// SPDX-License-Identifier: Apache-2.0
/// Runs kernel launches one after the other, in a thread of its own.
#pragma once

#include "driver_emulator/wire.hpp"

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

namespace gpustasis::emulator {

/// One launch, ready to run.
struct Launch {
    std::uint64_t sequence = 0;
    void (*run)(const unsigned char*, const unsigned int*, const unsigned int*) = nullptr;
    unsigned int grid[3] = {};
    unsigned int block[3] = {};
    std::vector<unsigned char> params;
    Result refused = Result::success; ///< do not run: this is what is wrong with it
};

class Executor {
public:
    /// `page` must outlive the process: the thread is never joined.
    explicit Executor(CompletionPage& page);

    void submit(Launch launch);

private:
    [[noreturn]] void run_all();
    void finish(std::uint64_t sequence);

    CompletionPage& page_;
    std::mutex mutex_;
    std::condition_variable arrived_;
    std::deque<Launch> queue_;
    std::thread thread_;
};

} // namespace gpustasis::emulator
