// SPDX-License-Identifier: Apache-2.0
/// Descriptors with low numbers, which are criu's.
#pragma once

#include <vector>

namespace gpustasis {

/// While one lives, whatever this process opens gets a number of at least kFirst (a quarter of the
/// limit, if that is less): for what stays open while criu forks the tasks. In a task criu moves its
/// own descriptors to the end of the first 128 numbers, or of more if the task has more, one after
/// the other. One that it has yet to move may lie there only if criu had few numbers left below:
/// it would be lost. Not for a process in which other threads open files.
class LowDescriptors {
public:
    static constexpr int kFirst = 256;

    /// Takes all that are free. Throws Error: io.
    LowDescriptors();
    LowDescriptors(const LowDescriptors&) = delete;
    LowDescriptors& operator=(const LowDescriptors&) = delete;
    ~LowDescriptors();

private:
    std::vector<int> taken_; ///< ascending
};

} // namespace gpustasis
