// SPDX-License-Identifier: Apache-2.0
/// layout = "packed" of one dump: CRIU writes its images into memory, and one file holds them at the end.
#pragma once

#include "core/file_pack.hpp"
#include "cuda_plugin/image_redirect.hpp"
#include "cuda_plugin/import_slot.hpp"
#include "cuda_plugin/memory_room.hpp"

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace gpustasis {

/// Packs when criu has closed the last of its images: that is before it runs its scripts for a complete dump,
/// and while it can still let the tasks run on.
class PackedDump {
public:
    /// Packs the files `names` of `directory`. Nothing of an earlier dump is there any more that it would replace: of a
    /// dump that fails from here on, pack and sealed file are removed. Throws Error: the dump must fail.
    using Pack = std::function<void(int directory, const std::vector<std::string>& names)>;

    /// Before criu writes an image. At most one of them lives. `image_dir` outlives it. Throws Error:
    /// unsupported if this criu, or what it was asked for, does not allow it; io.
    PackedDump(int image_dir, Pack pack);
    PackedDump(const PackedDump&) = delete;
    PackedDump& operator=(const PackedDump&) = delete;
    ~PackedDump();

    /// `bytes` that are in no memory now may have to be put back into task `pid` while criu's images are in memory.
    /// How much these may take is found anew, as things are now. Before criu writes an image. Throws Error: io.
    void leave_room(pid_t pid, std::uint64_t bytes);

    /// Whether all is packed.
    bool is_done() const noexcept { return done_; }

    /// The dump is over. Of one that has not `succeeded` nothing is left that looks like a checkpoint, and the memory
    /// that criu's images took is free. False: it has, and nothing is packed.
    bool end(bool succeeded) noexcept;

private:
    static int close_of_criu(int fd) noexcept;
    void look() noexcept;
    void pack();
    void withdraw() noexcept;
    void drop_images() noexcept;

    int image_dir_;
    Pack pack_;
    MemoryLimit limit_;
    pid_t process_;                           ///< criu, and none of its children
    std::unique_ptr<ImageRedirect> redirect_; ///< until all is over
    std::optional<ImportSlot> slot_;
    bool tried_ = false;
    bool is_cut_ = false; ///< an image of criu itself
    bool began_to_pack_ = false;
    bool done_ = false;
};

} // namespace gpustasis
