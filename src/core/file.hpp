// SPDX-License-Identifier: Apache-2.0
/// Files by descriptor: whole reads and writes, and replacing a file in one durable step.
#pragma once

#include "core/bytes.hpp"
#include "core/unique_fd.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace gpustasis {

/// Open a regular file for reading; does not wait on what is not one.
/// Throws Error: io, corrupt_data if it is not a regular file.
UniqueFd open_regular(int dir_fd, const std::string& name);

/// Size in bytes. Throws Error: io.
std::uint64_t file_size(int fd);

/// Fill `out` from `offset`. Throws Error: io, corrupt_data if the file ends before.
void read_at(int fd, std::uint64_t offset, MutBytes out);

/// The `size` bytes from `offset`. The caller has checked `size`. Throws as read_at().
std::vector<std::byte> read_part(int fd, std::uint64_t offset, std::uint64_t size);

/// Write all of `bytes` at `offset`. Throws Error: io.
void write_at(int fd, std::uint64_t offset, Bytes bytes);

/// Of a file that is written, or read, from its front to its end in parts: each time one of them ends in
/// another span of this size, the medium is given work to do beside the processors.
inline constexpr std::uint64_t kAheadSpan = 16U << 20;

/// Begin to bring the spans that `size` bytes at `offset` have ended to the medium. A hint: it fails
/// silently, and sync() is needed all the same.
void begin_write_back(int fd, std::uint64_t offset, std::uint64_t size) noexcept;

/// Begin to read the span behind the one in which `size` bytes at `offset` end, if they are the first of it.
/// A hint.
void begin_read_ahead(int fd, std::uint64_t offset, std::uint64_t size) noexcept;

/// flock() `fd`, trying again for `patience_ms` (0: once). `how`: LOCK_EX or LOCK_SH. False if another
/// holds it all that time; `what` names it in errors. Throws Error: io.
bool lock_file(int fd, int how, int patience_ms, const std::string& what);

/// How long to wait for a lock that is held for a moment only: a holder that was stopped or hangs must
/// not hang others.
constexpr int kLockPatienceMs = 10'000;

/// A file that comes into being under its name only when complete. Until commit() it is called
/// ".<name>.part"; a stale one of that name is replaced. Destroyed without commit(), it is gone.
/// The caller keeps `dir_fd` open and writes one file of a name at a time.
class PartFile {
public:
    /// Throws Error: bad_argument if `name` is not a plain file name, io.
    PartFile(int dir_fd, const std::string& name);
    PartFile(const PartFile&) = delete;
    PartFile& operator=(const PartFile&) = delete;
    ~PartFile();

    /// ".<name>.part"
    static std::string part_name(const std::string& name) { return "." + name + ".part"; }

    int fd() const noexcept { return fd_.get(); }

    /// Bring what was written to the medium; nothing more comes. commit() does it where this was not
    /// called: of files that belong together, all can be synced before the first gets its name.
    /// Throws Error: io.
    void sync();

    /// Sync, rename to the name, sync the directory. On an exception neither name is left, unless
    /// an older file of the name was there and the rename was not reached. Throws Error: io.
    void commit();

private:
    int dir_fd_;
    std::string name_;
    std::string part_;
    UniqueFd fd_;
    bool synced_ = false;
    bool committed_ = false;
};

} // namespace gpustasis
