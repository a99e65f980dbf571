// SPDX-License-Identifier: Apache-2.0
#include "tracee/userfaultfd_record.hpp"

#include "core/file.hpp"
#include "tracee/proc.hpp"
#include "tracee/task_identity.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <ctime>
#include <exception>
#include <filesystem>
#include <memory>
#include <span>
#include <sstream>
#include <system_error>
#include <utility>

namespace gpustasis {
namespace {

constexpr int kPatienceMs = 1000; // another's call takes a millisecond, and no thread is stopped yet
// From the writing of a record to the call: some tens of microseconds, more on a busy machine.
constexpr std::int64_t kCallWithin = 5'000'000'000;
constexpr std::uint64_t kMaxSize = 64;

std::int64_t nanoseconds(const timespec& time) noexcept {
    return std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

std::int64_t time_now() noexcept {
    timespec now{};
    ::clock_gettime(CLOCK_REALTIME, &now);
    return nanoseconds(now);
}

bool is_near(std::int64_t written, std::int64_t time) noexcept {
    return std::abs(time - written) <= kCallWithin;
}

struct CloseDir {
    void operator()(DIR* dir) const noexcept { ::closedir(dir); }
};

// fs/userfaultfd.c, userfaultfd_show_fdinfo: "API:", then in hex the version, the features in use,
// and those that there are. UFFDIO_API makes the second one other than 0.
bool is_unused(const std::string& fdinfo) {
    const std::size_t line = fdinfo.find("\nAPI:");
    std::uint64_t version = 0;
    std::uint64_t features = 1;
    char colon = 0;
    if (line != std::string::npos)
        std::istringstream(fdinfo.substr(line + 5)) >> std::hex >> version >> colon >> features;
    return features == 0;
}

/// Descriptor `name` of a process, if it is one.
std::optional<UnusedUserfaultfd> look_at(const std::filesystem::path& process,
                                         const std::string& name) {
    const std::filesystem::path path = process / "fd" / name;
    std::error_code closed;
    struct stat status {};
    if (std::filesystem::read_symlink(path, closed) != "anon_inode:[userfaultfd]" ||
        ::stat(path.c_str(), &status) != 0 ||
        !is_unused(proc::read_file(process / "fdinfo" / name)))
        return std::nullopt;
    return UnusedUserfaultfd{std::stoi(name), status.st_ino, nanoseconds(status.st_ctim)};
}

std::filesystem::path directory_of(pid_t pid) {
    return "/proc/" + std::to_string(pid);
}

/// Of the process that a record is about.
bool is_dead(const TaskIdentity& task, const std::string& text) {
    std::istringstream words(text);
    pid_t pid = 0;
    std::uint64_t seen_from = 0;
    if (!(words >> pid >> seen_from))
        return true; // its writer died before there was anything to write down
    return seen_from == pid_namespace_of("self") &&
           proc::liveness(pid, task.start_time) == proc::Liveness::dead;
}

/// Records of processes that have ended, but for the one called `but`.
void remove_dead(int directory, const std::string& but) {
    const std::unique_ptr<DIR, CloseDir> entries(
        ::fdopendir(::openat(directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC)));
    while (const dirent* entry = entries ? ::readdir(entries.get()) : nullptr) {
        const std::optional<TaskIdentity> task = task_of_file(entry->d_name);
        if (!task || entry->d_name == but)
            continue;
        const LockedFile file = open_locked(directory, entry->d_name, IfMissing::nothing, 0);
        if (!file.locked)
            continue;
        const std::uint64_t size = std::min(file_size(file.fd.get()), kMaxSize);
        const std::vector<std::byte> text = read_part(file.fd.get(), 0, size);
        if (is_dead(*task, {reinterpret_cast<const char*>(text.data()), text.size()}))
            ::unlinkat(directory, entry->d_name, 0);
    }
}

} // namespace

std::vector<UnusedUserfaultfd> find_unused_userfaultfds(pid_t pid) {
    std::vector<UnusedUserfaultfd> found;
    const std::filesystem::path process = directory_of(pid);
    std::error_code error;
    for (std::filesystem::directory_iterator at(process / "fd", error), end; !error && at != end;
         at.increment(error))
        if (const auto unused = look_at(process, at->path().filename()))
            found.push_back(*unused);
    if (error)
        throw io_error("cannot list the descriptors of process " + std::to_string(pid),
                       error.value());
    return found;
}

UserfaultfdRecord::UserfaultfdRecord(pid_t pid, IfMissing missing, const std::string& base)
    : pid_(pid) {
    const uid_t self = ::geteuid();
    try {
        name_ = file_name(identify_task(pid));
        own_ = look(base.empty() ? run_directory() : base, missing, self);
        if (own_.file && missing == IfMissing::make) {
            has_none_ = find_unused_userfaultfds(pid).empty();
            remove_dead(own_.directory.get(), name_);
        }
    } catch (const Error& e) {
        why_not_ = e;
    }
    try {
        // Of the owner alone, in whose power the process is: others could name any process there.
        struct stat status {};
        if (self == 0 && base.empty() && !name_.empty() &&
            ::stat(directory_of(pid).c_str(), &status) == 0 && status.st_uid != self)
            owners_ = look(run_directory(status.st_uid), IfMissing::nothing, status.st_uid);
    } catch (const Error&) { // NOLINT(bugprone-empty-catch): anything may be there
    }
    if (held_ && missing == IfMissing::make)
        why_not_ = Error(Errc::unsupported, "another process is making one there");
}

UserfaultfdRecord::Place UserfaultfdRecord::look(const std::string& base, IfMissing missing,
                                                 uid_t user) {
    Place place;
    place.directory = open_trusted(base, {"gpustasis", "userfaultfd"}, missing, user);
    if (!place.directory)
        return place;
    LockedFile file = open_locked(place.directory.get(), name_, missing, kPatienceMs, user);
    if (!file.locked) {
        held_ |= static_cast<bool>(file.fd);
        return place;
    }
    struct stat status {};
    if (::fstat(file.fd.get(), &status) != 0)
        throw io_error("cannot examine " + name_, errno);
    place.file = std::move(file.fd);
    place.written = nanoseconds(status.st_mtim);
    place.is_record = status.st_size != 0;
    return place;
}

std::optional<UnusedUserfaultfd> UserfaultfdRecord::find_left() noexcept {
    if (!own_.is_record && !owners_.is_record && !held_)
        return std::nullopt;
    try {
        const std::vector<UnusedUserfaultfd> unused = find_unused_userfaultfds(pid_);
        judge(unused);
        if ((own_.is_record || owners_.is_record) && unused.size() == 1 && !held_)
            return unused.front();
    } catch (const std::exception& e) {
        why_not_ = Error(Errc::io, e.what());
    }
    return std::nullopt;
}

void UserfaultfdRecord::judge(const std::vector<UnusedUserfaultfd>& unused) {
    has_none_ = unused.empty();
    const std::int64_t now = time_now();
    for (Place* place : {&own_, &owners_}) {
        if (!place->is_record)
            continue;
        if (unused.empty())
            place->is_record = is_near(place->written, now);
        else if (unused.size() == 1)
            place->is_record = is_near(place->written, unused.front().made);
    }
    may_come_ = unused.empty() && own_.is_record;
    if (held_ && !unused.empty())
        why_not_ = Error(Errc::unsupported, "another process is making one there, or has stopped in the middle of it");
    else if (unused.size() > 1)
        why_not_ = Error(Errc::unsupported, "there are " + std::to_string(unused.size()));
}

bool UserfaultfdRecord::close_left(const UnusedUserfaultfd& left, InjectedSyscalls& calls) {
    const bool is_there = look_at(directory_of(pid_), std::to_string(left.fd)) == left;
    if (is_there) {
        const std::int64_t result =
            calls.call(SYS_close, static_cast<std::uint64_t>(left.fd), 0, 0);
        if (result != 0)
            throw io_error("close in the name of process " + std::to_string(pid_),
                           static_cast<int>(-result));
        has_none_ = true;
    }
    own_.is_record = owners_.is_record = false;
    return is_there;
}

void UserfaultfdRecord::begin() noexcept {
    if (!own_.file || !has_none_)
        return; // nobody could tell which one is ours
    try {
        const std::string text =
            std::to_string(pid_) + " " + std::to_string(pid_namespace_of("self")) + "\n";
        if (::ftruncate(own_.file.get(), 0) != 0)
            throw io_error("cannot empty " + name_, errno);
        write_at(own_.file.get(), 0, std::as_bytes(std::span(text)));
        own_.is_record = begun_ = true;
    } catch (const std::exception& e) {
        why_not_ = Error(Errc::io, e.what());
    }
}

void UserfaultfdRecord::end() noexcept {
    if (begun_)
        own_.is_record = may_come_;
    begun_ = false;
}

UserfaultfdRecord::~UserfaultfdRecord() {
    try {
        if (begun_ && find_unused_userfaultfds(pid_).empty())
            end();
    } catch (const std::exception&) { // NOLINT(bugprone-empty-catch): it stays
    }
    for (const Place* place : {&own_, &owners_})
        if (place->file && !place->is_record) // before the lock goes with its descriptor
            ::unlinkat(place->directory.get(), name_.c_str(), 0);
}

} // namespace gpustasis
