// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/policy.hpp"

#include "core/error.hpp"
#include "core/file.hpp"
#include "core/trusted_directory.hpp"
#include "cuda_plugin/config_keys.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <string_view>
#include <utility>

namespace gpustasis {
namespace {

constexpr std::uint64_t kMaxBytes = 64 << 10;
// What concerns one container only; the driver, and what a restore goes by, are the host's.
constexpr std::array<std::string_view, 8> kKeys = {"compress",        "cpu_memory", "externalize",
                                                   "incremental",     "layout",     "parent",
                                                   "lock_timeout_ms", "threads"};

UniqueFd open_policies(const std::string& base, IfMissing missing) {
    return open_trusted(base, {"gpustasis", "policy"}, missing);
}

/// Empty if it is not there: a policy never is.
std::string read_text(int directory, const std::string& name, const std::string& path) {
    const UniqueFd file(
        ::openat(directory, name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    if (!file && errno == ENOENT)
        return {};
    if (!file && errno == ELOOP)
        throw Error(Errc::bad_argument, path + " is a symbolic link");
    if (!file)
        throw io_error("cannot open " + path, errno);
    struct stat status {};
    if (::fstat(file.get(), &status) != 0)
        throw io_error("cannot examine " + path, errno);
    if (!S_ISREG(status.st_mode))
        throw Error(Errc::bad_argument, path + " is no regular file");
    require_trusted(file.get(), path);
    const std::uint64_t size = file_size(file.get());
    if (size == 0 || size > kMaxBytes)
        throw Error(Errc::bad_argument, path + " has " + std::to_string(size) +
                                            " bytes: a policy has 1 to " +
                                            std::to_string(kMaxBytes));
    std::string text(size, '\0');
    read_at(file.get(), 0, std::as_writable_bytes(std::span(text)));
    return text;
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
        const std::string text = read_text(directory.get(), id + ".toml", file);
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
