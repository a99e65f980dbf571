#include "core/checkpoint_search.hpp"

#include "core/lineage.hpp"
#include "core/manifest.hpp"

#include <fcntl.h>

#include <exception>
#include <filesystem>

namespace cudackpt {
namespace {

UniqueFd open_if_right(const std::filesystem::path& place, const Id& id) {
    UniqueFd directory(::open(place.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    try {
        if (directory && read_manifest(directory.get()).checkpoint_id == id)
            return directory;
    } catch (const std::exception&) { // not it, whatever it is
    }
    return {};
}

} // namespace

UniqueFd find_checkpoint(const Id& id, const std::string& root) noexcept {
    try {
        const std::filesystem::path top = root;
        const std::string name = id_text(id);
        if (UniqueFd found = open_if_right(top / "checkpoints" / name, id))
            return found;
        std::error_code error;
        for (std::filesystem::directory_iterator at(top / "containers", error), end;
             !error && at != end; at.increment(error))
            if (UniqueFd found = open_if_right(at->path() / name, id))
                return found;
    } catch (const std::exception&) { // no memory: then it is not found
    }
    return {};
}

std::string searched_places(const std::string& root) {
    return root + "/checkpoints and " + root + "/containers/*";
}

} // namespace cudackpt
