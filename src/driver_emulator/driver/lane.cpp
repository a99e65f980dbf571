// SPDX-License-Identifier: Apache-2.0
#include "driver_emulator/driver/lane.hpp"

#include "driver_emulator/driver/driver_threads.hpp"

#include <utility>

namespace gpustasis::emulator {

std::shared_ptr<Lane> Lane::start(std::atomic<std::uint32_t>& pending) {
    auto lane = std::make_shared<Lane>(pending);
    auto own = std::make_unique<std::shared_ptr<Lane>>(lane);
    const auto body = [](void* argument) -> void* {
        const std::unique_ptr<std::shared_ptr<Lane>> held(
            static_cast<std::shared_ptr<Lane>*>(argument));
        (*held)->run();
        return nullptr;
    };
    auto* argument = own.release(); // the thread's, if there is one
    if (!start_driver_thread(body, argument)) {
        own.reset(argument);
        return nullptr;
    }
    return lane;
}

void Lane::run() {
    std::unique_lock lock(mutex_);
    while (true) {
        changed_.wait(lock, [this] { return closed_ || !queue_.empty(); });
        if (queue_.empty()) {
            return;
        }
        std::function<void()> work = std::move(queue_.front());
        queue_.pop_front();
        lock.unlock();
        work();
        work = nullptr; // gives back what it holds before anybody is told
        lock.lock();
        ++done_;
        changed_.notify_all();
        pending_.fetch_sub(1);
    }
}

std::uint64_t Lane::submit(std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(work));
    pending_.fetch_add(1);
    changed_.notify_all();
    return ++submitted_;
}

std::uint64_t Lane::submitted() const {
    const std::lock_guard lock(mutex_);
    return submitted_;
}

bool Lane::is_done(std::uint64_t number) const {
    const std::lock_guard lock(mutex_);
    return done_ >= number;
}

void Lane::wait(std::uint64_t number) const {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [=, this] { return done_ >= number; });
}

void Lane::close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    changed_.notify_all();
}

} // namespace gpustasis::emulator
