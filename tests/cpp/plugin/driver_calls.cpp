// SPDX-License-Identifier: Apache-2.0
// Calls one implementation of Driver, for tests/python/test_driver_implementations.py:
//
//     driver_calls library|worker CUDA NVML CALL...
//
// CALL is name:pid[:timeout_ms]. What each answers is a line: "ok", "ok NUMBER", or "refused
// CUresult TEXT".
#include "core/error.hpp"
#include "cuda_plugin/driver_library.hpp"
#include "cuda_plugin/worker.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <optional>
#include <string>
#include <vector>

using namespace gpustasis;

namespace {

std::vector<std::string> split(const std::string& text) {
    std::vector<std::string> parts{""};
    for (const char c : text) {
        if (c == ':')
            parts.emplace_back();
        else
            parts.back() += c;
    }
    return parts;
}

std::string call(Driver& driver, const std::vector<std::string>& words) {
    const std::string& name = words.at(0);
    const int pid = words.size() > 1 ? std::stoi(words[1]) : 0;
    if (name == "version")
        return "ok " + std::to_string(driver.api_version());
    if (name == "is_emulator")
        return driver.is_emulator() ? "ok 1" : "ok 0";
    if (name == "state")
        return "ok " + std::to_string(static_cast<int>(driver.state(pid)));
    if (name == "restore_thread") {
        const std::optional<int> tid = driver.restore_thread(pid);
        return tid ? "ok " + std::to_string(*tid) : "ok";
    }
    if (name == "init")
        driver.initialize();
    else if (name == "lock")
        driver.lock(pid, static_cast<std::uint32_t>(std::stoul(words.at(2))));
    else if (name == "checkpoint")
        driver.checkpoint(pid);
    else if (name == "restore")
        driver.restore(pid, {});
    else if (name == "unlock")
        driver.unlock(pid);
    else
        return "unknown";
    return "ok";
}

void run(Driver& driver, const std::vector<std::string>& calls) {
    for (const std::string& words : calls) {
        std::string answer;
        try {
            answer = call(driver, split(words));
        } catch (const DriverError& refused) {
            answer = "refused " + std::to_string(static_cast<int>(refused.result())) + " " +
                     refused.what();
        }
        std::printf("%s\n", answer.c_str());
        std::fflush(stdout);
    }
}

} // namespace

int main(int argc, char** argv) {
    if (argc < 5)
        return 2;
    const std::string kind = argv[1];
    const std::vector<std::string> calls(argv + 4, argv + argc);
    try {
        if (kind == "library") {
            DriverLibrary library(argv[2], argv[3]);
            run(library, calls);
            return 0;
        }
        Config config;
        config.driver = argv[2];
        config.nvml = argv[3];
        SharedTaskTable table(OnOrphaned::undo);
        const UniqueFd directory(::open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
        Lineage lineage(directory.get());
        UndoImages images(lineage);
        Worker worker(config, table, images);
        run(worker, calls);
        worker.stop();
        return 0;
    } catch (const std::exception& e) {
        std::fprintf(stderr, "%s\n", e.what());
        return 1;
    }
}
