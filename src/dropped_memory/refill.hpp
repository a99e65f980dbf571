// SPDX-License-Identifier: Apache-2.0
/// Putting back the memory that an image holds: into a task that CRIU has restored, or into the very
/// task that it was taken out of.
#pragma once

#include "core/image_reader.hpp"
#include "core/lineage.hpp"

#include <sys/types.h>

#include <cstdint>
#include <string>

namespace gpustasis {

/// A task whose memory a dump has dropped, and the image that it was put into before.
struct DroppedTask {
    pid_t pid = 0;                ///< as this process sees it
    std::uint64_t start_time = 0; ///< field 22 of /proc/PID/stat: the pid is still this task
    Id checkpoint_id{};
    Id digest{};       ///< ImageReader::digest of the image
    std::string image; ///< its file name
};

/// The image of `task` in the directory of `lineage`, found to be the very one that the dump made, with
/// its sources attached. Throws Error: corrupt_data if it is another one, or if `task` has ended
/// and its pid is another task's; as ImageReader::open and attach_sources.
ImageReader open_dropped(const DroppedTask& task, Lineage& lineage);

/// The same of an image that was opened already, because it is sealed.
ImageReader open_dropped(const DroppedTask& task, Lineage& lineage, ImageReader image);

/// Whether no page of the task can be dropped any more, now that the dump has let go of it: its restore
/// thread, which a dump makes call madvise, waits in a call of its own again, or is gone. What is put
/// back before is lost: the thread makes that call even if the dump has died.
bool is_drop_over(pid_t pid, pid_t restore_thread) noexcept;

/// Check that the task maps every region of `image` as the image says, then put its memory back.
/// Chunks that are zero are left out where the page tables show that no page is there.
/// Throws Error: corrupt_data if a mapping differs or a chunk is damaged, io.
void refill(pid_t pid, const ImageReader& image, unsigned threads,
            const ImageReader::Progress& progress = {});

/// The same for a task whose memory was dropped. Checks before that pages which are still there, or
/// there again, hold what the image has: others are of a later time, and the image is not what the
/// task needs. Empty pages are no difference as long as others lack data: a process that was killed
/// while it put pages back leaves such pages, and a thread that reads a missing page gets one.
/// Only the program is written to that runs in the task when it begins, however long it takes. Throws Error: gone if the
/// task is another than that of the image; corrupt_data, saying where they differ; both having changed nothing; as refill().
void refill_dropped(pid_t pid, const ImageReader& image, unsigned threads,
                    const ImageReader::Progress& progress = {});

} // namespace gpustasis
