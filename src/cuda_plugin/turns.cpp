// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/turns.hpp"

#include <exception>
#include <new>
#include <utility>

namespace gpustasis {
namespace {

void fail(Outcome& outcome, const std::exception& e) noexcept {
    try {
        outcome.error = e.what();
    } catch (const std::bad_alloc&) {
        outcome.error = "no memory"; // short enough to need none
    }
    outcome.is_there = true;
}

} // namespace

const Outcome* Turns::take(pid_t pid, bool may_begin, std::function<void()> work,
                           const MovedAt* moved_at) {
    std::shared_ptr<Outcome>& outcome = outcomes_[pid];
    // In its task nothing, not even what hangs.
    if (!outcome && may_begin && !calls_.any_works() && !calls_.is_in(pid))
        begin(pid, outcome, std::move(work), moved_at);
    return outcome && outcome->is_there ? outcome.get() : nullptr;
}

void Turns::begin(pid_t pid, std::shared_ptr<Outcome>& outcome, std::function<void()> work,
                  const MovedAt* moved_at) {
    outcome = std::make_shared<Outcome>();
    try {
        const auto run = [work = std::move(work), of = outcome] {
            try {
                work();
                of->is_there = true;
            } catch (const std::exception& e) {
                fail(*of, e);
            }
        };
        calls_.begin(pid, limit_, run, moved_at);
    } catch (const std::exception& e) {
        fail(*outcome, e);
    }
}

} // namespace gpustasis
