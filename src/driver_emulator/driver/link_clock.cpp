// SPDX-License-Identifier: Apache-2.0
#include "driver_emulator/driver/link_clock.hpp"

#include "driver_emulator/driver/daemon_link.hpp"
#include "driver_emulator/driver/futex.hpp"
#include "driver_emulator/driver/passing_fd.hpp"

#include <algorithm>
#include <mutex>
#include <sys/mman.h>

namespace gpustasis::emulator {
namespace {

// A sleep ends late. So much of what a link has been idle is made up for.
constexpr std::uint64_t kCreditNs = 3'000'000;

void sleep_until(std::uint64_t end_ns) noexcept {
    const timespec time{static_cast<time_t>(end_ns / 1'000'000'000),
                        static_cast<long>(end_ns % 1'000'000'000)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, nullptr) == EINTR) {
    }
}

} // namespace

LinkTurn::LinkTurn(const LinkRates& rates, LinkDirection direction, std::uint64_t size) noexcept {
    const std::uint64_t ms_per_gib = rates.ms_per_gib[static_cast<unsigned>(direction)];
    if (ms_per_gib == 0 || rates.links == nullptr) {
        return;
    }
    const std::uint64_t taken_ns = size * ms_per_gib * 15'625 >> 24; // * 1e6 / 2^30
    std::atomic<std::uint64_t>& busy_until =
        rates.links->busy_until_ns[rates.gpu][static_cast<unsigned>(direction)];
    std::uint64_t before = busy_until.load();
    do {
        end_ns_ = std::max(before, now_ns() - kCreditNs) + taken_ns;
    } while (!busy_until.compare_exchange_weak(before, end_ns_));
}

LinkTurn::~LinkTurn() {
    if (end_ns_ > now_ns()) {
        sleep_until(end_ns_);
    }
}

LinkPage* link_page() noexcept {
    static std::mutex mutex;
    static LinkPage* page = nullptr;
    const std::lock_guard lock(mutex);
    if (page == nullptr) {
        const PassingFd file(ask_links());
        void* memory = file.get() < 0 ? MAP_FAILED
                                      : mmap(nullptr, sizeof(LinkPage), PROT_READ | PROT_WRITE,
                                             MAP_SHARED, file.get(), 0);
        page = memory == MAP_FAILED ? nullptr : static_cast<LinkPage*>(memory);
    }
    return page;
}

} // namespace gpustasis::emulator
