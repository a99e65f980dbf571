// SPDX-License-Identifier: Apache-2.0
/// Memory and files for tests of the image format.
#pragma once

#include "check.hpp"

#include "core/bytes.hpp"
#include "core/direct_io.hpp"
#include "core/image_info.hpp"
#include "core/memory_port.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <vector>

namespace sample {

using Buffer = std::vector<std::byte>;

/// A directory of its own that goes away with everything in it.
class TempDir {
public:
    explicit TempDir(const std::string& place = "/tmp") {
        std::string pattern = place + "/gpustasis-test-XXXXXX";
        CHECK(::mkdtemp(pattern.data()) != nullptr);
        path_ = pattern;
        fd_ = ::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        CHECK(fd_ >= 0);
    }
    TempDir(const TempDir&) = delete;
    TempDir& operator=(const TempDir&) = delete;
    ~TempDir() {
        ::close(fd_);
        const std::string command = "rm -rf -- " + path_;
        if (std::system(command.c_str()) != 0)
            std::fprintf(stderr, "cannot remove %s\n", path_.c_str());
    }
    int fd() const { return fd_; }
    std::string path(const std::string& name = {}) const { return path_ + "/" + name; }
    bool has(const std::string& name) const {
        struct stat status {};
        return ::fstatat(fd_, name.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0;
    }
    /// True if nothing is in it.
    bool empty() const { return ::unlinkat(AT_FDCWD, path_.c_str(), AT_REMOVEDIR) == 0; }

private:
    std::string path_;
    int fd_ = -1;
};

inline Buffer read_file(int dir_fd, const std::string& name) {
    const int fd = ::openat(dir_fd, name.c_str(), O_RDONLY | O_CLOEXEC);
    CHECK(fd >= 0);
    struct stat status {};
    CHECK(::fstat(fd, &status) == 0);
    Buffer bytes(static_cast<std::size_t>(status.st_size));
    CHECK(::pread(fd, bytes.data(), bytes.size(), 0) == status.st_size);
    ::close(fd);
    return bytes;
}

inline void write_file(int dir_fd, const std::string& name, gpustasis::Bytes bytes) {
    const int fd = ::openat(dir_fd, name.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    CHECK(fd >= 0);
    CHECK(::write(fd, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
    ::close(fd);
}

inline Buffer random_bytes(std::size_t size, std::uint64_t seed) {
    std::mt19937_64 generator(seed);
    Buffer bytes(size);
    for (std::size_t at = 0; at < size; at += sizeof(std::uint64_t)) {
        const std::uint64_t word = generator();
        std::memcpy(bytes.data() + at, &word, std::min(sizeof word, size - at));
    }
    return bytes;
}

/// Bytes that compress well.
inline Buffer pattern_bytes(std::size_t size) {
    Buffer bytes(size);
    for (std::size_t i = 0; i < size; ++i)
        bytes[i] = static_cast<std::byte>(i / 97 + 1);
    return bytes;
}

/// Memory by address, as a task would have it. Reading or writing elsewhere is EFAULT.
class Memory : public gpustasis::MemorySource, public gpustasis::MemorySink {
public:
    Memory() = default;
    Memory(const Memory& other) : MemorySource(), MemorySink(), runs_(other.runs_) {}

    void map(std::uint64_t address, Buffer bytes) { runs_[address] = std::move(bytes); }

    void read(std::uint64_t address, gpustasis::MutBytes out) override {
        const gpustasis::MutBytes found = find(address, out.size());
        if (!found.empty())
            std::memcpy(out.data(), found.data(), found.size());
    }
    void write(std::uint64_t address, gpustasis::Bytes bytes) override {
        const gpustasis::MutBytes found = find(address, bytes.size());
        if (!found.empty())
            std::memcpy(found.data(), bytes.data(), found.size());
    }
    void write_zeros(std::uint64_t address, std::uint64_t length) override {
        std::ranges::fill(find(address, length), std::byte{0});
    }

    /// The regions of what is mapped.
    std::vector<gpustasis::Region> regions() const {
        std::vector<gpustasis::Region> regions;
        for (const auto& [address, bytes] : runs_)
            regions.push_back({.address = address, .length = bytes.size(), .protection = 3});
        return regions;
    }
    /// The same regions, every byte of them `fill`.
    void map_like(const Memory& other, std::byte fill) {
        for (const auto& [address, bytes] : other.runs_)
            runs_[address] = Buffer(bytes.size(), fill);
    }
    bool operator==(const Memory& other) const { // by memcmp: a sanitizer looks at it as one access
        return std::ranges::equal(runs_, other.runs_, [](const auto& left, const auto& right) {
            return left.first == right.first && left.second.size() == right.second.size() &&
                   (left.second.empty() ||
                    std::memcmp(left.second.data(), right.second.data(), left.second.size()) == 0);
        });
    }

protected:
    gpustasis::MutBytes find(std::uint64_t address, std::size_t size) {
        auto after = runs_.upper_bound(address);
        if (after != runs_.begin()) {
            auto& [begin, bytes] = *std::prev(after);
            if (address - begin + size <= bytes.size())
                return gpustasis::MutBytes(bytes).subspan(address - begin, size);
        }
        throw gpustasis::io_error("memory of the test", EFAULT);
    }

private:
    std::map<std::uint64_t, Buffer> runs_;
};

/// Lends buffers of its own for what is put, but not for less than `least` bytes.
class LendingMemory : public Memory {
public:
    explicit LendingMemory(std::size_t least) : least_(least) {}
    gpustasis::MutBytes lend(std::uint64_t address, std::size_t size) override {
        if (size < least_)
            return {};
        find(address, size);
        const std::lock_guard lock(mutex_);
        return lent_.emplace(address, gpustasis::AlignedBuffer(size))
            .first->second.bytes()
            .first(size);
    }
    void put(std::uint64_t address, gpustasis::MutBytes lent) override {
        write(address, lent);
        ++puts;
        take_back(address, lent);
    }
    void take_back(std::uint64_t address, gpustasis::MutBytes lent) noexcept override {
        const std::lock_guard lock(mutex_);
        CHECK(lent_.at(address).bytes().data() == lent.data());
        lent_.erase(address);
    }
    std::size_t out() const { return lent_.size(); }
    std::atomic<unsigned> puts = 0;

private:
    const std::size_t least_;
    std::mutex mutex_;
    std::map<std::uint64_t, gpustasis::AlignedBuffer> lent_;
};

inline gpustasis::Id id_of(unsigned char byte) {
    gpustasis::Id id;
    id.fill(static_cast<std::byte>(byte));
    return id;
}

/// Every field set to something of its own.
inline gpustasis::ImageInfo info_of(const Memory& memory, std::uint32_t chunk_size = 4096) {
    return {.checkpoint_id = id_of(0x11),
            .parent_id = {},
            .pid = 4242,
            .start_time = 123456789,
            .boot_id = id_of(0x22),
            .comm = "train",
            .state_before = gpustasis::ProcessState::locked,
            .driver_api_version = 13000,
            .driver_version = "580.95.05",
            .gpus = {{.uuid = id_of(0x33), .name = "NVIDIA H200", .memory_size = 150754820096}},
            .chunk_size = chunk_size,
            .regions = memory.regions(),
            .sources = {}};
}

/// Zero, compressible and random chunks, a short last chunk (with chunks above 4 KiB), and two
/// regions that touch.
inline void map_mixture(Memory& memory) {
    Buffer bytes = pattern_bytes(12288);
    bytes.resize(20480); // zeros behind
    const Buffer noise = random_bytes(8192, 1);
    bytes.insert(bytes.end(), noise.begin(), noise.end());
    memory.map(0x7f0000000000, bytes);
    memory.map(0x7f0000007000, random_bytes(4096, 2));
    memory.map(0x7f1000000000, Buffer(8192));
}

} // namespace sample
