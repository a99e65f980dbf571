// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"

#include "cuda_plugin/long_calls.hpp"

#include <chrono>
#include <functional>
#include <future>
#include <thread>

using namespace gpustasis;
using std::chrono::milliseconds;

namespace {

constexpr pid_t kFirst = 1, kSecond = 2, kThird = 3; // no task is touched

struct Gate {
    void open() { opened.set_value(); }
    std::function<void()> waits() {
        return [future = opened.get_future().share()] { future.wait(); };
    }
    std::promise<void> opened;
};

void one_that_does_not_end_hangs_and_is_in_its_task_still() {
    LongCalls calls;
    Gate gate;
    calls.begin(kFirst, milliseconds(500), gate.waits());
    CHECK(calls.is_in(kFirst) && !calls.is_in(kSecond));
    CHECK(comes_true([&] { return calls.hangs(kFirst); }));
    CHECK(calls.is_in(kFirst) && !calls.any_works() && !calls.hangs(kSecond));
    calls.begin(kSecond, milliseconds(500), [] {}); // which is no sign of life of the first
    CHECK(comes_true([&] { return !calls.is_in(kSecond); }));
    CHECK(calls.hangs(kFirst) && !calls.any_works());
    gate.open();
    CHECK(comes_true([&] { return !calls.is_in(kFirst); }));
    CHECK(!calls.hangs(kFirst) && !calls.any_works());
}

// It may end yet: it has some seconds, and no other task's call is concerned.
void one_of_a_task_that_has_died_hangs_soon() {
    LongCalls calls;
    Gate dead, alive;
    calls.begin(kFirst, std::chrono::hours(1), dead.waits());
    calls.begin(kSecond, std::chrono::hours(1), alive.waits());
    const auto begin = std::chrono::steady_clock::now();
    calls.give_up(kFirst);
    CHECK(!calls.hangs(kFirst));
    CHECK(comes_true([&] { return calls.hangs(kFirst); }));
    CHECK(std::chrono::steady_clock::now() - begin > milliseconds(4'900));
    CHECK(calls.any_works() && !calls.hangs(kSecond));
    alive.open();
    CHECK(comes_true([&] { return !calls.any_works(); }));
    dead.open();
    CHECK(comes_true([&] { return !calls.is_in(kFirst); }));
}

// As in a driver that does one after the other: the second one's time begins when the first has ended.
void one_that_waits_for_another_does_not_hang() {
    constexpr milliseconds kLimit(4'000);
    LongCalls calls;
    Gate first, second;
    const auto begin = std::chrono::steady_clock::now();
    calls.begin(kFirst, kLimit, first.waits());
    calls.begin(kSecond, kLimit, second.waits());
    std::this_thread::sleep_until(begin + milliseconds(3'000));
    const auto ends = std::chrono::steady_clock::now();
    first.open();
    CHECK(comes_true([&] { return !calls.is_in(kFirst); }));
    std::this_thread::sleep_until(begin + milliseconds(4'100));
    const bool hangs = calls.hangs(kSecond), works = calls.any_works();
    if (std::chrono::steady_clock::now() - ends <
        milliseconds(3'500)) // this test was not held up itself
        CHECK(!hangs && works);
    CHECK(comes_true([&] { return calls.hangs(kSecond); }));
    CHECK(std::chrono::steady_clock::now() - begin > milliseconds(6'900));
    second.open();
    CHECK(comes_true([&] { return !calls.is_in(kSecond); }));
}

// The driver may be at work there, and begin with this one after it.
void one_that_waits_while_memory_of_another_moves_does_not_hang() {
    LongCalls calls;
    Gate first, second;
    MovedAt moved_at = 0;
    calls.begin(kFirst, std::chrono::hours(1), first.waits(), &moved_at);
    calls.begin(kSecond, milliseconds(1'000), second.waits());
    std::chrono::steady_clock::time_point last;
    for (int i = 0; i < 30; ++i) {
        last = std::chrono::steady_clock::now();
        touch(moved_at);
        std::this_thread::sleep_for(milliseconds(100));
        const bool hangs = calls.hangs(kSecond);
        if (std::chrono::steady_clock::now() - last > milliseconds(900))
            break; // this test was held up itself, and it hangs from then on
        CHECK(!hangs);
    }
    CHECK(comes_true([&] { return calls.hangs(kSecond); }));
    CHECK(std::chrono::steady_clock::now() - last > milliseconds(900));
    first.open();
    second.open();
    CHECK(comes_true([&] { return !calls.is_in(kFirst) && !calls.is_in(kSecond); }));
}

// Others that end behind it are no sign of its life, also where nobody has asked for its task.
void one_that_hangs_behind_another_at_work_is_found() {
    LongCalls calls;
    Gate first, second;
    calls.begin(kFirst, std::chrono::minutes(10), first.waits());
    calls.begin(kSecond, milliseconds(200), second.waits());
    std::this_thread::sleep_for(milliseconds(300));
    CHECK(calls.any_works());
    calls.begin(kThird, milliseconds(200), [] {});
    CHECK(comes_true([&] { return !calls.is_in(kThird); }));
    CHECK(calls.hangs(kSecond) && !calls.hangs(kFirst));
    first.open();
    second.open();
    CHECK(comes_true([&] { return !calls.is_in(kFirst) && !calls.is_in(kSecond); }));
}

// The driver was stopped with it, as by the freezer of a control group.
void one_that_was_stopped_with_all_others_does_not_hang() {
    LongCalls calls;
    Gate gate;
    calls.begin(kFirst, milliseconds(3'000), gate.waits());
    calls.begin_turn();
    std::this_thread::sleep_for(milliseconds(4'000));
    CHECK(!calls.hangs(kFirst)); // within a turn
    calls.begin_turn();
    std::this_thread::sleep_for(milliseconds(4'000));
    calls.begin_turn();
    CHECK(!calls.hangs(kFirst)); // and between two
    CHECK(comes_true([&] {
        calls.begin_turn();
        return calls.hangs(kFirst);
    }));
    gate.open();
    CHECK(comes_true([&] { return !calls.is_in(kFirst); }));
}

} // namespace

int main() {
    one_that_does_not_end_hangs_and_is_in_its_task_still();
    one_of_a_task_that_has_died_hangs_soon();
    one_that_waits_for_another_does_not_hang();
    one_that_waits_while_memory_of_another_moves_does_not_hang();
    one_that_hangs_behind_another_at_work_is_found();
    one_that_was_stopped_with_all_others_does_not_hang();
}
