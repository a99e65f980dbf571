// SPDX-License-Identifier: Apache-2.0
/// Values of the configuration: what they must be, and what to say of those that are not. And the keys of the arena.
#include "core/error.hpp"
#include "cuda_plugin/config_keys.hpp"

#include <limits>
#include <ostream>
#include <sstream>
#include <utility>

namespace gpustasis {
namespace {

/// As TOML has it. toml++ prints lists and tables by functions that need libm, which criu has not loaded: each
/// process that it forks would have the mappings of one library more.
void print(std::ostream& out, const toml::node& node) {
    if (const toml::array* array = node.as_array()) {
        for (std::size_t i = 0; i < array->size(); ++i)
            print(out << (i == 0 ? "[ " : ", "), *array->get(i));
        out << (array->empty() ? "[]" : " ]");
    } else if (const toml::table* table = node.as_table()) {
        const char* before = "{ ";
        for (const auto& [key, value] : *table)
            print(out << std::exchange(before, ", ") << key.str() << " = ", value);
        out << (table->empty() ? "{}" : " }");
    } else {
        out << toml::json_formatter(node);
    }
}

} // namespace

namespace keys {

void reject(const std::string& path, std::string_view key, const toml::node& node,
            const std::string& wanted) {
    std::ostringstream text;
    text << path << ": " << key << " = ";
    print(text, node);
    text << ": must be " << wanted;
    throw Error(Errc::bad_argument, text.str());
}

std::int64_t long_number(const std::string& path, std::string_view key, const toml::node& node,
                         std::int64_t least, std::int64_t most) {
    const auto value = node.value_exact<std::int64_t>();
    if (!value || *value < least || *value > most)
        reject(path, key, node,
               "a number from " + std::to_string(least) + " to " + std::to_string(most));
    return *value;
}

std::uint32_t number(const std::string& path, std::string_view key, const toml::node& node,
                     std::int64_t least, std::int64_t most) {
    return static_cast<std::uint32_t>(long_number(path, key, node, least, most));
}

std::string text(const std::string& path, std::string_view key, const toml::node& node) {
    const auto value = node.value_exact<std::string>();
    if (!value || value->empty())
        reject(path, key, node, "a non-empty string");
    return *value;
}

} // namespace keys

bool set_arena_key(ArenaConfig& arena, const std::string& path, std::string_view key,
                   const toml::node& node) {
    constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
    constexpr std::int64_t kMostSeconds = 86'400;
    if (key == "tier") {
        const std::string word = keys::text(path, key, node);
        if (word != "disk" && word != "ram")
            keys::reject(path, key, node, "\"disk\" or \"ram\"");
        arena.is_used = word == "ram";
    } else if (key == "arena") {
        arena.path = keys::text(path, key, node);
        if (!arena.path.starts_with('/') || arena.path.find('\n') != std::string::npos)
            keys::reject(path, key, node, "the absolute path of a directory on a tmpfs");
    } else if (key == "arena_limit") {
        arena.limit = static_cast<std::uint64_t>(keys::long_number(path, key, node, 0, kMost));
    } else if (key == "arena_pool") {
        arena.pool = static_cast<std::uint64_t>(keys::long_number(path, key, node, 0, kMost));
    } else if (key == "when_full") {
        const std::string word = keys::text(path, key, node);
        if (word != "refuse" && word != "wait")
            keys::reject(path, key, node, "\"refuse\" or \"wait\"");
        arena.waits = word == "wait";
    } else if (key == "when_full_timeout_s") {
        arena.wait_s = keys::number(path, key, node, 1, kMostSeconds);
    } else {
        return false;
    }
    return true;
}

} // namespace gpustasis
