// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <unistd.h>

namespace gpustasis::emulator {

/// A descriptor that is needed for a moment (-1: none); closed at the end.
class PassingFd {
public:
    explicit PassingFd(int fd) noexcept : fd_(fd) {}
    ~PassingFd() {
        if (fd_ >= 0) {
            close(fd_);
        }
    }
    PassingFd(const PassingFd&) = delete;
    PassingFd& operator=(const PassingFd&) = delete;

    [[nodiscard]] int get() const noexcept { return fd_; }

private:
    int fd_;
};

} // namespace gpustasis::emulator
