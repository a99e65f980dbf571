// SPDX-License-Identifier: Apache-2.0
#include "rank_script/criu.hpp"

#include "core/error.hpp"
#include "core/unique_fd.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <string_view>

namespace gpustasis {
namespace {

bool is_log(std::string_view path) {
    return path.ends_with("/dump.log") || path.ends_with("/restore.log");
}

} // namespace

std::string read_whole(const std::string& path) {
    const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!file)
        throw io_error("cannot open " + path, errno);
    std::string text;
    char part[4096];
    for (;;) {
        const ssize_t count = ::read(file.get(), part, sizeof part);
        if (count < 0 && errno == EINTR)
            continue;
        if (count < 0)
            throw io_error("cannot read " + path, errno);
        if (count == 0)
            return text;
        text.append(part, static_cast<std::size_t>(count));
    }
}

void tell_log(pid_t criu, const std::string& text) noexcept {
    try {
        const std::string place = "/proc/" + std::to_string(criu) + "/fd/";
        DIR* all = ::opendir(place.c_str());
        if (all == nullptr)
            return;
        const std::string line = "(00.000000) Error (rank-script): gpustasis: " + text + "\n";
        while (const dirent* entry = ::readdir(all)) { // NOLINT(concurrency-mt-unsafe)
            const std::string one = place + entry->d_name;
            char target[PATH_MAX];
            const ssize_t size = ::readlink(one.c_str(), target, sizeof target);
            if (size <= 0 || !is_log({target, static_cast<std::size_t>(size)}))
                continue;
            const UniqueFd log(::open(one.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC));
            // What cannot be written there stands on stderr.
            if (log && ::write(log.get(), line.data(), line.size()) >= 0)
                break;
        }
        ::closedir(all);
    } catch (...) { // NOLINT(bugprone-empty-catch): no memory
    }
}

} // namespace gpustasis
