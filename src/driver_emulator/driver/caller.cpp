// SPDX-License-Identifier: Apache-2.0
#include "driver_emulator/driver/caller.hpp"

#include "driver_emulator/driver/daemon_link.hpp"
#include "driver_emulator/driver/futex.hpp"

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/file.h>

namespace gpustasis::emulator {
namespace {

constexpr int kLivenessCheckMs = 100;

/// A file of the target's, closed at the end.
class TargetFile {
public:
    TargetFile(pid_t pid, int fd, int flags) noexcept {
        char path[64];
        std::snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, fd);
        fd_ = open(path, flags | O_CLOEXEC);
    }
    ~TargetFile() {
        if (fd_ >= 0) {
            close(fd_);
        }
    }
    TargetFile(const TargetFile&) = delete;
    TargetFile& operator=(const TargetFile&) = delete;
    int get() const noexcept { return fd_; }

private:
    int fd_;
};

/// Blocks SIGPIPE for the calling thread, and takes one that came meanwhile.
class NoSigpipe {
public:
    NoSigpipe() noexcept {
        sigemptyset(&pipe_);
        sigaddset(&pipe_, SIGPIPE);
        pthread_sigmask(SIG_BLOCK, &pipe_, &old_);
    }
    ~NoSigpipe() {
        const timespec now{};
        sigtimedwait(&pipe_, nullptr, &now);
        pthread_sigmask(SIG_SETMASK, &old_, nullptr);
    }
    NoSigpipe(const NoSigpipe&) = delete;
    NoSigpipe& operator=(const NoSigpipe&) = delete;

private:
    sigset_t pipe_;
    sigset_t old_;
};

bool read_comm(pid_t pid, pid_t tid, char (&name)[32], std::size_t& length) noexcept {
    char path[64];
    std::snprintf(path, sizeof path, "/proc/%d/task/%d/comm", pid, tid);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return false;
    }
    const ssize_t got = read(fd, name, sizeof name);
    close(fd);
    if (got <= 0) {
        return false;
    }
    length = static_cast<std::size_t>(got) - (name[got - 1] == '\n' ? 1 : 0);
    return true;
}

/// Whether the thread is there and not a corpse.
bool is_alive(pid_t pid, pid_t tid) noexcept {
    char path[64];
    std::snprintf(path, sizeof path, "/proc/%d/task/%d/stat", pid, tid);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return false;
    }
    char text[256];
    const ssize_t got = read(fd, text, sizeof text);
    close(fd);
    for (ssize_t i = got - 3; i > 0; --i) {
        if (text[i] == ')') {
            const char state = text[i + 2];
            return state != 'Z' && state != 'X';
        }
    }
    return false;
}

/// Waits for the reply to request `id`; 0 takes any.
Result read_reply(pid_t pid, pid_t tid, int fd, std::uint64_t id, ChannelReply& reply) noexcept {
    while (true) {
        pollfd event{fd, POLLIN, 0};
        int ready = poll(&event, 1, kLivenessCheckMs);
        if (ready == 0 && !is_alive(pid, tid)) {
            ready = poll(&event, 1, 0); // what it sent before it ended
            if (ready == 0) {
                return Result::operating_system;
            }
        }
        if (ready <= 0) {
            continue;
        }
        const ssize_t got = read(fd, &reply, sizeof reply);
        if (got != static_cast<ssize_t>(sizeof reply) || reply.magic != kChannelMagic) {
            return Result::operating_system; // its pipe is closed, or speaks another language
        }
        if (id == 0 || reply.id == id) {
            return reply.result;
        }
    }
}

std::uint64_t next_id() noexcept {
    static std::atomic<std::uint32_t> count{0};
    return now_ns() ^ static_cast<std::uint64_t>(getpid()) << 40 ^ (count.fetch_add(1) + 1);
}

bool is_desynchronised() noexcept {
    DaemonInfo info{};
    return ask_info(info) && info.desync != 0;
}

} // namespace

Result find_restore_thread(pid_t pid, RestoreThread& thread) noexcept {
    if (pid <= 0) {
        return Result::invalid_value;
    }
    char path[64];
    std::snprintf(path, sizeof path, "/proc/%d/task", pid);
    DIR* tasks = opendir(path);
    if (tasks == nullptr) {
        return Result::operating_system;
    }
    Result result = Result::not_initialized;
    while (const dirent* entry = readdir(tasks)) {
        char name[32];
        std::size_t length = 0;
        const pid_t tid = std::atoi(entry->d_name);
        if (tid > 0 && read_comm(pid, tid, name, length) &&
            parse_thread_name(name, length, thread.ends)) {
            thread.tid = tid;
            result = Result::success;
            break;
        }
    }
    closedir(tasks);
    return result;
}

Result request_operation(pid_t pid, ChannelRequest& request, ChannelReply& reply,
                         const std::function<Result(const ChannelReply&)>& accept) {
    RestoreThread thread;
    const Result found = find_restore_thread(pid, thread);
    if (found != Result::success) {
        return found;
    }
    const TargetFile requests(pid, thread.ends.request_write, O_WRONLY);
    const TargetFile replies(pid, thread.ends.reply_read, O_RDONLY | O_NONBLOCK);
    if (requests.get() < 0 || replies.get() < 0) {
        return Result::operating_system;
    }
    const bool desync = is_desynchronised();
    // Callers take turns; the kernel lets the next one in when one dies.
    while (flock(replies.get(), LOCK_EX) != 0 && errno == EINTR) {
    }
    while (!desync && read(replies.get(), &reply, sizeof reply) > 0) {
        // Left over from a caller that died.
    }
    request.magic = kChannelMagic;
    request.id = next_id();
    {
        const NoSigpipe guard;
        if (write(requests.get(), &request, sizeof request) !=
            static_cast<ssize_t>(sizeof request)) {
            return Result::operating_system;
        }
    }
    const Result result =
        read_reply(pid, thread.tid, replies.get(), desync ? 0 : request.id, reply);
    return result == Result::success && accept ? accept(reply) : result;
}

} // namespace gpustasis::emulator
