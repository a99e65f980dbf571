// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/tree_files.hpp"

#include "cuda_plugin/host.hpp"

#include <exception>
#include <string>
#include <utility>

namespace gpustasis {

template <class Body>
void TreeFiles::guarded(const Body& body) noexcept {
    try {
        if (!failed_)
            body();
    } catch (const std::exception& e) {
        failed_ = true;
        host::warn(std::string("the files that the tasks have mapped are not recorded: ") +
                   e.what());
    }
}

// Files that cannot be looked at are counted, each time: so once.
void TreeFiles::look_at(MappedFiles& files, pid_t task) {
    if (done_.insert(task).second)
        files.add(task);
}

void TreeFiles::look_at_others(SharedTaskTable& cuda_tasks) noexcept {
    if (std::exchange(looked_, true))
        return;
    guarded([&] {
        files_.emplace(tasks_.front());
        for (const pid_t task : tasks_)
            if (cuda_tasks.find(task) == nullptr)
                look_at(*files_, task);
    });
}

std::optional<Requirements> TreeFiles::with(std::span<const pid_t> tasks) noexcept {
    std::optional<Requirements> found;
    guarded([&] {
        for (const pid_t task : tasks)
            look_at(*files_, task);
        found = files_->result();
        format::check_requirements(*found, Errc::bad_argument);
    });
    return failed_ ? std::nullopt : found;
}

} // namespace gpustasis
