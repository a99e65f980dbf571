// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/image_redirect.hpp"

#include "core/error.hpp"
#include "cuda_plugin/host.hpp"

#include <sys/stat.h>

#include <cerrno>
#include <utility>

namespace gpustasis {

ImageRedirect::ImageRedirect(int real, UniqueFd memory) : real_(real), memory_(std::move(memory)) {
    struct stat status {};
    if (::fstat(memory_.get(), &status) != 0)
        throw io_error("cannot examine a directory in memory", errno);
    device_ = status.st_dev;
    host::set_image_dir(memory_.get());
}

ImageRedirect::~ImageRedirect() {
    try {
        // When criu has closed it, its number may be another file's.
        if (holds(host::image_dir()))
            host::set_image_dir(real_);
    } catch (const Error& e) {
        host::warn(e.what());
    }
}

bool ImageRedirect::holds(int fd) const noexcept {
    struct stat status {};
    return fd >= 0 && ::fstat(fd, &status) == 0 && status.st_dev == device_;
}

} // namespace gpustasis
