// SPDX-License-Identifier: Apache-2.0
#include "core/checkpoint_search.hpp"

#include "core/lineage.hpp"
#include "core/manifest.hpp"

#include <fcntl.h>

#include <exception>
#include <filesystem>
#include <utility>

namespace gpustasis {
namespace {

bool is_checkpoint(int directory, const Id& id) noexcept {
    try {
        return read_manifest(directory).checkpoint_id == id;
    } catch (const std::exception&) {
        return false;
    }
}

UniqueFd open_if_right(const std::filesystem::path& place, const Id& id) {
    UniqueFd directory(::open(place.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    return directory && is_checkpoint(directory.get(), id) ? std::move(directory) : UniqueFd();
}

} // namespace

UniqueFd find_checkpoint(const Id& id, const std::string& root) {
    const std::filesystem::path top = root;
    const std::string name = id_text(id);
    if (UniqueFd found = open_if_right(top / "checkpoints" / name, id))
        return found;
    std::error_code error;
    for (std::filesystem::directory_iterator at(top / "containers", error), end;
         !error && at != end; at.increment(error))
        if (UniqueFd found = open_if_right(at->path() / name, id))
            return found;
    return {};
}

std::string searched_places(const std::string& root) {
    return root + "/checkpoints and " + root + "/containers/*";
}

} // namespace gpustasis
