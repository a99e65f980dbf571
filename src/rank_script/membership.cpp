// SPDX-License-Identifier: Apache-2.0
#include "rank_script/membership.hpp"

#include "core/container_id.hpp"
#include "core/error.hpp"
#include "core/trusted_directory.hpp"
#include "core/unique_fd.hpp"
#include "tracee/proc.hpp"

#include <vector>

#define TOML_EXCEPTIONS 1
// Without streams, which would be most of the program.
#define TOML_ENABLE_FORMATTERS 0
#define TOML_FLOAT_CHARCONV 1
#include <toml++/toml.h>

namespace gpustasis {
namespace {

constexpr std::uint64_t kMaxBytes = 64 << 10; // as python/gpustasis/policy.py writes at most

std::optional<Membership> membership_of(const std::string& text, const std::string& path,
                                        const std::string& id) {
    try {
        const toml::table policy = toml::parse(text, path);
        if (!policy["container"]["rank"].is_table())
            return std::nullopt;
        const auto job = policy["container"]["rank"]["job"].value_exact<std::string>();
        const auto rank = policy["container"]["rank"]["rank"].value_exact<std::int64_t>();
        if (!job || !rank || policy["container"]["id"].value_exact<std::string>() != id)
            throw Error(Errc::bad_argument, path + " is no policy of container " + id);
        return Membership{id, *job, std::to_string(*rank)};
    } catch (const toml::parse_error& e) {
        throw Error(Errc::bad_argument, path + " is no TOML: " + std::string(e.description()));
    }
}

} // namespace

std::optional<Membership> find_membership(pid_t pid, Way way) {
    const std::string task = proc::read_file("/proc/" + std::to_string(pid) + "/cgroup");
    const std::string own = way == Way::dump ? proc::read_file("/proc/self/cgroup") : "";
    const std::vector<std::string> ids = container_ids(task, own);
    if (ids.empty())
        return std::nullopt;
    const UniqueFd policies = open_trusted("/run", {"gpustasis", "policy"}, IfMissing::nothing);
    for (const std::string& id : ids) {
        if (!policies)
            break;
        const std::string name = id + ".toml";
        const std::string path = "/run/gpustasis/policy/" + name;
        const std::string text = read_trusted(policies.get(), name, path, kMaxBytes);
        if (text.empty())
            continue;
        if (auto found = membership_of(text, path, id))
            return found;
    }
    return std::nullopt;
}

} // namespace gpustasis
