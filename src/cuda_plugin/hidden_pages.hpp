// SPDX-License-Identifier: Apache-2.0
/// Memory of tasks that criu does not dump, because an image of ours holds it already.
#pragma once

#include "core/image_info.hpp"
#include "core/unique_fd.hpp"
#include "cuda_plugin/import_slot.hpp"
#include "tracee/page_scan.hpp"

#include <sys/types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace gpustasis {

/// Nothing is done to a task. CRIU asks the kernel which pages are there, by PAGEMAP_SCAN on the
/// task's pagemap; the criu process's calls of ioctl lead here, and the answer to that one question
/// lacks what is hidden. Every other call passes unchanged, with its errno. If criu asks in another way, it
/// finds all pages, and dumps them: answered() tells.
class HiddenPages {
public:
    /// At most one of them lives. Throws Error: unsupported if this kernel lacks PAGEMAP_SCAN, or if criu's
    /// calls of ioctl cannot be led here; nothing was changed then.
    HiddenPages();
    HiddenPages(const HiddenPages&) = delete;
    HiddenPages& operator=(const HiddenPages&) = delete;
    /// criu's calls lead to the C library again.
    ~HiddenPages();

    /// Hide `regions` of task `pid`, which are of that kind of memory, beside what of it is hidden already: no two
    /// overlap. On an exception, what was hidden before still is. Throws Error: io.
    void hide(pid_t pid, MemoryKind kind, const std::vector<Region>& regions);

    /// What criu has been told of task `pid`.
    struct Answered {
        std::uint64_t scans = 0;  ///< answers that lack something
        std::uint64_t hidden = 0; ///< bytes that they lack, each counted once
        std::uint64_t wanted = 0; ///< bytes that they should lack: those of hide()
    };
    /// Of its memory of that kind.
    Answered answered(pid_t pid, MemoryKind kind) const;

private:
    struct Range {
        std::uint64_t start = 0;
        std::uint64_t end = 0;
        MemoryKind kind = MemoryKind::gpu;
        std::uint64_t told_until = 0; ///< up to where answers lacked it
        std::uint64_t told = 0;       ///< bytes of it that they lacked
    };
    struct Task {
        pid_t pid = 0;
        UniqueFd pagemap; ///< held, so that no other file gets its inode number
        std::uint64_t device = 0;
        std::uint64_t inode = 0;
        std::vector<Range> ranges{};          ///< ascending
        std::array<std::uint64_t, 2> scans{}; ///< by kind: gpu, cpu
    };

    static std::size_t place_of(MemoryKind kind) noexcept {
        return kind == MemoryKind::gpu ? 0 : 1;
    }
    static int ioctl_of_criu(int fd, unsigned long request, void* argument) noexcept;
    Task* task_of(int fd) noexcept;
    static int scan_around(int fd, PageScanArguments& asked, Task& task) noexcept;

    std::vector<Task> tasks_;
    ImportSlot slot_;
};

} // namespace gpustasis
