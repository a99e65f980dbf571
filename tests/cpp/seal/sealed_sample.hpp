// SPDX-License-Identifier: Apache-2.0
/// A small sealed checkpoint, and its bytes, for tests.
#pragma once

#include "check.hpp"
#include "core/file.hpp"
#include "seal/sealed_reader.hpp"
#include "seal/unsealed_files.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <random>
#include <string>
#include <vector>

namespace sample {

using Buffer = std::vector<std::byte>;
using gpustasis::Bytes;
using gpustasis::UniqueFd;

/// A directory of its own, gone with this.
class Directory {
public:
    Directory() {
        std::string pattern = std::filesystem::temp_directory_path() / "gpustasis-seal-XXXXXX";
        CHECK(::mkdtemp(pattern.data()) != nullptr);
        path_ = pattern;
        fd_ = UniqueFd(::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
        CHECK(fd_);
    }
    Directory(const Directory&) = delete;
    Directory& operator=(const Directory&) = delete;
    ~Directory() { std::filesystem::remove_all(path_); }

    int fd() const { return fd_.get(); }

    void write(const std::string& name, Bytes bytes) const {
        const UniqueFd file(
            ::openat(fd(), name.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0640));
        CHECK(file);
        gpustasis::write_at(file.get(), 0, bytes);
    }
    Buffer read(const std::string& name) const {
        const UniqueFd file = gpustasis::open_regular(fd(), name);
        return gpustasis::read_part(file.get(), 0, gpustasis::file_size(file.get()));
    }
    std::vector<std::string> names() const {
        std::vector<std::string> found;
        for (const auto& item : std::filesystem::directory_iterator(path_))
            found.push_back(item.path().filename());
        std::ranges::sort(found);
        return found;
    }

private:
    std::filesystem::path path_;
    UniqueFd fd_;
};

inline Buffer noise(std::size_t size, unsigned seed) {
    std::minstd_rand random(seed);
    Buffer bytes(size);
    for (std::byte& byte : bytes)
        byte = static_cast<std::byte>(random());
    return bytes;
}

/// Some files: empty, small, of a frame, over several frames of 4096 bytes.
inline std::map<std::string, Buffer> files() {
    return {{"core-1.img", noise(100, 1)},
            {"empty.img", {}},
            {"inventory.img", noise(40, 2)},
            {"pages-1.img", noise(9000, 3)},
            {"zz", noise(4096, 4)}};
}

inline std::vector<std::string> names_of(const std::map<std::string, Buffer>& files) {
    std::vector<std::string> names;
    for (const auto& [name, bytes] : files)
        names.push_back(name);
    return names;
}

const inline gpustasis::seal::SealOptions kSmall{gpustasis::seal::kMinSealedFrame, 2};

/// files(), sealed under `key` into `to`.
inline void seal_into(const Directory& to, gpustasis::seal::FreshKey& key) {
    const Directory plain;
    for (const auto& [name, bytes] : files())
        plain.write(name, bytes);
    gpustasis::seal::write_sealed(key, plain.fd(), names_of(files()), to.fd(), kSmall);
}

/// Opened and read to its end, as unseal does.
inline void read_whole(const Directory& dir, const gpustasis::seal::DataKey& key) {
    const gpustasis::seal::SealedReader sealed(dir.fd(), gpustasis::seal::kSealedName, key);
    sealed.read_all([](std::size_t, std::uint64_t, Bytes) {}, 1);
}

} // namespace sample
