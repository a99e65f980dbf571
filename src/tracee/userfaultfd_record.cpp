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
#include <ctime>
#include <exception>
#include <iterator>
#include <memory>
#include <span>
#include <sstream>
#include <string_view>
#include <utility>

namespace gpustasis {
namespace {

constexpr int kPatienceMs =
    1000; // another's call takes a millisecond, and no thread is stopped yet
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

/// Both times are the kernel's, of the same clock: what comes later is not earlier by it.
bool is_soon_after(std::int64_t written, std::int64_t time) noexcept {
    return written <= time && time - written <= kCallWithin;
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

std::string directory_of(pid_t pid) {
    return "/proc/" + std::to_string(pid);
}

/// Descriptor `name` of process `pid`, if it is one. `directory`: /proc/PID/fd.
std::optional<UnusedUserfaultfd> look_at(pid_t pid, int directory, const char* name) {
    constexpr std::string_view kWhat = "anon_inode:[userfaultfd]";
    char what[kWhat.size() + 1];
    struct stat status {};
    const ssize_t size = ::readlinkat(directory, name, what, sizeof(what));
    if (size < 0 || std::string_view(what, static_cast<std::size_t>(size)) != kWhat ||
        ::fstatat(directory, name, &status, 0) != 0 ||
        !is_unused(proc::read_file(directory_of(pid) + "/fdinfo/" + name)))
        return std::nullopt;
    return UnusedUserfaultfd{std::stoi(name), status.st_ino, nanoseconds(status.st_ctim)};
}

UniqueFd open_descriptors(pid_t pid) {
    const std::string path = directory_of(pid) + "/fd";
    UniqueFd directory(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!directory)
        throw io_error("cannot list the descriptors of process " + std::to_string(pid), errno);
    return directory;
}

using Directory = std::unique_ptr<DIR, CloseDir>;

/// What is in it, by another descriptor.
Directory entries_of(int directory) {
    Directory entries(::fdopendir(::openat(directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC)));
    if (!entries)
        throw io_error("cannot list a directory", errno);
    return entries;
}

/// Whether a directory of records may have one of process `pid`. Asked first, for nearly always there is none, and
/// to learn who the process is takes longer than all else. Whether the directory is to be trusted is not looked at.
bool may_have_record(const std::string& base, pid_t pid) {
    const std::string path = base + "/gpustasis/userfaultfd";
    const Directory entries(::opendir(path.c_str()));
    if (!entries)
        return errno != ENOENT;
    std::optional<std::uint64_t> start_time;
    while (const dirent* entry = ::readdir(entries.get())) {
        const std::optional<TaskIdentity> task = task_of_file(entry->d_name);
        if (!task)
            continue;
        if (!start_time)
            start_time = proc::start_time(pid);
        if (task->start_time == *start_time)
            return true;
    }
    return false;
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
    const Directory entries = entries_of(directory);
    while (const dirent* entry = ::readdir(entries.get())) {
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
    const UniqueFd directory = open_descriptors(pid);
    const Directory entries = entries_of(directory.get());
    while (const dirent* entry = ::readdir(entries.get()))
        if (const auto unused = look_at(pid, directory.get(), entry->d_name))
            found.push_back(*unused);
    return found;
}

UserfaultfdRecord::UserfaultfdRecord(pid_t pid, IfMissing missing, const std::string& base)
    : pid_(pid) {
    const uid_t self = ::geteuid();
    const std::string own = base.empty() ? run_directory() : base;
    // Of the owner alone, in whose power the process is: others could name any process there.
    uid_t owner = self;
    struct stat status {};
    if (self == 0 && base.empty() && ::stat(directory_of(pid).c_str(), &status) == 0)
        owner = status.st_uid;
    bool owner_may = false;
    try {
        owner_may = owner != self && may_have_record(run_directory(owner), pid);
        if (missing == IfMissing::nothing && !owner_may && !may_have_record(own, pid))
            return;
        name_ = file_name(identify_task(pid));
        own_ = look(own, missing, self);
        if (missing == IfMissing::make)
            remove_dead(own_.directory.get(), name_);
    } catch (const Error& e) {
        why_not_ = e;
    }
    try {
        if (owner_may && !name_.empty())
            owners_ = look(run_directory(owner), IfMissing::nothing, owner);
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

std::vector<UnusedUserfaultfd> UserfaultfdRecord::find_left() noexcept {
    std::vector<UnusedUserfaultfd> left;
    if (begun_ || (!own_.is_record && !owners_.is_record && !held_))
        return left; // where it has begun, the record is not a dead writer's
    try {
        const std::vector<UnusedUserfaultfd> unused = find_unused_userfaultfds(pid_);
        if (held_ && !unused.empty())
            why_not_ =
                Error(Errc::unsupported,
                      "another process is making one there, or has stopped in the middle of it");
        judge(own_, unused, left);
        judge(owners_, unused, left);
        may_come_ = own_.is_record && !own_.has_left;
    } catch (const std::exception& e) {
        why_not_ = Error(Errc::io, e.what());
    }
    if (held_)
        left.clear();
    return left;
}

void UserfaultfdRecord::judge(Place& place, const std::vector<UnusedUserfaultfd>& unused,
                              std::vector<UnusedUserfaultfd>& left) {
    if (!place.is_record)
        return;
    std::vector<UnusedUserfaultfd> candidates;
    std::ranges::copy_if(unused, std::back_inserter(candidates), [&](const UnusedUserfaultfd& one) {
        return is_soon_after(place.written, one.made);
    });
    place.has_left = !candidates.empty();
    place.is_record = place.has_left || is_soon_after(place.written, time_now());
    if (candidates.size() > 1)
        why_not_ = Error(Errc::unsupported, std::to_string(candidates.size()) + " look like it");
    else if (place.has_left && std::ranges::find(left, candidates.front()) == left.end())
        left.push_back(candidates.front());
}

bool UserfaultfdRecord::close_left(const UnusedUserfaultfd& left, InjectedSyscalls& calls) {
    const UniqueFd directory = open_descriptors(pid_);
    const bool is_there = look_at(pid_, directory.get(), std::to_string(left.fd).c_str()) == left;
    if (is_there) {
        const std::int64_t result =
            calls.call(SYS_close, static_cast<std::uint64_t>(left.fd), 0, 0);
        if (result != 0)
            throw io_error("close in the name of process " + std::to_string(pid_),
                           static_cast<int>(-result));
    }
    for (Place* place : {&own_, &owners_})
        if (is_soon_after(place->written, left.made))
            place->is_record = place->has_left = false;
    return is_there;
}

void UserfaultfdRecord::begin() noexcept {
    if (!own_.file || own_.has_left)
        return; // the record of that is worth more
    try {
        const std::string text =
            std::to_string(pid_) + " " + std::to_string(pid_namespace_of("self")) + "\n";
        if (::ftruncate(own_.file.get(), 0) != 0)
            throw io_error("cannot empty " + name_, errno);
        write_at(own_.file.get(), 0, std::as_bytes(std::span(text)));
        struct stat status {};
        if (::fstat(own_.file.get(), &status) != 0)
            throw io_error("cannot examine " + name_, errno);
        own_.written = nanoseconds(status.st_mtim);
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
        if (begun_ && std::ranges::none_of(find_unused_userfaultfds(pid_), [&](const auto& one) {
                return is_soon_after(own_.written, one.made);
            }))
            end();
    } catch (const std::exception&) { // NOLINT(bugprone-empty-catch): it stays
    }
    for (const Place* place : {&own_, &owners_})
        if (place->file && !place->is_record) // before the lock goes with its descriptor
            ::unlinkat(place->directory.get(), name_.c_str(), 0);
}

} // namespace gpustasis
