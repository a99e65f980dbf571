// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/requirement_check.hpp"

#include "core/error.hpp"
#include "core/file_identity.hpp"
#include "core/unique_fd.hpp"
#include "cuda_plugin/host.hpp"
#include "tracee/mapped_files.hpp"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <optional>

namespace gpustasis {
namespace {

constexpr std::size_t kShown = 8; // of the files in an error

std::string sentence(const RequiredFile& expected, const std::string& found) {
    return expected.path + " " + found + " (expected: " + identity_text(expected) + ")";
}

} // namespace

std::vector<std::string> find_changed_files(const Requirements& expected) {
    const UniqueFd root(::open("/", O_PATH | O_DIRECTORY | O_CLOEXEC));
    if (!root)
        throw io_error("cannot open /", errno);
    std::vector<std::string> differences;
    for (const RequiredFile& file : expected.files)
        if (file.place == FilePlace::host)
            if (const auto found = difference(root.get(), file.path, file))
                differences.push_back(sentence(file, *found));
    return differences;
}

std::vector<std::string> find_changed_mappings(const Requirements& expected, pid_t root,
                                               const std::vector<pid_t>& tasks) {
    const auto is_inside = [](const RequiredFile& file) { return file.place != FilePlace::host; };
    if (std::ranges::none_of(expected.files, is_inside))
        return {};
    MappedFiles mapped(root, &expected);
    for (const pid_t task : tasks)
        mapped.add(task);
    std::vector<std::string> differences;
    for (const auto& [file, error] : mapped.unreadable())
        if (is_inside(file))
            differences.push_back(sentence(file, "cannot be read: " + error));
    const Requirements found = mapped.result();
    std::uint32_t unknown = found.unrecorded;
    for (const RequiredFile& file : expected.files) {
        if (!is_inside(file))
            continue;
        const auto at = std::ranges::lower_bound(found.files, file, comes_before);
        if (at == found.files.end() || comes_before(file, *at))
            continue; // CRIU put another file there, which it had reason to: it opened that by itself
        // A limit may have kept the dump, or this, from looking into it.
        if (at->identity == FileIdentity::size && at->size == file.size) {
            unknown += file.identity == FileIdentity::size ? 0 : 1;
            continue;
        }
        if (const auto what = difference(*at, file))
            differences.push_back(sentence(file, *what));
    }
    if (unknown != 0)
        host::warn(
            std::to_string(unknown) +
            " files that the tasks have mapped could not be compared with those of the dump");
    return differences;
}

void require_unchanged(const std::function<std::vector<std::string>()>& find, bool ignore) {
    std::vector<std::string> differences;
    try {
        differences = find();
    } catch (const std::exception& e) {
        if (!ignore)
            throw;
        host::warn(std::string("ignored, as requirements = \"ignore\" says: mapped files are not "
                               "compared: ") +
                   e.what());
    }
    if (differences.empty())
        return;
    if (ignore) {
        for (const std::string& difference : differences)
            host::warn("ignored, as requirements = \"ignore\" says: " + difference);
        return;
    }
    std::string text = "files that the tasks had mapped have changed: ";
    for (std::size_t i = 0; i < std::min(differences.size(), kShown); ++i)
        text += (i == 0 ? "" : "; ") + differences[i];
    if (differences.size() > kShown)
        text += "; and " + std::to_string(differences.size() - kShown) + " more";
    throw Error(Errc::unsupported,
                text +
                    "; put back what was there, or set requirements = \"ignore\" to restore with "
                    "what is there");
}

} // namespace gpustasis
