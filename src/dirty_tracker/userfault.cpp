// SPDX-License-Identifier: Apache-2.0
#include "dirty_tracker/userfault.hpp"

#include "core/error.hpp"
#include "dirty_tracker/injection.hpp"

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>

#include <cerrno>
#include <string>

namespace gpustasis {
namespace {

constexpr std::uint64_t kFeaturePagefaultFlagWp = 1U << 0;
constexpr std::uint64_t kFeatureWpHugetlbfsShmem = 1U << 12;
constexpr std::uint64_t kFeatureWpUnpopulated = 1U << 13;
constexpr std::uint64_t kFeatureWpAsync = 1U << 15;
constexpr std::uint64_t kUserModeOnly = 1; // the process needs no privilege; see below

// Faults are never handled by anybody, so it does not matter that those of the kernel could not be.
constexpr std::uint64_t kFlags = O_CLOEXEC | O_NONBLOCK | kUserModeOnly;

UniqueFd make_here() {
    UniqueFd fd(static_cast<int>(::syscall(SYS_userfaultfd, kFlags)));
    if (!fd && errno == ENOSYS)
        throw Error(Errc::unsupported, "this kernel has no userfaultfd");
    if (!fd)
        throw io_error("userfaultfd", errno);
    return fd;
}

} // namespace

Userfault::Userfault(const AddressSpace& space)
    : fd_(space.pid() == ::getpid() ? make_here()
                                    : make_descriptor_in(space, SYS_userfaultfd, kFlags)) {
    uffdio_api api{};
    api.api = UFFD_API;
    api.features = kFeaturePagefaultFlagWp | kFeatureWpHugetlbfsShmem | kFeatureWpUnpopulated |
                   kFeatureWpAsync;
    if (::ioctl(fd_.get(), UFFDIO_API, &api) != 0)
        throw errno == EINVAL
            ? Error(Errc::unsupported, "this kernel's userfaultfd cannot write-protect "
                                       "asynchronously (Linux 6.7 and later can)")
            : io_error("UFFDIO_API", errno);
}

bool Userfault::add(std::uint64_t start, std::uint64_t end) {
    uffdio_register range{};
    range.range = {.start = start, .len = end - start};
    range.mode = UFFDIO_REGISTER_MODE_WP;
    if (::ioctl(fd_.get(), UFFDIO_REGISTER, &range) == 0)
        return true;
    // ENOMEM: its address space is no more, or it has as many mappings as it may have.
    if (errno == EBUSY || errno == EPERM || errno == EINVAL || errno == ENOMEM)
        return false;
    throw io_error("UFFDIO_REGISTER", errno);
}

void Userfault::remove(std::uint64_t start, std::uint64_t end) noexcept {
    uffdio_range range{.start = start, .len = end - start};
    ::ioctl(fd_.get(), UFFDIO_UNREGISTER, &range);
}

} // namespace gpustasis
