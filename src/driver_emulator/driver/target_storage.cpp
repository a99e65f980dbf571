// SPDX-License-Identifier: Apache-2.0
#include "driver_emulator/driver/target_storage.hpp"

#include "driver_emulator/driver/driver.hpp"
#include "driver_emulator/driver/gpu_change.hpp"
#include "driver_emulator/driver/helper_threads.hpp"
#include "driver_emulator/driver/passing_fd.hpp"
#include "driver_emulator/driver/staging.hpp"
#include "driver_emulator/driver/staging_memory.hpp"
#include "driver_emulator/driver/storage_table.hpp"

#include <algorithm>
#include <cstring>
#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>

namespace gpustasis::emulator {
namespace {

constexpr std::uint64_t kPieceBytes = std::uint64_t{16} << 20; // what a helper fills at a time
constexpr unsigned char kUndefined = 0xdb;                     // what nobody has written
unsigned char undefined_bytes[65536];                          // of the restore thread

/// VRAM that nobody has written is not zero: on a GPU it has what somebody else left there.
struct FillJob {
    Driver* driver;
    bool half;
    std::atomic<std::uint64_t> next_piece{0};
    std::atomic<int> result{0};
};

Result fill_piece(Vram& vram, std::uint64_t address, std::uint64_t size) noexcept {
    for (std::uint64_t done = 0; done < size; done += sizeof undefined_bytes) {
        const Result result = vram.write(address + done, undefined_bytes, sizeof undefined_bytes);
        if (result != Result::success) {
            return result;
        }
    }
    return Result::success;
}

void fill_pieces(void* argument) noexcept {
    FillJob& job = *static_cast<FillJob*>(argument);
    std::uint64_t mine = job.next_piece.fetch_add(1);
    std::uint64_t piece = 0;
    for_each_segment(*job.driver, [&](Vram& vram, std::uint64_t address, Segment& segment) {
        const std::uint64_t wanted = job.half ? segment.size / 2 : segment.size;
        for (std::uint64_t offset = 0; offset < wanted; offset += kPieceBytes, ++piece) {
            if (piece != mine || job.result.load() != 0) {
                continue;
            }
            const Result result =
                fill_piece(vram, address + offset, std::min(wanted - offset, kPieceBytes));
            if (result != Result::success) {
                job.result = static_cast<int>(result);
            }
            mine = job.next_piece.fetch_add(1);
        }
    });
}

Result fill_undefined(Driver& driver, bool half) noexcept {
    std::memset(undefined_bytes, kUndefined, sizeof undefined_bytes);
    FillJob job{&driver, half};
    HelperThreads::run(HelperThreads::kMax, fill_pieces, &job);
    return static_cast<Result>(job.result.load());
}

bool has_context_on(const ChannelRequest& request, const Uuid& gpu) noexcept {
    const Uuid* end = request.contexts + request.context_count;
    return std::find(request.contexts, end, gpu) != end;
}

bool write_at(int file, const void* bytes, std::size_t size, std::uint64_t offset) noexcept {
    return syscall(SYS_pwrite64, file, bytes, size, offset) == static_cast<long>(size);
}

/// Describes all memory in a new file.
Result make_table(Driver& driver, const OperationPlan& plan, int& made) noexcept {
    const int file = static_cast<int>(syscall(SYS_memfd_create, "cuda-storage", MFD_CLOEXEC));
    if (file < 0) {
        return Result::operating_system;
    }
    StorageTable table;
    table.d2h_ms_per_gib = plan.direct_d2h_ms_per_gib;
    table.h2d_ms_per_gib = plan.direct_h2d_ms_per_gib;
    std::uint64_t end = sizeof table;
    bool written = true;
    for (unsigned i = 0; i < driver.objects.device_count; ++i) {
        Device& device = driver.objects.devices[i];
        if (device.vram.segments().empty()) {
            continue;
        }
        StorageTable::Entry& entry = table.devices[table.device_count++];
        entry.gpu = device.uuid;
        entry.memory = device.vram.memory();
        for (const auto& [address, segment] : device.vram.segments()) {
            const StorageRun run{device.vram.offset_of(address), segment.size};
            written = written && write_at(file, &run, sizeof run, end);
            end += sizeof run;
            ++entry.run_count;
        }
    }
    if (!written || !write_at(file, &table, sizeof table, 0)) {
        syscall(SYS_close, file);
        return Result::operating_system;
    }
    made = file;
    return Result::success;
}

void begin(Driver& driver, const ChannelRequest& request, int table, ProcessState state) noexcept {
    driver.storage.table = table;
    driver.storage.operation = request.id;
    driver.state = state;
}

void end(Driver& driver, ProcessState state) noexcept {
    if (driver.storage.table >= 0) {
        syscall(SYS_close, driver.storage.table);
    }
    driver.storage.table = -1;
    driver.storage.operation = 0;
    driver.state = state;
}

Result give_up_gpus(Driver& driver) noexcept {
    const PassingFd placeholder(eventfd(0, 0));
    if (placeholder.get() < 0) {
        return Result::operating_system;
    }
    settle_events(driver);
    release_gpus(driver, placeholder.get());
    return Result::success;
}

Result finish_checkpoint(Driver& driver) noexcept {
    const Result result = give_up_gpus(driver);
    if (result == Result::success) {
        driver.storage.contents_outside = true;
        end(driver, ProcessState::checkpointed);
    }
    return result;
}

/// Whether nobody holds the table.
bool is_abandoned(const Driver& driver) noexcept {
    struct flock lock {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    return syscall(SYS_fcntl, driver.storage.table, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

Result take_and_fill(Driver& driver, const OperationPlan& plan, const DaemonInfo& now,
                     const unsigned (&gpus)[kMaxGpus]) noexcept {
    const bool half =
        plan.action == FaultAction::hang_half || plan.action == FaultAction::end_thread;
    Result result = take_gpus(driver, now, gpus, driver.had_context);
    const bool fills = plan.undefined != 0;
    if (result == Result::success && half && fills) {
        result = fill_undefined(driver, true);
    }
    fail_midway(plan);
    if (result == Result::success && plan.action == FaultAction::oom) {
        result = Result::out_of_memory;
    }
    if (result == Result::success && fills) {
        result = fill_undefined(driver, false);
    }
    if (result == Result::success && driver.had_context) {
        result = reload_modules(driver);
    }
    return result;
}

} // namespace

Result begin_storage_checkpoint(Driver& driver, const ChannelRequest& request,
                                const OperationPlan& plan) noexcept {
    for (unsigned i = 0; i < driver.objects.device_count; ++i) {
        const Device& device = driver.objects.devices[i];
        if (device.vram.owns_addresses() && !has_context_on(request, device.uuid)) {
            return Result::invalid_context;
        }
    }
    if (driver.link.is_open() && driver.link.sticky_error() != Result::success) {
        return driver.link.sticky_error();
    }
    int table = -1;
    Result result = make_table(driver, plan, table);
    fail_midway(plan);
    if (result == Result::success && plan.action == FaultAction::oom) {
        result = Result::out_of_memory;
    }
    if (result == Result::success) {
        result = open_later_event(driver.channel, driver.info.cloexec != 0);
    }
    if (result != Result::success) {
        if (table >= 0) {
            syscall(SYS_close, table);
        }
        return result;
    }
    begin(driver, request, table, ProcessState::checkpointing);
    return Result::success;
}

Result begin_storage_restore(Driver& driver, const ChannelRequest& request,
                             const OperationPlan& plan, bool& poisoned) noexcept {
    DaemonInfo now{};
    if (!ask_info(now)) {
        return Result::operating_system;
    }
    unsigned gpus[kMaxGpus] = {};
    Result result = choose_gpus(driver, now, request.pairs, request.pair_count, gpus);
    for (unsigned i = 0; i < driver.objects.device_count && result == Result::success; ++i) {
        if (driver.objects.devices[i].vram.owns_addresses() &&
            !has_context_on(request, now.gpus[gpus[i]].uuid)) {
            result = Result::invalid_context;
        }
    }
    if (result != Result::success) {
        return result;
    }
    result = take_and_fill(driver, plan, now, gpus);
    int table = -1;
    if (result == Result::success) {
        adopt_gpus(driver, now, gpus);
        result = make_table(driver, plan, table);
    }
    if (result != Result::success) {
        poisoned = true;
        static_cast<void>(give_up_gpus(driver));
        return result;
    }
    begin(driver, request, table, ProcessState::restoring);
    return Result::success;
}

Result complete_storage(Driver& driver, const ChannelRequest& request) noexcept {
    if (request.storage == 0 || request.storage != driver.storage.operation) {
        return Result::illegal_state;
    }
    if (driver.state.load() == ProcessState::restoring) {
        if (request.undo != 0) { // without its contents it can only be given up
            static_cast<void>(give_up_gpus(driver));
            end(driver, ProcessState::failed);
            return Result::success;
        }
        driver.storage.contents_outside = false;
        end(driver, ProcessState::locked);
        return Result::success;
    }
    if (request.undo != 0) {
        end(driver, ProcessState::locked); // the GPUs have everything still
        return Result::success;
    }
    return finish_checkpoint(driver);
}

void end_abandoned_storage(Driver& driver) noexcept {
    if (driver.storage.operation == 0 || !is_abandoned(driver)) {
        return;
    }
    if (driver.state.load() == ProcessState::checkpointing) {
        static_cast<void>(finish_checkpoint(driver)); // without descriptors: the next request tries
    } else if (driver.state.load() == ProcessState::restoring) {
        static_cast<void>(give_up_gpus(driver));
        end(driver, ProcessState::failed);
    }
}

} // namespace gpustasis::emulator
