// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/guardian.hpp"

#include "core/error.hpp"
#include "cuda_plugin/orphan.hpp"
#include "cuda_plugin/undo.hpp"
#include "tracee/proc.hpp"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <optional>
#include <thread>

namespace gpustasis {
namespace {

constexpr int kPollMs = 10;
constexpr int kStartMs = 5'000;
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

[[noreturn]] void run_guardian(int number, TaskRecord& record, const TaskTable& table,
                               MissingPages& pages, UndoImages& images, KeyHandover& key,
                               unsigned threads, int criu) noexcept {
    try {
        key.take(images);
        std::vector<int> keep = images.lineage().descriptors();
        keep.push_back(pages.fd());
        keep.push_back(criu);
        shed_criu(std::move(keep), kGuardianName);
        Guardian guardian(record, table, pages, images, threads, criu);
        guardian.open_image();
        images.forget_key(); // the image holds what it needs of it
        record.guardian_starts[number] = proc::start_time(::getpid());
        record.guardians[number] = ::getpid();
        for (int before = 0; before < number; ++before)
            while (!is_over(record) && is_running(record, before))
                ::poll(nullptr, 0, kPollMs);
        guardian.run();
    } catch (...) {
        ::_exit(1); // nothing may unwind into criu's frames
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
        fork_orphan("a guardian of dropped memory", [&] {
            run_guardian(number, record, table, pages, images, key, threads, criu.get());
        });
        for (int waited = 0; record.guardians[number] == 0; ++waited) {
            if (waited == kStartMs)
                throw Error(Errc::io, "a guardian of dropped memory does not start");
            ::poll(nullptr, 0, 1);
        }
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
