// SPDX-License-Identifier: Apache-2.0
#include "tracee/proc.hpp"

#include "core/error.hpp"
#include "core/unique_fd.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <memory>
#include <optional>
#include <string_view>
#include <system_error>

namespace gpustasis::proc {
namespace {

// To look at one, and for its children, takes as long as to pass 20 other tasks of the machine.
constexpr std::size_t kFewThreads = 4;

struct CloseDir {
    void operator()(DIR* dir) const noexcept { ::closedir(dir); }
};
using Directory = std::unique_ptr<DIR, CloseDir>;

std::string task_path(pid_t pid, const char* file) {
    return "/proc/" + std::to_string(pid) + "/" + file;
}

Directory open_dir(const std::string& path) {
    Directory dir(::opendir(path.c_str()));
    if (!dir)
        throw io_error("cannot list " + path, errno);
    return dir;
}

/// The number that a directory entry is named after; 0 if it is not a number.
pid_t entry_number(const dirent* entry) noexcept {
    pid_t number = 0;
    const char* end = entry->d_name + std::strlen(entry->d_name);
    const auto [at, error] = std::from_chars(entry->d_name, end, number);
    return error == std::errc{} && at == end ? number : 0;
}

/// What follows "<key>:\t" on its line in a status file; empty if there is no such line.
std::string_view status_field(std::string_view status, std::string_view key) {
    const std::string mark = "\n" + std::string(key) + ":\t";
    const std::size_t at = status.find(mark);
    if (at == std::string_view::npos)
        return {};
    const std::size_t begin = at + mark.size();
    return status.substr(begin, status.find('\n', begin) - begin);
}

template <class Number>
Number parse(std::string_view text, const std::string& what, int base = 10) {
    Number number{};
    const auto [at, error] = std::from_chars(text.data(), text.data() + text.size(), number, base);
    if (error != std::errc{})
        throw Error(Errc::io, what + " holds no number where one is expected");
    return number;
}

std::uint32_t innermost_pid_in(std::string_view status, const std::string& path) {
    const std::string_view ids = status_field(status, "NSpid");
    return parse<std::uint32_t>(ids.substr(ids.rfind('\t') + 1), path);
}

char state_in(std::string_view status, const std::string& path) {
    const std::string_view field = status_field(status, "State");
    if (field.empty())
        throw Error(Errc::io, path + " says nothing of a state");
    return field.front();
}

/// False: the task is neither a child of this process nor one that it traces. That takes one system call and
/// no file, and a machine may have thousands of tasks.
bool may_be_waited_for(pid_t pid) noexcept {
    siginfo_t info{};
    return ::waitid(P_PID, static_cast<id_t>(pid), &info,
                    WEXITED | WSTOPPED | WNOHANG | WNOWAIT | __WALL) == 0 ||
           errno != ECHILD;
}

/// nullopt: another process traces it, or none. Throws Error: io.
std::optional<Tracee> as_tracee(pid_t pid) {
    const std::string path = task_path(pid, "status");
    const std::string status = read_file(path);
    if (status_field(status, "TracerPid") != std::to_string(::getpid()))
        return std::nullopt;
    return Tracee{
        .pid = pid, .inner_pid = innermost_pid_in(status, path), .state = state_in(status, path)};
}

/// Those that thread `tid` of it has made. Throws Error: io.
void append_children(pid_t pid, pid_t tid, std::vector<pid_t>& children) {
    const std::string path = task_path(pid, ("task/" + std::to_string(tid) + "/children").c_str());
    const std::string list = read_file(path); // "12 34 "
    for (std::size_t at = 0, end = 0; (end = list.find(' ', at)) != std::string::npos; at = end + 1)
        children.push_back(parse<pid_t>(std::string_view(list).substr(at, end - at), path));
}

/// Show the names of the threads in a task's directory to `use` until it says true; whether it did.
template <class Use>
bool any_thread_name(DIR* dir, const Use& use) {
    while (const dirent* entry = ::readdir(dir)) {
        if (entry_number(entry) == 0)
            continue;
        std::array<char, 64> name{};
        const std::string file = std::string(entry->d_name) + "/comm";
        const UniqueFd fd(::openat(::dirfd(dir), file.c_str(), O_RDONLY | O_CLOEXEC));
        if (!fd)
            continue; // the thread has ended meanwhile
        const ssize_t got = ::read(fd.get(), name.data(), name.size());
        if (got <= 0)
            continue;
        std::string_view text(name.data(), static_cast<std::size_t>(got));
        if (text.ends_with('\n'))
            text.remove_suffix(1);
        if (use(text))
            return true;
    }
    return false;
}

bool is_over(std::string_view state) {
    return state.starts_with('Z') || state.starts_with('X');
}

/// Of a process whose first thread has ended, as pthread_exit() ends it: it lives on in its others. That
/// they exist says little: a dead one stays there until its tracer has waited for it.
Liveness liveness_of_others(pid_t pid) {
    Liveness found = Liveness::dead;
    const std::vector<pid_t> listed = threads(pid);
    for (const pid_t tid : listed) {
        const std::string status =
            read_file(task_path(pid, ("task/" + std::to_string(tid) + "/status").c_str()));
        if (is_over(status_field(status, "State")))
            continue;
        if (status_field(status, "TracerPid") != "0")
            return Liveness::traced;
        found = Liveness::untraced;
    }
    // One that has ended may have started another meanwhile.
    return found == Liveness::dead && threads(pid) != listed ? Liveness::unknown : found;
}

// A number in /proc/PID/stat. Field 2 is the name in parentheses, which may hold anything; field 3 follows the last ')'.
std::uint64_t stat_field(pid_t pid, int wanted) {
    const std::string path = task_path(pid, "stat");
    const std::string stat = read_file(path);
    std::size_t at = stat.rfind(')');
    for (int field = 2; field < wanted && at != std::string::npos; ++field)
        at = stat.find(' ', at + 1);
    if (at == std::string::npos)
        throw Error(Errc::io, path + " has fewer than " + std::to_string(wanted) + " fields");
    return parse<std::uint64_t>(std::string_view(stat).substr(at + 1), path);
}

} // namespace

std::string read_file(const std::string& path) {
    const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!fd)
        throw io_error("cannot open " + path, errno);
    return read_rest(fd.get(), path);
}

std::string read_rest(int fd, const std::string& path) {
    std::string content;
    std::array<char, 4096> buffer;
    for (;;) {
        const ssize_t got = ::read(fd, buffer.data(), buffer.size());
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            throw io_error("cannot read " + path, errno);
        if (got == 0)
            return content;
        content.append(buffer.data(), static_cast<std::size_t>(got));
    }
}

std::uint32_t innermost_pid(pid_t pid) {
    const std::string path = task_path(pid, "status");
    return innermost_pid_in(read_file(path), path);
}

std::uint64_t start_time(pid_t pid) {
    return stat_field(pid, 22);
}

std::string comm(pid_t pid) {
    std::string name = read_file(task_path(pid, "comm"));
    if (name.ends_with('\n'))
        name.pop_back();
    return name;
}

Id boot_id() {
    const std::string path = "/proc/sys/kernel/random/boot_id";
    Id id{};
    std::size_t nibble = 0;
    for (const char c : read_file(path)) {
        if (std::isxdigit(static_cast<unsigned char>(c)) == 0 || nibble == 2 * id.size())
            continue;
        const int value = std::isdigit(static_cast<unsigned char>(c)) != 0
                              ? c - '0'
                              : std::tolower(static_cast<unsigned char>(c)) - 'a' + 10;
        id[nibble / 2] |= static_cast<std::byte>(value << (nibble % 2 == 0 ? 4 : 0));
        ++nibble;
    }
    return id;
}

bool has_thread_named(pid_t pid, std::string_view prefix) {
    const Directory dir = open_dir(task_path(pid, "task"));
    return any_thread_name(dir.get(),
                           [&](std::string_view name) { return name.starts_with(prefix); });
}

std::vector<std::string> thread_names(pid_t pid) {
    const std::string path = task_path(pid, "task");
    const Directory dir(::opendir(path.c_str()));
    if (!dir && (errno == ENOENT || errno == ESRCH))
        return {};
    if (!dir)
        throw io_error("cannot list " + path, errno);
    std::vector<std::string> names;
    any_thread_name(dir.get(), [&](std::string_view name) {
        names.emplace_back(name);
        return false;
    });
    return names;
}

std::vector<pid_t> threads(pid_t pid) {
    std::vector<pid_t> tids;
    const Directory dir = open_dir(task_path(pid, "task"));
    while (const dirent* entry = ::readdir(dir.get()))
        if (const pid_t tid = entry_number(entry); tid != 0)
            tids.push_back(tid);
    std::ranges::sort(tids);
    return tids;
}

Liveness liveness(pid_t pid, std::uint64_t expected_start) noexcept {
    try {
        if (start_time(pid) != expected_start)
            return Liveness::dead;
        const std::string status = read_file(task_path(pid, "status"));
        if (is_over(status_field(status, "State")))
            return liveness_of_others(pid);
        return status_field(status, "TracerPid") == "0" ? Liveness::untraced : Liveness::traced;
    } catch (const std::exception&) {
        // No file is needed for this. Only the signal's errno says that there is no such task:
        // /proc may be unreadable for want of descriptors or memory.
        return ::kill(pid, 0) != 0 && errno == ESRCH ? Liveness::dead : Liveness::unknown;
    }
}

pid_t parent(pid_t pid) {
    const std::string path = task_path(pid, "status");
    const std::string status = read_file(path);
    return parse<pid_t>(status_field(status, "PPid"), path);
}

bool has_exited(pid_t pid) noexcept {
    if (::kill(pid, 0) != 0 && errno == ESRCH)
        return true;
    try {
        const std::string path = task_path(pid, "stat");
        const std::string stat = read_file(path);
        const std::size_t name_end = stat.rfind(") ");
        if (name_end == std::string::npos || stat[name_end + 2] != 'Z')
            return false;
        // The last field, exit_code, is what waitpid() will say.
        const int status = parse<int>(std::string_view(stat).substr(stat.rfind(' ') + 1), path);
        return WIFEXITED(status);
    } catch (const std::exception&) {
        return ::kill(pid, 0) != 0 && errno == ESRCH; // else it is there and cannot be read
    }
}

bool is_exiting(pid_t pid) {
    return (stat_field(pid, 9) & std::uint64_t{4}) != 0;
}

void kill_task(pid_t pid, std::uint64_t start_time) noexcept {
    try {
        // Opened first: from then on the id may be another's, the descriptor may not.
        const UniqueFd task(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
        if (task && proc::start_time(pid) == start_time)
            ::syscall(SYS_pidfd_send_signal, task.get(), SIGKILL, nullptr, 0);
    } catch (const std::exception&) {
        return; // it has ended
    }
}

std::string rights(pid_t pid) {
    std::error_code error;
    std::string text = std::filesystem::read_symlink(task_path(pid, "ns/user"), error).string();
    if (error)
        throw io_error("cannot read " + task_path(pid, "ns/user"), error.value());
    const std::string status = read_file(task_path(pid, "status"));
    for (const char* key : {"Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd",
                            "CapAmb", "NoNewPrivs", "Seccomp"})
        text.append(1, '\n').append(status_field(status, key));
    return text;
}

pid_t tracer_of(pid_t tid) {
    const std::string path = task_path(tid, "status");
    const std::string status = read_file(path);
    return parse<pid_t>(status_field(status, "TracerPid"), path);
}

std::vector<Tracee> tracees() {
    std::vector<Tracee> found;
    const Directory dir = open_dir("/proc");
    while (const dirent* entry = ::readdir(dir.get())) {
        const pid_t pid = entry_number(entry);
        if (pid == 0 || !may_be_waited_for(pid))
            continue;
        try {
            if (const auto tracee = as_tracee(pid))
                found.push_back(*tracee);
        } catch (const Error& e) {
            const int why = e.error_number();
            if (why != 0 && why != ENOENT && why != ESRCH)
                throw; // one that we trace may be missed
            continue;  // it has ended meanwhile, so it is not one we trace
        }
    }
    return found;
}

std::vector<Tracee> tracees_below(pid_t root) {
    std::vector<Tracee> found;
    std::size_t looked_at = 0;
    try {
        if (as_tracee(parent(root))) // so it is not the root
            return tracees();
        for (std::vector<pid_t> next{root}; !next.empty();) {
            const pid_t pid = next.back();
            next.pop_back();
            const auto tracee = as_tracee(pid);
            if (!tracee)
                continue;
            found.push_back(*tracee);
            const std::vector<pid_t> tids = threads(pid);
            looked_at += tids.size();
            if (looked_at > kFewThreads)
                return tracees();
            for (const pid_t tid : tids)
                append_children(pid, tid, next);
        }
        return found;
    } catch (const Error&) { // as of a kernel that lists no children
        return tracees();
    }
}

std::vector<pid_t> traced_by_us() {
    std::vector<pid_t> pids;
    std::ranges::transform(tracees(), std::back_inserter(pids), &Tracee::pid);
    return pids;
}

char state(pid_t tid) {
    const std::string path = task_path(tid, "status");
    return state_in(read_file(path), path);
}

bool has_signal(pid_t tid) {
    const std::string path = task_path(tid, "status");
    const std::string status = read_file(path);
    const auto set = [&](const char* key) {
        return parse<std::uint64_t>(status_field(status, key), path, 16);
    };
    return ((set("SigPnd") | set("ShdPnd")) & ~set("SigBlk")) != 0;
}

bool has_seccomp(pid_t tid) {
    return status_field(read_file(task_path(tid, "status")), "Seccomp") != "0";
}

} // namespace gpustasis::proc
