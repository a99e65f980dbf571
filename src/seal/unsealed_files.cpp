// SPDX-License-Identifier: Apache-2.0
#include "seal/unsealed_files.hpp"

#include "core/error.hpp"
#include "core/file.hpp"
#include "seal/errors.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

namespace gpustasis::seal {
namespace {

constexpr std::uint64_t kSecond = 1'000'000'000; // ns
constexpr mode_t kOwnerOnly = 0600;

UniqueFd open_file(int dir, const SealedEntry& entry, int flags) {
    UniqueFd fd(::openat(dir, entry.name.c_str(),
                         flags | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, kOwnerOnly));
    if (!fd)
        throw io_error("cannot open " + entry.name, errno);
    return fd;
}

void make(int dir, const SealedEntry& entry) {
    const UniqueFd made = open_file(dir, entry, O_WRONLY | O_CREAT | O_EXCL);
    if (::ftruncate(made.get(), static_cast<off_t>(entry.size)) != 0)
        throw io_error("cannot make " + entry.name, errno);
}

void finish(int dir, const SealedEntry& entry) {
    const UniqueFd fd = open_file(dir, entry, O_WRONLY);
    const timespec when{static_cast<time_t>(entry.mtime_ns / kSecond),
                        static_cast<long>(entry.mtime_ns % kSecond)};
    const std::array<timespec, 2> times{when, when};
    if (::fchmod(fd.get(), entry.mode) != 0 || ::futimens(fd.get(), times.data()) != 0 ||
        ::fsync(fd.get()) != 0)
        throw io_error("cannot finish " + entry.name, errno);
}

} // namespace

void extract_sealed(const SealedReader& sealed, int dir, unsigned threads,
                    const SealProgress& tell) {
    for (const SealedEntry& entry : sealed.entries())
        writing([&] { make(dir, entry); });
    const auto put = [&](std::size_t file, std::uint64_t offset, Bytes bytes) {
        writing([&] {
            const UniqueFd fd = open_file(dir, sealed.entries()[file], O_WRONLY);
            write_at(fd.get(), offset, bytes);
        });
    };
    sealed.read_all(put, threads, tell);
    for (const SealedEntry& entry : sealed.entries())
        writing([&] { finish(dir, entry); });
}

void compare_sealed(const SealedReader& sealed, int dir, unsigned threads,
                    const SealProgress& tell) {
    for (const SealedEntry& entry : sealed.entries())
        if (file_size(open_file(dir, entry, O_RDONLY).get()) != entry.size)
            throw Error(Errc::corrupt_data, entry.name + " has another size than it has sealed");
    const auto compare = [&](std::size_t file, std::uint64_t offset, Bytes bytes) {
        const SealedEntry& entry = sealed.entries()[file];
        const UniqueFd fd = open_file(dir, entry, O_RDONLY);
        std::vector<std::byte> plain;
        try {
            plain = read_part(fd.get(), offset, bytes.size());
        } catch (const Error& error) {
            throw Error(error, "cannot read " + entry.name + ": " + error.what());
        }
        const bool same = same_bytes(plain, bytes);
        wipe(plain);
        if (!same)
            throw Error(Errc::corrupt_data, entry.name + " is not what was sealed of it");
    };
    sealed.read_all(compare, threads, tell);
}

} // namespace gpustasis::seal
