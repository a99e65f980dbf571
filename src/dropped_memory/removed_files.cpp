// SPDX-License-Identifier: Apache-2.0
#include "dropped_memory/removed_files.hpp"

#include "core/error.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>

namespace gpustasis {
namespace {

bool overlaps(const Mapping& mapping, const Region& region) noexcept {
    return region.kind == RegionKind::shared_anonymous && region.address < mapping.end &&
           mapping.start < region.address + region.length;
}

} // namespace

bool maps_nameless_file(const Mapping& mapping) noexcept {
    return mapping.shared && mapping.name.starts_with('/') && mapping.name.ends_with(" (deleted)");
}

RemovedFiles::RemovedFiles(pid_t pid, const std::vector<Mapping>& maps,
                           const std::vector<Region>& regions) {
    for (const Mapping& mapping : maps) {
        if (!maps_nameless_file(mapping) || mapping.is_shared_anonymous() ||
            std::ranges::none_of(regions,
                                 [&](const Region& region) { return overlaps(mapping, region); }))
            continue;
        char place[64];
        std::snprintf(place, sizeof place, "/map_files/%llx-%llx",
                      static_cast<unsigned long long>(mapping.start),
                      static_cast<unsigned long long>(mapping.end));
        const std::string path = "/proc/" + std::to_string(pid) + place;
        File file{.fd = UniqueFd(::open(path.c_str(), O_RDONLY | O_CLOEXEC)),
                  .name = mapping.name,
                  .times = {}};
        struct stat status {};
        if (!file.fd || ::fstat(file.fd.get(), &status) != 0)
            throw io_error("cannot open " + path, errno);
        file.times = {status.st_atim, status.st_mtim};
        files_.push_back(std::move(file));
    }
}

void RemovedFiles::put_times_back() const {
    for (const File& file : files_)
        if (::futimens(file.fd.get(), file.times.data()) != 0)
            throw io_error("cannot set the times of " + file.name, errno);
}

std::string RemovedFiles::why_not_filled() const {
    for (const File& file : files_) {
        struct statfs status {};
        if (::fstatfs(file.fd.get(), &status) == 0 && status.f_blocks != 0 && status.f_bavail == 0)
            return "; the tmpfs of " + file.name + " is full";
    }
    return {};
}

} // namespace gpustasis
