// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/arena_room.hpp"

#include "core/error.hpp"
#include "core/file.hpp"
#include "core/lineage.hpp"
#include "cuda_plugin/arena_dump.hpp"
#include "cuda_plugin/host.hpp"
#include "cuda_plugin/memory_directory.hpp"
#include "cuda_plugin/memory_room.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <fstream>
#include <limits>

namespace gpustasis {
namespace {

constexpr std::uint64_t kMargin = std::uint64_t{64} << 20; // as findings.cpp
constexpr std::uint64_t kBlock = 512;                      // of st_blocks
constexpr int kPollMs = 100;
constexpr std::uint64_t kLookAgain = std::uint64_t{256} << 20; // others take memory meanwhile

std::int64_t signed_of(std::uint64_t bytes) noexcept {
    constexpr std::uint64_t kMost = std::uint64_t{1} << 62;
    return static_cast<std::int64_t>(std::min(bytes, kMost));
}

std::string mib(std::uint64_t bytes) {
    return std::to_string(bytes >> 20) + " MiB";
}

/// Of the files in a directory of an arena.
struct Sizes {
    std::uint64_t written = 0;  ///< bytes of memory
    std::uint64_t reserved = 0; ///< bytes, by a dump that is under way
};

/// Of the directory `name`; nothing if it is gone. What is reserved by nobody any more does not count: whoever dumps holds a
/// lock on the directory.
Sizes size_in(int arena, const std::string& name) {
    const UniqueFd directory(
        ::openat(arena, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (!directory && (errno == ENOENT || errno == ENOTDIR || errno == ELOOP))
        return {};
    if (!directory)
        throw io_error("cannot open " + name + " of the arena", errno);
    Sizes sizes;
    for (const std::string& file : names_in(directory.get())) {
        struct stat status {};
        if (::fstatat(directory.get(), file.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0)
            continue; // it is gone
        sizes.written += static_cast<std::uint64_t>(status.st_blocks) * kBlock;
        if (file == kArenaReserved)
            sizes.reserved = static_cast<std::uint64_t>(status.st_size);
    }
    if (sizes.reserved != 0 && ::flock(directory.get(), LOCK_EX | LOCK_NB) == 0)
        sizes.reserved = 0;
    return sizes;
}

/// The number of kB behind `key` in a file of lines "key: number kB", in bytes; 0: there is none, or no file.
std::uint64_t kib_in(const std::string& path, const std::string& key) {
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);)
        if (line.starts_with(key + ":"))
            return std::stoull(line.substr(key.size() + 1)) << 10;
    return 0;
}

/// Remove the largest file of the pool. Returns its bytes; 0: there is none.
std::uint64_t shrink_pool(int arena) {
    const UniqueFd pool(
        ::openat(arena, kArenaPool, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (!pool)
        return 0;
    for (;;) {
        std::uint64_t most = 0;
        std::string largest;
        for (const std::string& name : names_in(pool.get())) {
            struct stat status {};
            const bool is_there =
                ::fstatat(pool.get(), name.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0;
            const std::uint64_t size = static_cast<std::uint64_t>(status.st_blocks) * kBlock;
            if (is_there && size > most) {
                most = size;
                largest = name;
            }
        }
        if (most == 0)
            return 0;
        if (::unlinkat(pool.get(), largest.c_str(), 0) == 0)
            return most;
        if (errno != ENOENT) // else another dump has just taken it
            return 0;
    }
}

/// What this process may still take of the host's memory and of its control groups.
std::uint64_t room_now() {
    std::uint64_t room = std::numeric_limits<std::uint64_t>::max();
    for (const MemoryLevel& level : memory_levels("self"))
        room = std::min(room, level.room > kMargin ? level.room - kMargin : 0);
    return room;
}

} // namespace

std::uint64_t cpu_memory_of(pid_t pid) {
    const std::string path = "/proc/" + std::to_string(pid) + "/status";
    return kib_in(path, "RssAnon") + kib_in(path, "RssShmem");
}

std::uint64_t limit_of(const ArenaConfig& config) {
    return config.limit != 0 ? config.limit : host_memory() / 2;
}

ArenaUsage usage_of(int arena, const std::string& except) {
    ArenaUsage usage;
    for (const std::string& name : names_in(arena)) {
        if (name == kArenaPool) {
            usage.pool += size_in(arena, name).written;
        } else if (name != except) {
            const Sizes sizes = size_in(arena, name);
            usage.kept += std::max(sizes.written, sizes.reserved);
            usage.promised += sizes.reserved - std::min(sizes.reserved, sizes.written);
        }
    }
    return usage;
}

// With the pool in each of the bounds: what of it is promised to another dump is nobody else's.
std::uint64_t room_for(int arena, const ArenaConfig& config, const ArenaUsage& usage,
                       const ArenaNeed& need) {
    const std::uint64_t limit = limit_of(config);
    std::uint64_t room = limit > usage.kept ? limit - usage.kept : 0;
    struct statfs system {};
    if (::fstatfs(arena, &system) != 0)
        throw io_error("cannot examine the arena", errno);
    if (system.f_blocks != 0) { // else it has no limit of its own
        const std::uint64_t available = static_cast<std::uint64_t>(system.f_bavail) *
                                        static_cast<std::uint64_t>(system.f_bsize);
        // In /run others need some of it.
        const std::uint64_t spare = std::min(kMargin, available / 16);
        const std::uint64_t with_pool = available + usage.pool;
        room = std::min(room, with_pool - std::min(with_pool, spare + usage.promised));
    }
    std::vector<MemoryLevel> of_tree;
    if (need.root != 0 && need.staged != 0)
        of_tree = memory_levels(std::to_string(need.root));
    for (const MemoryLevel& level : memory_levels("self")) {
        const bool is_shared =
            std::ranges::find(of_tree, level.place, &MemoryLevel::place) != of_tree.end();
        const std::uint64_t others = kMargin + usage.promised + (is_shared ? need.staged : 0);
        const std::uint64_t with_pool = level.room + usage.pool;
        room = std::min(room, with_pool > others ? with_pool - others : 0);
    }
    return room;
}

std::string ArenaRoom::why_not(const ArenaNeed& need) {
    const UniqueFd turn(::openat(arena_, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!turn || !lock_file(turn.get(), LOCK_EX, kLockPatienceMs, "the arena"))
        throw Error(Errc::io, "another dump has looked for room in the arena for " +
                                  std::to_string(kLockPatienceMs / 1000) + " s: try again");
    const std::string path = directory_path(arena_);
    struct stat own {};
    struct stat seen {};
    if (::fstatat(arena_, own_.c_str(), &own, AT_SYMLINK_NOFOLLOW) != 0 ||
        ::stat((path + "/" + own_).c_str(), &seen) != 0 || own.st_dev != seen.st_dev ||
        own.st_ino != seen.st_ino)
        throw Error(Errc::io, "the directory of this dump is not in " + path +
                                  " any more: was an arena mounted there meanwhile? Try again");
    const ArenaUsage usage = usage_of(arena_, own_);
    const std::uint64_t room = room_for(arena_, config_, usage, need);
    if (need.stored > room)
        return "the dump may store " + mib(need.stored) + " in " + path + ", which has room for " +
               mib(room) + ": arena_limit is " + mib(limit_of(config_)) + ", " + mib(usage.kept) +
               " of it are taken by checkpoints that are not drained, and " +
               mib(need.staged + kMargin) + " of the host's memory are to stay free";
    const UniqueFd reserved(::openat(arena_, (own_ + "/" + kArenaReserved).c_str(),
                                     O_WRONLY | O_CREAT | O_NOFOLLOW | O_CLOEXEC,
                                     S_IRUSR | S_IWUSR));
    if (!reserved || ::ftruncate(reserved.get(), static_cast<off_t>(need.stored)) != 0)
        throw io_error("cannot reserve room in the arena", errno);
    const std::lock_guard lock(mutex_);
    free_ = signed_of(room) - signed_of(usage.pool);
    is_known_ = true;
    return "";
}

void ArenaRoom::reserve(const ArenaNeed& need, bool may_wait) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(config_.wait_s);
    bool told = false;
    for (;;) {
        const std::string why = why_not(need);
        if (why.empty())
            return;
        if (!may_wait || !config_.waits)
            throw Error(Errc::unsupported,
                        why + "; drain one (gpustasis drain), or set when_full = \"wait\"");
        if (std::chrono::steady_clock::now() >= end)
            throw Error(Errc::unsupported,
                        why + "; no drain has made room in when_full_timeout_s = " +
                            std::to_string(config_.wait_s));
        if (!told)
            host::info("waiting for a drain: " + why);
        told = true;
        ::poll(nullptr, 0, kPollMs);
    }
}

// What the host lacks for a moment, as while tasks are staged, is not lost to the arena for good.
bool ArenaRoom::is_left(std::uint64_t bytes) {
    if (seen_ < bytes)
        seen_ = std::min(room_now(), std::max(bytes, kLookAgain));
    return seen_ >= bytes;
}

bool ArenaRoom::try_take(std::uint64_t bytes, std::uint64_t returned) {
    const std::lock_guard lock(mutex_);
    const std::uint64_t most = config_.pool != 0 ? config_.pool : limit_of(config_) / 2;
    if (size_in(arena_, kArenaPool).written + returned > most || free_ < signed_of(bytes) ||
        !is_left(bytes))
        return false;
    free_ -= signed_of(bytes);
    seen_ -= bytes;
    return true;
}

std::uint64_t ArenaRoom::take(std::uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    std::uint64_t of_pool = 0;
    while (free_ < signed_of(bytes) || !is_left(bytes)) {
        const std::uint64_t freed = shrink_pool(arena_);
        if (freed == 0)
            throw io_error("the arena has no room for more: " + mib(limit_of(config_)) +
                               " is its limit, and the host's memory has to last for the job",
                           ENOSPC);
        free_ += signed_of(freed);
        of_pool += freed;
    }
    free_ -= signed_of(bytes);
    seen_ -= bytes;
    return of_pool;
}

void ArenaRoom::use(std::uint64_t bytes, std::uint64_t unwritten) {
    const std::lock_guard lock(mutex_);
    used_ += bytes;
    if (used_ < kLookAgain)
        return;
    used_ = 0;
    // Until the next look: it may be less than was reserved for, where nobody knows how much it is.
    if (room_now() < bytes + std::min(unwritten, kLookAgain))
        throw io_error(
            "the host's memory has to last for the job, and not so much is left of it as "
            "was reserved in the arena",
            ENOSPC);
}

void ArenaRoom::prepare() {
    const std::lock_guard only_one(preparing_);
    if (is_known_)
        return;
    // A worker was forked before its dump reserved anything, and must leave that as it is.
    struct stat reserved {};
    if (::fstatat(arena_, (own_ + "/" + kArenaReserved).c_str(), &reserved, AT_SYMLINK_NOFOLLOW) !=
        0)
        return reserve({}, false);
    const ArenaUsage usage = usage_of(arena_, own_);
    const std::uint64_t room = room_for(arena_, config_, usage, {});
    const std::lock_guard lock(mutex_);
    free_ = signed_of(room) - signed_of(usage.pool);
    is_known_ = true;
}

void ArenaRoom::spent(std::int64_t bytes) noexcept {
    const std::lock_guard lock(mutex_);
    free_ -= bytes;
    seen_ = 0; // so much less is left of it
}

void ArenaRoom::give(std::uint64_t bytes) noexcept {
    const std::lock_guard lock(mutex_);
    free_ += signed_of(bytes);
}

} // namespace gpustasis
