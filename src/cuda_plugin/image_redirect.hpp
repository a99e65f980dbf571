// SPDX-License-Identifier: Apache-2.0
/// Where criu writes and reads images. An interface of our own: how criu is led elsewhere may change.
#pragma once

#include "core/unique_fd.hpp"

#include <cstdint>

namespace gpustasis {

/// As long as it lives, criu's image directory is another one, in memory.
class ImageRedirect {
public:
    /// `real`: criu's own image directory; it outlives this. `memory`: the other one. Throws Error: io.
    ImageRedirect(int real, UniqueFd memory);
    ImageRedirect(const ImageRedirect&) = delete;
    ImageRedirect& operator=(const ImageRedirect&) = delete;
    /// criu's is the real one again, unless criu has closed it.
    ~ImageRedirect();

    int memory() const noexcept { return memory_.get(); }
    /// Whether `fd` is a file in there.
    bool holds(int fd) const noexcept;

private:
    int real_;
    UniqueFd memory_;
    std::uint64_t device_ = 0;
};

} // namespace gpustasis
