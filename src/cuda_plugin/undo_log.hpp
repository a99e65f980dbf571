// SPDX-License-Identifier: Apache-2.0
/// What a worker says when criu is gone.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>

namespace gpustasis {

/// gpustasis-undo.log: an account of what was done when nobody was there to be told. It is written in a thread of its
/// own, which ends with the process: the directory may be on storage that does not answer.
class UndoLog {
public:
    /// `image_dir` must be open as long as the process lives.
    explicit UndoLog(int image_dir) noexcept : image_dir_(image_dir) {}

    /// Without memory for the line, or a thread, it is not told: the undo goes on.
    void operator()(const std::string& line) noexcept;

    /// Wait until all is written, for `limit` at most.
    void finish(std::chrono::milliseconds limit);

private:
    struct Lines {
        std::mutex mutex;
        std::condition_variable changed;
        std::deque<std::string> waiting; ///< the first stays until it is written
    };

    static void write(Lines& lines, int image_dir);

    int image_dir_;
    bool is_begun_ = false; ///< the thread
    std::shared_ptr<Lines> lines_ = std::make_shared<Lines>();
};

} // namespace gpustasis
