// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/guardian.hpp"

#include "core/error.hpp"
#include "cuda_plugin/orphan.hpp"
#include "cuda_plugin/undo.hpp"
#include "tracee/proc.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <iterator>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace gpustasis {
namespace {

constexpr int kPollMs = 10;
constexpr int kStartMs =
    30'000; // one that cannot start says so at once; this is for loaded machines
constexpr int kRetryMs = 1'000; // between two attempts to put everything back
constexpr int kAnswerMs = 100;  // between two attempts to answer who waits

using Clock = std::chrono::steady_clock;

UniqueFd open_process(pid_t pid) {
    return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

/// Whether the process of `pidfd` has ended, if only as a zombie.
bool has_ended(int pidfd) noexcept {
    pollfd poll{.fd = pidfd, .events = POLLIN, .revents = 0};
    return ::poll(&poll, 1, 0) == 1;
}

bool is_running(const TaskRecord& record, int number) noexcept {
    const pid_t pid = record.guardians[number];
    return pid != 0 && proc::liveness(pid, record.guardian_starts[number]) != proc::Liveness::dead;
}

/// Nothing is left to guard. A worker that has given up (settled, and not refilled) is no reason to let
/// go: threads would read zeros.
bool is_over(const TaskRecord& record) noexcept {
    return record.refilled || record.gone || (record.settled && !record.drop_begun);
}

class Guardian {
public:
    Guardian(TaskRecord& record, const TaskTable& table, MissingPages& pages,
             const UndoImages& images, unsigned threads, int criu) noexcept
        : record_(record), table_(table), pages_(pages), images_(images), threads_(threads),
          criu_(criu) {}

    /// Returns when nothing is left to guard.
    void run() {
        std::optional<std::thread> filling;
        auto again = Clock::now();
        while (!is_over(record_)) {
            pollfd waiting{.fd = pages_.fd(), .events = POLLIN, .revents = 0};
            if (::poll(&waiting, 1, kPollMs) > 0 && !attempt([this] { pages_.answer(*image_); }))
                ::poll(nullptr, 0, kPollMs);
            if (Clock::now() >= again) {
                attempt([this] { pages_.answer_again(*image_); });
                again = Clock::now() + std::chrono::milliseconds(kAnswerMs);
            }
            if (!table_.left && !has_ended(criu_))
                continue;
            if (!record_.drop_begun)
                break; // nothing was taken out, and the driver may be at work there
            const proc::Liveness life = proc::liveness(record_.pid, record_.start_time);
            if (life == proc::Liveness::dead) {
                forget_drop(record_);
                break;
            }
            // Until criu, or the kernel on its behalf, lets go of the task, it may be about to die. And
            // the call that drops pages is made even if criu dies: what is filled before is lost.
            if (life == proc::Liveness::untraced && !filling &&
                is_drop_over(record_.pid, record_.restore_tid))
                attempt([&] { filling.emplace([this] { fill(); }); });
        }
        if (filling)
            filling->join();
    }

    /// Before anything is dropped: who clears the image directory later does not take the image away.
    /// Throws as open_dropped().
    void open_image() { image_ = images_.open(dropped_task(record_)); }

private:
    /// What cannot be put back stays guarded: whoever waits for it waits for the end of the task, and
    /// does not run on with zeros. What failed is tried again.
    void fill() noexcept {
        while (image_ && !is_over(record_)) {
            try {
                pages_.fill(*image_, threads_);
                record_.refilled = true;
                pages_.release();
                forget_drop(record_);
                return;
            } catch (const Error& e) {
                if (e.code() == Errc::gone) { // it has ended, or runs another program
                    record_.gone = true;
                    forget_drop(record_);
                    return;
                }
                tell(e);
            } catch (const std::exception& e) {
                tell(e);
            }
            ::poll(nullptr, 0, kRetryMs);
            if (is_dead())
                return;
        }
    }

    void tell(const std::exception& e) noexcept {
        if (record_.refill_failed)
            return;
        std::strncpy(record_.refill_error, e.what(), sizeof(record_.refill_error) - 1);
        record_.refill_failed = true;
    }

    bool is_dead() const noexcept {
        bool dead = false;
        attempt([&] {
            dead = proc::liveness(record_.pid, record_.start_time) == proc::Liveness::dead;
        });
        return dead;
    }

    /// Whether `body` came to its end.
    template <class Body>
    static bool attempt(const Body& body) noexcept {
        try {
            body();
            return true;
        } catch (const std::exception&) {
            return false;
        }
    }

    TaskRecord& record_;
    const TaskTable& table_;
    MissingPages& pages_;
    const UndoImages& images_;
    unsigned threads_;
    int criu_;
    std::optional<ImageReader> image_;
};

/// How a guardian tells who starts it that it is ready, or why it cannot be.
class Start {
public:
    /// Throws Error: io.
    Start() {
        int ends[2];
        if (::pipe2(ends, O_CLOEXEC) != 0)
            throw io_error("cannot make a pipe for a guardian", errno);
        reading_ = UniqueFd(ends[0]);
        writing_ = UniqueFd(ends[1]);
    }

    /// In the guardian, which ends after failed(). It holds both ends: to write when criu has been killed
    /// must not kill it.
    std::vector<int> descriptors() const { return {reading_.get(), writing_.get()}; }
    void ready() noexcept {
        tell("");
        writing_.reset();
        reading_.reset();
    }
    void failed(const char* why) noexcept { tell(why); }

    /// In who starts it, after the fork. Throws Error: io.
    void wait() {
        writing_.reset(); // or its death would not be seen
        pollfd poll{.fd = reading_.get(), .events = POLLIN, .revents = 0};
        int found = 0;
        do
            found = ::poll(&poll, 1, kStartMs);
        while (found < 0 && errno == EINTR);
        if (found == 0)
            throw Error(Errc::io, "a guardian of dropped memory does not start: no answer in " +
                                      std::to_string(kStartMs / 1000) + " s");
        char told[kLongest];
        const ssize_t got = ::read(reading_.get(), told, sizeof(told));
        if (got <= 0)
            throw Error(Errc::io, "a guardian of dropped memory has died at its start");
        if (got > 1)
            throw Error(Errc::io, "a guardian of dropped memory does not start: " +
                                      std::string(told, static_cast<std::size_t>(got) - 1));
    }

private:
    static constexpr std::size_t kLongest = 1024; // a pipe takes that at once

    /// A message, and a byte that ends it.
    void tell(const char* why) noexcept {
        char text[kLongest]{};
        std::strncpy(text, why, sizeof(text) - 1);
        // One that cannot be written shows as a death.
        [[maybe_unused]] const ssize_t put = ::write(writing_.get(), text, std::strlen(text) + 1);
    }

    UniqueFd reading_;
    UniqueFd writing_;
};

[[noreturn]] void run_guardian(int number, TaskRecord& record, const TaskTable& table,
                               MissingPages& pages, UndoImages& images, KeyHandover& key,
                               unsigned threads, int criu, Start& start) noexcept {
    try {
        key.take(images);
        std::vector<int> keep = images.lineage().descriptors();
        keep.push_back(pages.fd());
        keep.push_back(criu);
        std::ranges::copy(start.descriptors(), std::back_inserter(keep));
        shed_criu(std::move(keep), kGuardianName);
        ignore_requests_to_end();
        Guardian guardian(record, table, pages, images, threads, criu);
        guardian.open_image();
        images.forget_key(); // the image holds what it needs of it
        record.guardian_starts[number] = proc::start_time(::getpid());
        record.guardians[number] = ::getpid();
        start.ready();
        for (int before = 0; before < number; ++before)
            while (!is_over(record) && is_running(record, before))
                ::poll(nullptr, 0, kPollMs);
        guardian.run();
    } catch (const std::exception& e) {
        start.failed(e.what()); // nothing may unwind into criu's frames
        ::_exit(1);
    } catch (...) {
        ::_exit(1);
    }
    ::_exit(0);
}

} // namespace

void start_guardians(TaskRecord& record, const TaskTable& table, MissingPages& pages,
                     UndoImages& images, unsigned threads) {
    const UniqueFd criu = open_process(::getpid());
    if (!criu)
        throw io_error("pidfd_open of criu", errno);
    for (int number = 0; number < TaskRecord::kGuardians; ++number) {
        KeyHandover key(images);
        Start start;
        fork_orphan("a guardian of dropped memory", [&] {
            run_guardian(number, record, table, pages, images, key, threads, criu.get(), start);
        });
        start.wait();
    }
    record.guarded = true;
}

bool is_guarded(const TaskRecord& record) noexcept {
    if (!record.guarded || record.refilled || record.gone)
        return false;
    for (int number = 0; number < TaskRecord::kGuardians; ++number)
        if (is_running(record, number))
            return true;
    return false;
}

} // namespace gpustasis
