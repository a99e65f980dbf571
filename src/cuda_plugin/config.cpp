// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/config.hpp"

#include "core/error.hpp"
#include "cuda_plugin/config_keys.hpp"
#include "cuda_plugin/nvml.hpp"
#include "seal/key_source.hpp"
#include "tracee/proc.hpp"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <limits>
#include <sstream>
#include <utility>

namespace gpustasis {
namespace {

constexpr const char* kDefaultPath = "/etc/gpustasis/config.toml";
constexpr std::int64_t kMaxThreads = 1024;
constexpr std::int64_t kMaxParallelGpus = 256;
constexpr std::int64_t kMaxChain = 65535;
constexpr std::int64_t kMaxChunkSize = std::int64_t{4} << 20;

using keys::number;
using keys::reject;
using keys::text;

bool on_or_off(const std::string& path, std::string_view key, const toml::node& node) {
    if (const auto value = node.value_exact<bool>())
        return *value;
    const auto word = node.value_exact<std::string>();
    if (word && (*word == "on" || *word == "off"))
        return *word == "on";
    reject(path, key, node, "true, false, \"on\" or \"off\"");
}

IoMode io_mode(const std::string& path, std::string_view key, const toml::node& node) {
    const std::string word = text(path, key, node);
    if (word == "auto")
        return IoMode::automatic;
    if (word == "buffered")
        return IoMode::buffered;
    if (word == "direct")
        return IoMode::direct;
    reject(path, key, node, "\"auto\", \"buffered\" or \"direct\"");
}

Staging staging(const std::string& path, std::string_view key, const toml::node& node) {
    const std::string word = text(path, key, node);
    if (word == "drop")
        return Staging::drop;
    if (word == "keep")
        return Staging::keep;
    if (word == "auto")
        return Staging::automatic;
    reject(path, key, node, "\"drop\", \"keep\" or \"auto\"");
}

GpuMemory gpu_memory(const std::string& path, std::string_view key, const toml::node& node) {
    const std::string word = text(path, key, node);
    if (word == "staged")
        return GpuMemory::staged;
    if (word == "direct")
        return GpuMemory::direct;
    if (word == "auto")
        return GpuMemory::automatic;
    reject(path, key, node, "\"staged\", \"direct\" or \"auto\"");
}

CpuMemory cpu_memory(const std::string& path, std::string_view key, const toml::node& node) {
    const std::string word = text(path, key, node);
    if (word == "criu")
        return CpuMemory::criu;
    if (word == "ours")
        return CpuMemory::ours;
    if (word == "auto")
        return CpuMemory::automatic;
    reject(path, key, node, "\"criu\", \"ours\" or \"auto\"");
}

Layout layout(const std::string& path, std::string_view key, const toml::node& node) {
    const std::string word = text(path, key, node);
    if (word == "criu")
        return Layout::criu;
    if (word == "packed")
        return Layout::packed;
    reject(path, key, node, "\"criu\" or \"packed\"");
}

HugePages huge_pages(const std::string& path, std::string_view key, const toml::node& node) {
    if (node.value_exact<std::string>() == "auto")
        return HugePages::automatic;
    if (!node.is_boolean() && node.value_exact<std::string>() != "on" &&
        node.value_exact<std::string>() != "off")
        reject(path, key, node, "\"auto\", \"on\" or \"off\"");
    return on_or_off(path, key, node) ? HugePages::on : HugePages::off;
}

/// An array of strings, or one string with commas, as an option has it.
std::vector<std::string> words(const std::string& path, std::string_view key,
                               const toml::node& node) {
    std::vector<std::string> found;
    if (const toml::array* array = node.as_array()) {
        for (const toml::node& element : *array)
            found.push_back(text(path, key, element));
        return found;
    }
    std::istringstream list(text(path, key, node));
    for (std::string word; std::getline(list, word, ',');)
        found.push_back(word);
    return found;
}

/// A number, or a UUID as nvidia-smi prints it.
bool names_a_gpu(const std::string& text) {
    const bool is_number = !text.empty() && text.size() <= 3 &&
                           text.find_first_not_of("0123456789") == std::string::npos;
    if (is_number)
        return true;
    try {
        parse_gpu_uuid(text);
        return true;
    } catch (const Error&) {
        return false;
    }
}

std::vector<GpuMapEntry> gpu_map(const std::string& path, std::string_view key,
                                 const toml::node& node) {
    std::vector<GpuMapEntry> map;
    for (const std::string& word : words(path, key, node)) {
        const std::size_t equals = word.find('=');
        GpuMapEntry entry{word.substr(0, equals),
                          equals == std::string::npos ? "" : word.substr(equals + 1)};
        if (!names_a_gpu(entry.from) || !names_a_gpu(entry.to))
            reject(path, key, node,
                   "a list of \"OLD=NEW\", each a GPU's UUID or number, not \"" + word + "\"");
        map.push_back(std::move(entry));
    }
    return map;
}

std::vector<std::string> risks(const std::string& path, std::string_view key,
                               const toml::node& node) {
    std::vector<std::string> found = words(path, key, node);
    for (const std::string& word : found)
        if (word != risk::kManagedMemory && word != risk::kNccl && word != risk::kIpc &&
            word != risk::kMemory && word != risk::kClearImages)
            reject(path, key, node,
                   "a list of \"managed-memory\", \"nccl\", \"ipc\", \"memory\" and "
                   "\"clear-images\", not \"" +
                       word + "\"");
    return found;
}

std::vector<std::string> certificates(const std::string& path, std::string_view key,
                                      const toml::node& node) {
    std::vector<std::string> found = words(path, key, node);
    for (const std::string& word : found)
        if (!word.starts_with('/'))
            reject(path, key, node,
                   "a list of absolute paths of certificates, not \"" + word + "\"");
    return found;
}

std::string absolute_path(const std::string& path, std::string_view key, const toml::node& node,
                          const std::string& what) {
    std::string name = text(path, key, node);
    if (!name.starts_with('/'))
        reject(path, key, node,
               "the absolute path of " + what +
                   "; for a token, sign the finished checkpoint with gpustasis sign");
    return name;
}

std::string private_key(const std::string& path, std::string_view key, const toml::node& node) {
    std::string name = text(path, key, node);
    if (!name.starts_with('/') && !name.starts_with(seal::kToken) && seal::key_descriptor(name) < 0)
        reject(
            path, key, node,
            "the absolute path of a private key, a \"pkcs11:\" URI, or \"fd:\" and the number of a "
            "descriptor that the key record can be read from");
    return name;
}

/// `value` as an option has it, without quotes: a number or a word.
void set_from_text(Config& config, const std::string& key, const std::string& value) {
    const std::string where = "--plugin-option=cuda_plugin." + key;
    std::int64_t parsed = 0;
    const char* end = value.data() + value.size();
    const auto [at, error] = std::from_chars(value.data(), end, parsed);
    if (error == std::errc{} && at == end)
        set_key(config, where, key, toml::value<std::int64_t>(parsed));
    else if (value == "true" || value == "false")
        set_key(config, where, key, toml::value<bool>(value == "true"));
    else
        set_key(config, where, key, toml::value<std::string>(value));
}

std::string environment(const char* name) {
    const char* value = std::getenv(name);
    return value == nullptr ? "" : value;
}

} // namespace

void set_key(Config& config, const std::string& path, std::string_view key,
             const toml::node& node) {
    constexpr std::int64_t kMaxMs = std::numeric_limits<std::int32_t>::max();
    if (key == "externalize") {
        config.externalize = on_or_off(path, key, node);
    } else if (key == "staging") {
        config.staging = staging(path, key, node);
    } else if (key == "gpu_memory") {
        config.gpu_memory = gpu_memory(path, key, node);
    } else if (key == "cpu_memory") {
        config.cpu_memory = cpu_memory(path, key, node);
    } else if (key == "layout") {
        config.layout = layout(path, key, node);
    } else if (key == "compress") {
        const std::string word = text(path, key, node);
        if (word != "lz4" && word != "none")
            reject(path, key, node, "\"lz4\" or \"none\"");
        config.compress = word == "lz4";
    } else if (key == "threads") {
        config.threads = number(path, key, node, 0, kMaxThreads);
    } else if (key == "chunk_size") {
        config.chunk_size = number(path, key, node, 4096, kMaxChunkSize);
        if ((config.chunk_size & (config.chunk_size - 1)) != 0)
            reject(path, key, node, "a power of two");
    } else if (key == "io") {
        config.io = io_mode(path, key, node);
    } else if (key == "huge_pages") {
        config.huge_pages = huge_pages(path, key, node);
    } else if (key == "parent") {
        config.parent = text(path, key, node);
    } else if (key == "parent_check") {
        const std::string word = text(path, key, node);
        if (word != "index" && word != "data")
            reject(path, key, node, "\"index\" or \"data\"");
        config.check_parent = word == "data";
    } else if (key == "incremental") {
        config.incremental = on_or_off(path, key, node);
    } else if (key == "max_chain") {
        config.max_chain = number(path, key, node, 1, kMaxChain);
    } else if (key == "recipients") {
        config.recipients = certificates(path, key, node);
    } else if (key == "private_key") {
        config.private_key = private_key(path, key, node);
    } else if (key == "sign") {
        config.sign = absolute_path(path, key, node, "a private key");
    } else if (key == "sign_certificate") {
        config.sign_certificate = absolute_path(path, key, node, "a certificate");
    } else if (key == "trusted") {
        config.trusted = certificates(path, key, node);
    } else if (key == "guard") {
        const std::string word = text(path, key, node);
        if (word != "auto" && word != "require")
            reject(path, key, node, "\"auto\" or \"require\"");
        config.require_guard = word == "require";
    } else if (key == "found_locked") {
        const std::string word = text(path, key, node);
        if (word != "refuse" && word != "dump")
            reject(path, key, node, "\"refuse\" or \"dump\"");
        config.dump_locked = word == "dump";
    } else if (key == "lock_timeout_ms") {
        config.lock_timeout_ms = number(path, key, node, 1, kMaxMs);
    } else if (key == "parallel_gpus") {
        config.parallel_gpus = number(path, key, node, 0, kMaxParallelGpus);
    } else if (key == "driver_timeout_ms") {
        config.driver_timeout_ms = number(path, key, node, 1, kMaxMs);
    } else if (key == "gpu_map") {
        config.gpu_map = gpu_map(path, key, node);
    } else if (key == "risk") {
        config.risk = risks(path, key, node);
    } else if (key == "requirements") {
        const std::string word = text(path, key, node);
        if (word != "check" && word != "ignore")
            reject(path, key, node, "\"check\" or \"ignore\"");
        config.ignore_requirements = word == "ignore";
    } else if (key == "driver") {
        config.driver = text(path, key, node);
    } else if (key == "nvml") {
        config.nvml = text(path, key, node);
    } else if (!set_arena_key(config.arena, path, key, node)) {
        throw Error(Errc::bad_argument, path + ": unknown key \"" + std::string(key) + "\"");
    }
}

toml::table parse_toml(std::string_view text, const std::string& path) {
    try {
        return toml::parse(text, path);
    } catch (const toml::parse_error& e) {
        std::ostringstream where;
        where << e.source().begin;
        throw Error(Errc::bad_argument,
                    path + ": " + std::string(e.description()) + " (" + where.str() + ")");
    }
}

void set_keys(Config& config, const std::string& path, const toml::table& table) {
    if (table.contains("parent"))
        config.incremental = false;
    if (table.contains("incremental"))
        config.parent.clear();
    for (const auto& [key, node] : table)
        set_key(config, path, key.str(), node);
    config.source = config.source.empty() ? path : config.source + ", " + path;
}

void set_from_file(Config& config, const std::string& path) {
    // Opened here first: the parser's own message for a missing file names no errno.
    if (::access(path.c_str(), R_OK) != 0)
        throw io_error("cannot read configuration " + path, errno);
    set_keys(config, path, parse_toml(proc::read_file(path), path));
}

Config read_config(const std::string& path) {
    Config config;
    set_from_file(config, path);
    return config;
}

Config find_config(const PluginOptions& options, const SetPolicy& set_policy) {
    Config config;
    const auto named = std::ranges::find(options, "config", &PluginOptions::value_type::first);
    const std::string file =
        named != options.end() ? named->second : environment("GPUSTASIS_CONFIG");
    if (file.empty() && ::access(kDefaultPath, F_OK) == 0)
        set_from_file(config, kDefaultPath);
    else if (file.empty() || set_policy)
        config.source = "defaults";
    if (set_policy)
        set_policy(config);
    if (!file.empty())
        set_from_file(config, file);
    if (const std::string overrides = environment("GPUSTASIS_OVERRIDES"); !overrides.empty())
        set_from_file(config, overrides);
    set_options(config, options);
    return config;
}

void set_options(Config& config, const PluginOptions& options) {
    for (const auto& [key, value] : options) {
        if (key == "parent")
            config.incremental = false;
        if (key == "incremental")
            config.parent.clear();
        if (key != "config")
            set_from_text(config, key, value);
    }
}

} // namespace gpustasis
