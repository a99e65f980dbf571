// SPDX-License-Identifier: Apache-2.0
/// Files without a name that are filled through a task's mappings.
#pragma once

#include "core/image_info.hpp"
#include "core/unique_fd.hpp"
#include "tracee/task_maps.hpp"

#include <sys/types.h>

#include <array>
#include <ctime>
#include <string>
#include <vector>

namespace gpustasis {

/// Whether a file that has no name, a memfd for one, is mapped shared: by its name in /proc.
bool maps_nameless_file(const Mapping& mapping) noexcept;

/// Those that a task has mapped where an image has shared memory, without what is anonymous.
class RemovedFiles {
public:
    /// Throws Error: io.
    RemovedFiles(pid_t pid, const std::vector<Mapping>& maps, const std::vector<Region>& regions);

    /// The times of access and change that each had: to fill a file changes them. Throws Error: io.
    void put_times_back() const;

    /// "; the tmpfs of NAME is full" of the first of which that is so; or empty.
    std::string why_not_filled() const;

private:
    struct File {
        UniqueFd fd;
        std::string name;
        std::array<timespec, 2> times;
    };
    std::vector<File> files_;
};

} // namespace gpustasis
