// SPDX-License-Identifier: Apache-2.0
/// What the user asked for: one TOML file. docs/operating.md explains every key.
#pragma once

#include "core/direct_io.hpp"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace gpustasis {

/// Automatic: unless this is a machine where they are known to cost more (huge_pages.hpp).
enum class HugePages : std::uint8_t { automatic, on, off };

/// Who stores the memory of tasks that is not the GPU's. Automatic: this plugin, where there is much of it
/// and this kernel and this criu allow it.
enum class CpuMemory : std::uint8_t { criu, ours, automatic };

/// What becomes of GPU memory that the driver has staged in a task, once an image holds it: CRIU must not dump it as
/// well. Automatic: kept where that is possible and all of the tree fits into memory at once, else dropped.
enum class Staging : std::uint8_t {
    drop, ///< taken out of the task
    keep, ///< left there, and hidden from CRIU
    automatic
};

/// How GPU memory leaves a task. Automatic: handed over where the driver does that (CUDA 13.4 and later), else staged.
enum class GpuMemory : std::uint8_t {
    staged, ///< by way of host memory of the task
    direct, ///< handed over to this plugin, which copies it to and from the GPUs itself
    automatic
};

/// How CRIU's images are kept: as CRIU makes them, or packed into one file of ours.
enum class Layout : std::uint8_t {
    automatic, ///< packed if the checkpoint is sealed, so that CRIU's images are as well; else criu
    criu,
    packed
};

/// One entry of gpu_map: what was on one GPU goes to another. Each is named by its UUID, or by its
/// number in the checkpoint (from) or on this machine (to).
struct GpuMapEntry {
    std::string from;
    std::string to;
};

/// What `risk` may name: findings that stop a dump unless it does (findings.hpp).
namespace risk {
inline constexpr const char* kManagedMemory = "managed-memory";
inline constexpr const char* kNccl = "nccl";
inline constexpr const char* kIpc = "ipc";
inline constexpr const char* kMemory = "memory";
inline constexpr const char* kClearImages = "clear-images"; ///< of a dump with `recipients`
} // namespace risk

/// Where the images of a dump go first, and how much of that there is.
struct ArenaConfig {
    bool is_used = false;                      ///< key tier = "disk" | "ram"
    std::string path = "/run/gpustasis/arena"; ///< key arena
    std::uint64_t limit = 0;    ///< key arena_limit: bytes; 0: half of the host's memory
    std::uint64_t pool = 0;     ///< key arena_pool: bytes kept for files to come; 0: automatic
    bool waits = false;         ///< key when_full = "refuse" | "wait"
    std::uint32_t wait_s = 300; ///< key when_full_timeout_s
};

struct Config {
    bool externalize = true; ///< false: the staged memory stays in CRIU's own images
    GpuMemory gpu_memory = GpuMemory::staged;    ///< of a dump; a restore does as the image says
    Staging staging = Staging::drop;             ///< of a dump
    CpuMemory cpu_memory = CpuMemory::criu;      ///< of a dump
    Layout layout = Layout::automatic;           ///< of a dump
    ArenaConfig arena;                           ///< of a dump
    bool compress = true;                        ///< key compress = "lz4" | "none"
    unsigned threads = 0;                        ///< 0: as many as processors; at most 1024
    std::uint32_t chunk_size = 0;                ///< bytes; 0: the format's default
    IoMode io = IoMode::automatic;               ///< key io = "auto" | "buffered" | "direct"
    HugePages huge_pages = HugePages::automatic; ///< asked for before staged memory is refilled
    std::string
        parent; ///< directory of the checkpoint to build on; relative to the image directory
    bool check_parent = false;     ///< key parent_check = "index" | "data"
    bool incremental = false;      ///< of a container: build on the newest that its store has
    std::uint32_t max_chain = 100; ///< checkpoints to build on, at most; 1..65535
    std::vector<std::string>
        recipients; ///< of a dump: certificates that it is sealed for; none: it is not
    std::string
        private_key;  ///< of a restore: a file, or "fd:<number>"; empty: it opens nothing sealed
    std::string sign; ///< of a dump: a private key that signs it; empty: nothing does
    std::string sign_certificate; ///< of that key; empty: it stands in the same file
    std::vector<std::string>
        trusted; ///< of a restore: certificates of those who may have signed; none: nobody need have
    bool require_guard = false; ///< key guard = "auto" | "require"
    bool dump_locked = false;   ///< key found_locked = "refuse" | "dump": a task that others locked
    unsigned parallel_gpus =
        0; ///< tasks that the driver works in at once; 0: as many as there are GPUs or processors
    std::uint32_t lock_timeout_ms = 10'000;    ///< for submitted GPU work to drain; not 0
    std::uint32_t driver_timeout_ms = 600'000; ///< for any other driver call; not 0
    std::vector<GpuMapEntry> gpu_map;          ///< of a restore
    std::vector<std::string> risk;             ///< of a dump: findings that do not stop it
    bool ignore_requirements = false; ///< key requirements = "check" | "ignore"; of a restore
    std::string driver = "libcuda.so.1";
    std::string nvml = "libnvidia-ml.so.1";
    std::string source; ///< the files read, the one that wins last; or "defaults"

    /// Whether CRIU's images are put into one file.
    bool is_packed() const noexcept {
        return layout == Layout::packed || (layout == Layout::automatic && !recipients.empty() &&
                                            !has_risk(risk::kClearImages));
    }
    bool has_risk(std::string_view name) const noexcept {
        return std::ranges::find(risk, name) != risk.end();
    }
};

/// Read the file `path`. Throws Error: io if it cannot be read, bad_argument for bad TOML, an
/// unknown key or a value out of range; what() names the file, the key and the value.
Config read_config(const std::string& path);

/// Set what the file `path` says, which is another source of `config` from then on. Of `parent` and
/// `incremental`, which are two answers to one question, the later one holds. Throws as read_config.
void set_from_file(Config& config, const std::string& path);

/// Name and value of an option that criu was given for this plugin.
using PluginOptions = std::vector<std::pair<std::string, std::string>>;

/// Sets what a container's policy says.
using SetPolicy = std::function<void(Config&)>;

/// Later wins: the defaults; /etc/gpustasis/config.toml, if it exists and no other file is named;
/// `set_policy`; the file that the option `config`, else the environment's GPUSTASIS_CONFIG, names;
/// the file that GPUSTASIS_OVERRIDES names; the other options, which are keys. Throws as read_config.
Config find_config(const PluginOptions& options, const SetPolicy& set_policy = {});

/// Set what `options` say, but for `config`. Throws Error: bad_argument.
void set_options(Config& config, const PluginOptions& options);

} // namespace gpustasis
