// SPDX-License-Identifier: Apache-2.0
#include "core/container_id.hpp"

#include <algorithm>
#include <optional>

namespace gpustasis {
namespace {

constexpr std::size_t kIdLength = 64;

/// What stands before the next `end` in `text`, which then begins behind it.
std::string_view take_until(std::string_view& text, char end) {
    const std::size_t at = std::min(text.find(end), text.size());
    const std::string_view taken = text.substr(0, at);
    text.remove_prefix(std::min(at + 1, text.size()));
    return taken;
}

bool is_hex(char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
}

/// Podman's pods have ids of the same form, and their containers' cgroups are below theirs:
/// "machine-libpod_pod_ID.slice", or "ID" in "libpod_parent".
bool is_pod(std::string_view above, std::string_view name) {
    return name.find("libpod_pod_") != std::string_view::npos ||
           (above == "libpod_parent" && name.size() == kIdLength);
}

/// A run of just as many hex digits as an id has: longer ones are something else.
std::optional<std::string> id_in_name(std::string_view name) {
    for (std::size_t at = 0; at < name.size();) {
        const auto* end = std::find_if_not(name.begin() + at, name.end(), is_hex);
        const std::size_t length = static_cast<std::size_t>(end - name.begin()) - at;
        if (length == kIdLength)
            return std::string(name.substr(at, length));
        at += length + 1;
    }
    return std::nullopt;
}

/// A line of a cgroup file: "NUMBER:CONTROLLERS:/PATH".
struct Hierarchy {
    std::string_view name; ///< number and controllers
    std::string_view path; ///< without the first slash
};

std::vector<Hierarchy> hierarchies(std::string_view text) {
    std::vector<Hierarchy> found;
    while (!text.empty()) {
        const std::string_view line = take_until(text, '\n');
        // Controllers may be named ("name=systemd"), but hold no slash.
        const std::size_t slash = line.find(":/");
        if (slash != std::string_view::npos)
            found.push_back({line.substr(0, slash), line.substr(slash + 2)});
    }
    return found;
}

std::optional<std::string> id_below(std::string_view path, std::string_view own) {
    bool together = true;
    for (std::string_view above, name; !path.empty(); above = name) {
        name = take_until(path, '/');
        together = together && !own.empty() && take_until(own, '/') == name;
        if (!together && !is_pod(above, name))
            if (auto id = id_in_name(name))
                return id;
    }
    return std::nullopt;
}

} // namespace

std::vector<std::string> container_ids(std::string_view task, std::string_view own) {
    const std::vector<Hierarchy> ours = hierarchies(own);
    std::vector<std::string> ids;
    for (const Hierarchy& hierarchy : hierarchies(task)) {
        const auto same = std::ranges::find(ours, hierarchy.name, &Hierarchy::name);
        if (auto id = id_below(hierarchy.path, same == ours.end() ? "" : same->path))
            ids.push_back(std::move(*id));
    }
    std::ranges::sort(ids);
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    return ids;
}

} // namespace gpustasis
