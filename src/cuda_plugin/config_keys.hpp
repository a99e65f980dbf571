// SPDX-License-Identifier: Apache-2.0
/// Keys of the configuration as TOML has them: for those who read a file of them.
#pragma once

#include "cuda_plugin/config.hpp"

#include <cstdint>
#include <string>
#include <string_view>

#define TOML_EXCEPTIONS 1
#include <toml++/toml.h>

namespace gpustasis {

/// The table in `text`. Throws Error: bad_argument naming `path` and the place in it.
toml::table parse_toml(std::string_view text, const std::string& path);

/// Set every key of `table`; as of set_from_file. Throws as set_key.
void set_keys(Config& config, const std::string& path, const toml::table& table);

/// Set `key`. Throws Error: bad_argument naming `path`, if there is no such key or `node` is not
/// what it may be.
void set_key(Config& config, const std::string& path, std::string_view key, const toml::node& node);

/// The same of the keys that say where and how much of a checkpoint is kept in memory first. False: `key` is none of
/// those.
bool set_arena_key(ArenaConfig& arena, const std::string& path, std::string_view key,
                   const toml::node& node);

/// What a value must be. Each throws Error: bad_argument that names `path`, `key` and the value.
namespace keys {

/// "PATH: KEY = VALUE: must be WANTED".
[[noreturn]] void reject(const std::string& path, std::string_view key, const toml::node& node,
                         const std::string& wanted);
/// A number from `least` to `most`.
std::int64_t long_number(const std::string& path, std::string_view key, const toml::node& node,
                         std::int64_t least, std::int64_t most);
/// The same; `most` fits the result.
std::uint32_t number(const std::string& path, std::string_view key, const toml::node& node,
                     std::int64_t least, std::int64_t most);
/// A string that is not empty.
std::string text(const std::string& path, std::string_view key, const toml::node& node);

} // namespace keys

} // namespace gpustasis
