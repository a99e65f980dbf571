// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/policy.hpp"

#include "core/error.hpp"
#include "core/trusted_directory.hpp"
#include "cuda_plugin/config_keys.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

namespace gpustasis {
namespace {

constexpr std::uint64_t kMaxBytes = 64 << 10;
// What concerns one container only; the driver, and what a restore goes by, are the host's.
constexpr std::array<std::string_view, 9> kKeys = {"compress",     "cpu_memory",      "externalize",
                                                   "found_locked", "incremental",     "layout",
                                                   "parent",       "lock_timeout_ms", "threads"};

UniqueFd open_policies(const std::string& base, IfMissing missing) {
    return open_trusted(base, {"gpustasis", "policy"}, missing);
}

void require_container(const toml::table& table, const std::string& path, const std::string& id) {
    const toml::table* container = table["container"].as_table();
    if (container == nullptr)
        throw Error(Errc::bad_argument, path + ": has no table [container]");
    if ((*container)["id"].value_exact<std::string>() != id)
        throw Error(Errc::bad_argument, path + ": is the policy of another container");
}

void set_policy(Config& config, toml::table table, const std::string& path) {
    table.erase("container");
    for (const auto& [key, node] : table)
        if (std::ranges::find(kKeys, key.str()) == kKeys.end())
            throw Error(Errc::bad_argument,
                        path + ": a policy cannot set \"" + std::string(key.str()) + "\"");
    set_keys(config, path, table);
}

} // namespace

std::string PolicyDirectory::path(const std::string& name) const {
    return base_ + "/gpustasis/policy/" + name;
}

std::string PolicyDirectory::apply(Config& config, const std::vector<std::string>& ids) const {
    if (ids.empty())
        return {};
    const UniqueFd directory = open_policies(base_, IfMissing::nothing);
    std::string found;
    for (const std::string& id : ids) {
        if (!directory)
            break;
        const std::string file = path(id + ".toml");
        const std::string text = read_trusted(directory.get(), id + ".toml", file, kMaxBytes);
        if (text.empty())
            continue;
        if (!found.empty())
            throw Error(Errc::bad_argument, file + " and " + path(found + ".toml") +
                                                ": the task's cgroups name both containers");
        toml::table table = parse_toml(text, file);
        require_container(table, file, id);
        set_policy(config, std::move(table), file);
        found = id;
    }
    return found;
}

void PolicyDirectory::mark_checkpointed(const std::string& id) const {
    const UniqueFd directory = open_policies(base_, IfMissing::make);
    const std::string name = id + ".checkpointed";
    const UniqueFd mark(::openat(directory.get(), name.c_str(),
                                 O_WRONLY | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC,
                                 S_IRUSR | S_IWUSR));
    if (!mark)
        throw io_error("cannot make " + path(name), errno);
}

} // namespace gpustasis
