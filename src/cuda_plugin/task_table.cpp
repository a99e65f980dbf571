// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/task_table.hpp"

#include "core/error.hpp"

#include <sys/mman.h>

#include <cerrno>
#include <new>
#include <string>

namespace gpustasis {

SharedTaskTable::SharedTaskTable(OnOrphaned on_orphaned) {
    void* memory = ::mmap(nullptr, sizeof(TaskTable), PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        throw io_error("cannot map the table of tasks", errno);
    // Fresh shared memory is zero, which is what every member starts as: records are constructed
    // one by one in add(), so that an empty table costs one page.
    table_ = static_cast<TaskTable*>(memory);
    table_->on_orphaned = on_orphaned;
}

SharedTaskTable::~SharedTaskTable() {
    ::munmap(table_, sizeof(TaskTable));
}

TaskRecord& SharedTaskTable::add(pid_t pid) {
    const std::size_t count = table_->task_count;
    if (count == TaskTable::kMaxTasks)
        throw Error(Errc::unsupported,
                    "more than " + std::to_string(TaskTable::kMaxTasks) + " CUDA tasks in a tree");
    auto* record = new (&table_->tasks[count]) TaskRecord;
    record->pid = pid;
    table_->task_count = count + 1;
    return *record;
}

void SharedTaskTable::refuse_same_image(pid_t pid, std::uint32_t image_pid) const {
    for (std::size_t i = 0; i < table_->task_count; ++i)
        if (const TaskRecord& other = table_->tasks[i]; other.image_pid == image_pid)
            throw Error(Errc::unsupported,
                        "processes " + std::to_string(other.pid) + " and " + std::to_string(pid) +
                            " use CUDA and both have pid " + std::to_string(image_pid) +
                            " in their pid namespaces: checkpoint them in separate dumps");
}

TaskRecord* SharedTaskTable::find(pid_t pid) noexcept {
    for (std::size_t i = 0; i < table_->task_count; ++i)
        if (table_->tasks[i].pid == pid)
            return &table_->tasks[i];
    return nullptr;
}

} // namespace gpustasis
