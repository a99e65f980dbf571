// SPDX-License-Identifier: Apache-2.0
#include "seal/signed_directory.hpp"

#include "core/error.hpp"
#include "core/file.hpp"
#include "core/file_pack.hpp"
#include "core/lineage.hpp"
#include "core/trusted_directory.hpp"
#include "core/workers.hpp"
#include "seal/openssl.hpp"
#include "seal/sealed_format.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <utility>

namespace gpustasis::seal {
namespace {

constexpr std::size_t kReadSize = 1U << 20; // at once
constexpr std::array kReports = {"stats-dump", "stats-restore", "gpustasis-dump.json",
                                 "gpustasis-restore.json"};
constexpr const char* kFoundByFsck = "lost+found"; // where the directory is a file system's root

struct Found {
    std::string name;
    mode_t mode = 0;
};

/// All that is in `dir`, ascending by name.
std::vector<Found> list(int dir) {
    std::vector<Found> found;
    std::error_code error;
    std::filesystem::directory_iterator at("/proc/self/fd/" + std::to_string(dir), error);
    for (const std::filesystem::directory_iterator end; !error && at != end; at.increment(error)) {
        const std::string name = at->path().filename().string();
        struct stat status {};
        if (::fstatat(dir, name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0)
            throw io_error("cannot look at " + name, errno);
        found.push_back({name, status.st_mode});
    }
    if (error)
        throw io_error("cannot list the directory", error.value());
    std::ranges::sort(found, {}, &Found::name);
    return found;
}

bool is_beside(const Found& file) noexcept {
    return (S_ISREG(file.mode) && is_left_unsigned(file.name)) ||
           (S_ISLNK(file.mode) && file.name == kParentLink) ||
           (S_ISDIR(file.mode) && file.name == kFoundByFsck);
}

bool is_for_others(const std::string& name) noexcept {
    return name.starts_with("gpustasis-") && name.ends_with(".img") && name != kPackName;
}

/// Opens it again and again, as the same file: there may be more files than descriptors.
class SameFile {
public:
    /// Throws Error: io, corrupt_data; bad_argument if `owners` forbids it.
    SameFile(int dir, const std::string& name, Owners owners) : dir_(dir), name_(name) {
        const UniqueFd fd = open();
        status_ = examine(fd.get());
        if (!S_ISREG(status_.st_mode))
            throw Error(Errc::corrupt_data, name + " is no ordinary file");
        if (owners == Owners::own)
            require_trusted(fd.get(), name);
        if (size() > kMaxStatedSize)
            throw Error(Errc::corrupt_data, name + " has " + std::to_string(size()) + " bytes");
    }

    const std::string& name() const noexcept { return name_; }
    std::uint64_t size() const noexcept { return static_cast<std::uint64_t>(status_.st_size); }
    UniqueFd open_again() const {
        UniqueFd fd = open();
        const struct stat now = examine(fd.get());
        if (now.st_dev != status_.st_dev || now.st_ino != status_.st_ino ||
            now.st_size != status_.st_size)
            throw Error(Errc::corrupt_data, name_ + " was replaced meanwhile");
        return fd;
    }

private:
    UniqueFd open() const {
        UniqueFd fd(::openat(dir_, name_.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
        if (!fd)
            throw io_error("cannot open " + name_, errno);
        return fd;
    }
    struct stat examine(int fd) const {
        struct stat status {};
        if (::fstat(fd, &status) != 0)
            throw io_error("cannot examine " + name_, errno);
        return status;
    }

    int dir_;
    std::string name_;
    struct stat status_ {};
};

/// Files, and the pieces of them that are hashed.
class Hashing {
public:
    Hashing(int dir, Owners owners) : dir_(dir), owners_(owners) {}

    /// Its size. Throws as SameFile.
    std::uint64_t add(const std::string& name) {
        SameFile file(dir_, name, owners_);
        const std::uint64_t size = file.size();
        const std::size_t count =
            std::max<std::uint64_t>(1, size / kStatedPiece + (size % kStatedPiece != 0 ? 1 : 0));
        for (std::size_t piece = 0; piece < count; ++piece)
            jobs_.push_back({files_.size(), piece});
        files_.push_back({std::move(file), std::vector<Sha256>(count)});
        return size;
    }

    std::vector<StatedFile> hash(unsigned threads, const SignProgress& tell) {
        ProgressMeter meter(tell);
        std::atomic<std::size_t> next = 0;
        FirstFailure failure;
        run_workers(worker_count(threads, jobs_.size()), failure, [&] {
            std::vector<std::byte> buffer(kReadSize);
            for (std::size_t job = next++; job < jobs_.size() && !failure.any(); job = next++)
                hash_piece(jobs_[job], buffer, meter);
        });
        meter.finish();
        std::vector<StatedFile> stated;
        stated.reserve(files_.size());
        for (const Pieces& found : files_)
            stated.push_back(
                {found.file.name(), found.file.size(), digest_of_pieces(found.digests)});
        return stated;
    }

private:
    struct Pieces {
        SameFile file;
        std::vector<Sha256> digests;
    };
    struct Job {
        std::size_t file = 0;
        std::size_t piece = 0;
    };

    void hash_piece(const Job& job, MutBytes buffer, ProgressMeter& meter) {
        Pieces& found = files_[job.file];
        const DigestContext context(EVP_MD_CTX_new());
        if (!context)
            throw crypto_error(Errc::io, "cannot hash");
        require(EVP_DigestInit_ex(context.get(), EVP_sha256(), nullptr), "cannot hash");
        const UniqueFd fd = found.file.open_again();
        std::uint64_t at = job.piece * kStatedPiece;
        const std::uint64_t end = std::min(found.file.size(), at + kStatedPiece);
        while (at < end) {
            const MutBytes part = buffer.first(std::min<std::uint64_t>(buffer.size(), end - at));
            try {
                read_at(fd.get(), at, part);
            } catch (const Error& e) {
                throw Error(e, found.file.name() + ": " + e.what());
            }
            require(EVP_DigestUpdate(context.get(), part.data(), part.size()), "cannot hash");
            at += part.size();
            meter.add(part.size());
        }
        require(EVP_DigestFinal_ex(context.get(), raw(MutBytes(found.digests[job.piece])), nullptr),
                "cannot hash");
    }

    int dir_;
    Owners owners_;
    std::vector<Pieces> files_;
    std::vector<Job> jobs_;
};

std::vector<std::byte> read_whole(int dir, const char* name, std::size_t limit, Owners owners) {
    UniqueFd fd(::openat(dir, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    if (!fd && errno == ENOENT)
        throw Error(Errc::corrupt_data, std::string(name) + " is missing: it is not signed");
    if (!fd)
        throw io_error(std::string("cannot open ") + name, errno);
    struct stat status {};
    if (::fstat(fd.get(), &status) != 0 || !S_ISREG(status.st_mode))
        throw Error(Errc::corrupt_data, std::string(name) + " is no ordinary file");
    if (owners == Owners::own)
        require_trusted(fd.get(), name);
    const auto size = static_cast<std::uint64_t>(status.st_size);
    if (size > limit)
        throw Error(Errc::corrupt_data,
                    std::string(name) + " is longer than " + std::to_string(limit) + " bytes");
    return read_part(fd.get(), 0, size);
}

void write_whole(int dir, const char* name, Bytes bytes) {
    PartFile file(dir, name);
    write_at(file.fd(), 0, bytes);
    if (::fchmod(file.fd(), S_IRUSR | S_IWUSR) != 0)
        throw io_error(std::string("cannot make ") + name, errno);
    file.commit();
}

} // namespace

bool is_left_unsigned(const std::string& name) noexcept {
    return name.ends_with(".log") || name.ends_with(".pid") || name == kEnvelopeName ||
           name == kStatementName || name == kSignatureName ||
           std::ranges::find(kReports, std::string_view(name)) != kReports.end();
}

Statement make_statement(int dir, const std::optional<Sha256>& parent, unsigned threads,
                         const SignProgress& tell) {
    start_openssl();
    Hashing files(dir, Owners::any);
    for (const Found& file : list(dir)) {
        if (is_beside(file))
            continue;
        if (!S_ISREG(file.mode))
            throw Error(Errc::bad_argument,
                        file.name + " is no ordinary file, and only such are signed");
        if (!can_be_stated(file.name))
            throw Error(Errc::bad_argument, file.name + " is not signed: it is not finished, or "
                                                        "has a name that no checkpoint has");
        files.add(file.name);
    }
    return {parent, files.hash(threads, tell)};
}

void write_signed(int dir, Bytes statement, Bytes signature) {
    remove_signed(dir);
    write_whole(dir, kStatementName, statement);
    write_whole(dir, kSignatureName, signature);
}

void remove_signed(int dir) {
    for (const char* name : {kSignatureName, kStatementName})
        if (::unlinkat(dir, name, 0) != 0 && errno != ENOENT)
            throw io_error(std::string("cannot remove the old ") + name, errno);
}

bool has_signed(int dir) noexcept {
    return ::faccessat(dir, kStatementName, F_OK, AT_SYMLINK_NOFOLLOW) == 0 ||
           ::faccessat(dir, kSignatureName, F_OK, AT_SYMLINK_NOFOLLOW) == 0;
}

SignedStatement read_signed(int dir, const Trusted& trusted, Owners owners) {
    if (owners == Owners::own)
        require_trusted(dir, directory_path(dir));
    const std::vector<std::byte> text = read_whole(dir, kStatementName, kMaxStatementSize, owners);
    const std::vector<std::byte> signature =
        read_whole(dir, kSignatureName, kMaxSignatureSize, owners);
    try {
        SignedBy by = trusted.verify(text, signature);
        return {decode_statement(text), sha256(text), std::move(by)};
    } catch (const Error& e) {
        throw Error(e, std::string(kSignatureName) + ": " + e.what());
    }
}

Sha256 read_statement_digest(int dir) {
    const std::vector<std::byte> text =
        read_whole(dir, kStatementName, kMaxStatementSize, Owners::any);
    static_cast<void>(read_whole(dir, kSignatureName, kMaxSignatureSize, Owners::any));
    static_cast<void>(decode_statement(text));
    return sha256(text);
}

void check_files(int dir, const Statement& statement, Stated which, Owners owners, unsigned threads,
                 const SignProgress& tell) {
    start_openssl();
    const auto is_meant = [&](const std::string& name) {
        return which == Stated::all || is_for_others(name);
    };
    for (const Found& file : list(dir)) {
        if (is_beside(file) || !is_meant(file.name))
            continue;
        if (statement.find(file.name) == nullptr)
            throw Error(Errc::corrupt_data,
                        file.name + " was added: it is not among the files that were signed");
    }
    Hashing files(dir, owners);
    std::vector<const StatedFile*> stated;
    for (const StatedFile& file : statement.files) {
        if (!is_meant(file.name))
            continue;
        if (is_left_unsigned(file.name))
            throw Error(Errc::corrupt_data, file.name + " is in the statement, and is never");
        std::uint64_t size = 0;
        try {
            size = files.add(file.name);
        } catch (const Error& e) {
            if (e.code() == Errc::io && e.error_number() == ENOENT)
                throw Error(Errc::corrupt_data, file.name + " is missing, and was signed");
            throw;
        }
        if (size != file.size)
            throw Error(Errc::corrupt_data, file.name + " has " + std::to_string(size) +
                                                " bytes, and " + std::to_string(file.size) +
                                                " were signed");
        stated.push_back(&file);
    }
    const std::vector<StatedFile> found = files.hash(threads, tell);
    for (std::size_t at = 0; at < found.size(); ++at)
        if (found[at] != *stated[at])
            throw Error(Errc::corrupt_data, found[at].name + " is not the file that was signed");
}

} // namespace gpustasis::seal
