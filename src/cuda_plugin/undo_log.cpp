// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/undo_log.hpp"

#include "core/unique_fd.hpp"
#include "cuda_plugin/worker_process.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <exception>
#include <thread>

namespace gpustasis {

void UndoLog::operator()(const std::string& line) noexcept {
    try {
        const std::lock_guard lock(lines_->mutex);
        lines_->waiting.push_back(line + "\n");
        if (!is_begun_)
            std::thread([lines = lines_, dir = image_dir_] { write(*lines, dir); }).detach();
        is_begun_ = true;
        lines_->changed.notify_all();
    } catch (const std::exception&) { // NOLINT(bugprone-empty-catch)
    }
}

void UndoLog::finish(std::chrono::milliseconds limit) {
    std::unique_lock lock(lines_->mutex);
    if (is_begun_)
        lines_->changed.wait_for(lock, limit, [&] { return lines_->waiting.empty(); });
}

void UndoLog::write(Lines& lines, int image_dir) {
    // Without a file (a full disk, a vanished directory) the undo still has to be done. Nor may a
    // FIFO that was put in its place hold it up.
    const UniqueFd file(
        ::openat(image_dir, kUndoLogName,
                 O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600));
    std::unique_lock lock(lines.mutex);
    for (;;) {
        lines.changed.wait(lock, [&] { return !lines.waiting.empty(); });
        const std::string& line = lines.waiting.front(); // others are added behind it
        lock.unlock();
        static_cast<void>(::write(file.get(), line.data(), line.size()) == 0);
        lock.lock();
        lines.waiting.pop_front();
        lines.changed.notify_all();
    }
}

} // namespace gpustasis
