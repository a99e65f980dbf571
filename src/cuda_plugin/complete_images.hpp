// SPDX-License-Identifier: Apache-2.0
/// When the images of a dump in CRIU's own layout are complete.
#pragma once

#include "cuda_plugin/import_slot.hpp"

#include <sys/types.h>

#include <functional>
#include <optional>

namespace gpustasis {

/// CRIU has a child of its own write the images of each kind of namespace. Its bclose() notes only in the child's own
/// memory that the last bytes could not be written, and criu asks nothing but its exit status: ends such a child with
/// a failure.
void end_cut_child() noexcept;

/// Calls somebody when criu has closed the last of its images: before it runs its scripts for a complete dump, and
/// while it can still let the tasks run on.
class CompleteImages {
public:
    /// What `then` throws lets the dump fail.
    using Then = std::function<void()>;

    /// Before criu writes its inventory. At most one of them lives. `image_dir` outlives it, and holds
    /// no inventory of an earlier dump. Throws Error: unsupported if this criu does not allow it; io.
    CompleteImages(int image_dir, Then then);
    CompleteImages(const CompleteImages&) = delete;
    CompleteImages& operator=(const CompleteImages&) = delete;
    ~CompleteImages();

private:
    static int close_of_criu(int fd) noexcept;
    void look() noexcept;
    bool is_complete() const;

    int image_dir_;
    Then then_;
    pid_t process_; ///< criu, and none of its children
    std::optional<ImportSlot> slot_;
    bool tried_ = false;
    bool is_cut_ =
        false; ///< an image of criu itself, and not of a child: that one goes on, say to unlock the network
};

} // namespace gpustasis
