// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/direct_work.hpp"

#include "core/chunk_io.hpp"
#include "core/error.hpp"
#include "core/file.hpp"
#include "core/lineage.hpp"
#include "core/unique_fd.hpp"
#include "cuda_plugin/memory_room.hpp"
#include "cuda_plugin/proc.hpp"
#include "dropped_memory/drop_record.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <string>
#include <thread>
#include <utility>

namespace gpustasis {
namespace {

using Clock = std::chrono::steady_clock;

std::string name(const TaskRecord& record) {
    return "pid " + std::to_string(record.pid);
}

std::uint64_t ns_since(Clock::time_point begin) {
    return static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin).count());
}

/// An image in memory that no path leads to.
class MemoryOutput final : public ImageOutput {
public:
    explicit MemoryOutput(KeptRoom& room)
        : room_(room), fd_(::memfd_create("gpustasis-kept", MFD_CLOEXEC)),
          chunks_(fd_.get(), IoMode::buffered, 1) {
        if (!fd_)
            throw io_error("memfd_create", errno);
    }
    void write(std::uint64_t offset, MutBytes buffer, std::size_t size) override {
        room_.take(size);
        chunks_.write(offset, buffer, size);
    }
    void put(std::uint64_t offset, Bytes bytes) override {
        room_.take(bytes.size());
        write_at(fd_.get(), offset, bytes);
    }
    void commit(std::uint64_t size) override { size_ = size; }
    bool is_direct() const noexcept override { return false; }

    ImageReader reader() const {
        return ImageReader::open_part(fd_.get(), 0, size_, "the image in memory");
    }

private:
    KeptRoom& room_;
    UniqueFd fd_;
    ChunkOutput chunks_;
    std::uint64_t size_ = 0;
};

/// Set `flag` of `direct` (asking or restoring) before the driver is asked. criu sets `ending` before it looks at the flags,
/// so that a worker is killed before the driver is asked, or not at all.
void announce(const DirectRecord& direct, std::atomic<bool>& flag) {
    flag = true;
    while (direct.ending) { // until criu has decided, or this worker has seen that it died
        flag = false;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        flag = true;
    }
}

/// From now on nothing is copied, and the driver has its whole time. Before `held` is false: at no moment may this process
/// look as if nothing was lost with it.
void begin_completing(const DirectRecord& direct) {
    touch(direct.moved_at);
    direct.completing = true;
}

/// The operation ends, and the mapping with it: whatever was copied by then is what there is. The driver has its whole
/// time for it, from now on.
void complete(std::unique_ptr<CustomStorage::Operation>& held, const DirectRecord& direct) {
    const std::unique_ptr<CustomStorage::Operation> operation = std::move(held);
    begin_completing(direct);
    try {
        operation->complete();
        touch(direct.moved_at); // the driver begins with the next one only now
    } catch (...) {
        direct.completing = false;
        throw;
    }
    direct.completing = false;
}

// Another dump may have had the driver checkpoint the task since: its memory is in that one's image. Throws Error: corrupt_data.
void require_same_checkpoint(const TaskRecord& record) {
    const std::optional<DropRecord> known =
        DropRecords({}, DropRecords::kCheckpointed).find(identity_of(record));
    if (known && known->checkpoint_id != record.checkpoint_id)
        throw Error(Errc::corrupt_data, name(record) + " was checkpointed again since, as " +
                                            id_text(known->checkpoint_id) +
                                            ": its memory is not that of " +
                                            id_text(record.checkpoint_id));
}

std::vector<driver::GpuPair> pairs_of(const std::vector<GpuMove>& moves) {
    std::vector<driver::GpuPair> pairs(moves.size());
    for (std::size_t i = 0; i < moves.size(); ++i) {
        std::memcpy(pairs[i].old_uuid, moves[i].from.data(), sizeof(pairs[i].old_uuid));
        std::memcpy(pairs[i].new_uuid, moves[i].to.data(), sizeof(pairs[i].new_uuid));
    }
    return pairs;
}

} // namespace

std::vector<Id> gpus_of(const ImageInfo& info, const std::vector<GpuMove>& moves) {
    std::vector<Id> gpus;
    for (const std::size_t number : numbers_of(info)) {
        const Id& from = info.gpus[number].uuid;
        const auto move = std::ranges::find(moves, from, &GpuMove::from);
        gpus.push_back(move == moves.end() ? from : move->to);
    }
    return gpus;
}

void KeptRoom::take(std::uint64_t bytes) {
    constexpr std::uint64_t kAskAgain = std::uint64_t{64} << 20;
    const std::lock_guard lock(mutex_);
    if (left_ < bytes) {
        left_ = std::numeric_limits<std::uint64_t>::max();
        for (const MemoryLevel& level : memory_levels("self"))
            left_ = std::min(left_, level.room);
        left_ -= std::min(left_, kAskAgain); // the job and others need some
        if (left_ < bytes)
            throw io_error("keep GPU memory in host memory", ENOSPC);
        left_ = std::min(left_, std::max(bytes, kAskAgain));
    }
    left_ -= bytes;
}

DirectWork::Held& DirectWork::held(pid_t pid) {
    const std::lock_guard lock(mutex_);
    std::unique_ptr<Held>& mine = held_[pid];
    if (!mine)
        mine = std::make_unique<Held>();
    return *mine;
}

CustomStorage& DirectWork::storage(DriverLibrary& driver) {
    const std::lock_guard lock(mutex_);
    if (!storage_)
        storage_ = std::make_unique<CustomStorage>(driver.library(), config_.driver);
    return *storage_;
}

void DirectWork::prepare(DriverLibrary& driver, pid_t pid, const std::vector<Id>& gpus,
                         std::size_t used) {
    driver.initialize();
    storage(driver).prepare(gpus, used);
    Held& mine = held(pid);
    const std::lock_guard one_at_a_time(mine.mutex);
    mine.gpus = gpus;
    mine.used = used;
}

void DirectWork::prepare_ahead(DriverLibrary& driver, const std::vector<Id>& gpus,
                               std::size_t used) noexcept {
    try {
        storage(driver).prepare(gpus, used);
    } catch (const std::exception&) { // NOLINT(bugprone-empty-catch): prepare() tells
    }
}

// Those whose memory has to be copied. The task ran until it was locked, and may have begun to use another one since
// prepare(): NVML is asked for that only if a GPU has no lane at all, as the task waits meanwhile. If others use the lane
// of such a GPU, one is made when the memory is handed over already; if it cannot be, the memory stays on the GPUs, and
// restore() tries again.
std::vector<Id> DirectWork::gpus_to_copy(DriverLibrary& driver, pid_t pid, const Held& mine) {
    if (mine.gpus.empty())
        throw Error(Errc::io, "this worker has not prepared its GPUs");
    if (storage(driver).have_lanes(mine.gpus))
        return {mine.gpus.begin(), mine.gpus.begin() + static_cast<std::ptrdiff_t>(mine.used)};
    std::vector<Id> found;
    for (const ProcessGpus::Gpu& gpu : driver.gpus_of(pid).gpus)
        if (gpu.memory_size != 0)
            found.push_back(gpu.uuid);
    return found.empty() ? mine.gpus : found; // it is not known, so it may be any
}

void DirectWork::checkpoint(DriverLibrary& driver, TaskRecord& record) {
    Held& mine = held(record.pid);
    const std::lock_guard one_at_a_time(mine.mutex);
    try {
        store(driver, record, mine);
    } catch (const std::exception& e) {
        if (!mine.checkpoint) // the driver has refused, or was not asked
            throw;
        std::string text = e.what();
        try {
            keep(mine, record);
        } catch (const std::exception& other) {
            text +=
                std::string("; nor can it be kept in memory (") + other.what() +
                "): it stays on the GPU, and the process suspended, until one of both can be done";
        }
        throw Error(Errc::io, text);
    }
}

void DirectWork::store(DriverLibrary& driver, TaskRecord& record, Held& mine) {
    const DriverFacts facts = read_driver_facts(driver);
    CustomStorage& custom = storage(driver);
    std::optional<DeviceSource> source;
    DirectRecord& direct = record.direct;
    const WriteResult written = store_->write(record, facts, images_, [&] {
        proc::require_pipes_in_thread_names(record.pid);
        const auto begin = Clock::now();
        auto operation = std::make_unique<CustomStorage::Operation>();
        custom.reserve(gpus_to_copy(driver, record.pid, mine), *operation);
        touch(direct.moved_at); // the driver has its whole time, whatever came before
        announce(direct, direct.asking);
        try {
            custom.checkpoint(record.pid, *operation, direct.held);
        } catch (...) {
            direct.asking = false;
            throw;
        }
        direct.asking = false;
        mine.checkpoint = std::move(operation);
        direct.driver_ns = ns_since(begin);
        const auto devices = number_devices(facts.gpu_infos(), *mine.checkpoint);
        const DeviceSizes sizes = sizes_of(devices);
        if (sizes.size() > DirectRecord::kMaxGpus)
            throw Error(Errc::unsupported, "more than " + std::to_string(DirectRecord::kMaxGpus) +
                                               " GPUs of one process");
        for (const auto& [number, size] : sizes) {
            direct.numbers[direct.gpu_count] = static_cast<std::uint32_t>(number);
            direct.sizes[direct.gpu_count++] = size;
        }
        source.emplace(custom, devices, direct.moved_at);
        return DirectStore::Memory{regions_of(sizes), &*source};
    });
    source.reset();
    direct.totals = written.totals;
    direct.file_size = written.file_size;
    direct.damaged_in_parent = written.damaged_in_parent;
    const std::size_t count =
        std::min(written.first_damage.size(), sizeof(direct.first_damage) - 1);
    std::memcpy(direct.first_damage, written.first_damage.data(), count);
    record.digest = written.digest;
    direct.stored = true;
    try { // while the memory is on the GPUs still
        mine.stored = std::make_unique<ImageReader>(images_.open_direct(record));
    } catch (const Error& e) {
        // An image that cannot be opened now is opened by its name when it is needed: it is durable.
        if (e.code() != Errc::io) {
            direct.stored = false;
            throw;
        }
    }
    const auto begin = Clock::now();
    begin_completing(direct);
    direct.held = false;
    complete(mine.checkpoint, direct);
    direct.driver_ns += ns_since(begin);
}

// The whole of it: what of it a medium has taken that has just failed is not to be relied on.
void DirectWork::keep(Held& mine, const TaskRecord& record) {
    const auto devices = number_devices(*mine.checkpoint);
    ImageInfo info;
    info.checkpoint_id = record.checkpoint_id;
    info.pid = record.image_pid;
    info.chunk_size = kDefaultChunkSize;
    for (const NumberedDevice& device :
         devices) // which say where it goes back to, in whatever order
        info.gpus.push_back({.uuid = device.memory.uuid, .name = {}, .memory_size = 0});
    info.of_devices = true;
    info.regions = regions_of(sizes_of(devices));
    MemoryOutput output(kept_room_);
    {
        DeviceSource source(*storage_, devices, record.direct.moved_at);
        write_image(output, info, source, {.threads = config_.threads, .alignment = 1});
    }
    mine.kept = std::make_unique<ImageReader>(output.reader());
    complete(mine.checkpoint, record.direct);
}

void DirectWork::restore(DriverLibrary& driver, const TaskRecord& record,
                         const std::vector<GpuMove>& moves) {
    Held& mine = held(record.pid);
    const std::lock_guard one_at_a_time(mine.mutex);
    if (mine.checkpoint)
        keep(mine, record);
    if (!mine.restore) {
        const ProcessState state = driver.state(record.pid);
        if (state == ProcessState::failed)
            throw Error(Errc::io, "the driver has given the process up (state FAILED)");
        if (state != ProcessState::checkpointed && record.direct.filling)
            throw Error(Errc::corrupt_data,
                        "the GPU memory of " + name(record) +
                            " is lost: the worker has died while it was being put back; end the "
                            "process, whatever the driver says of it");
        if (state != ProcessState::checkpointed) {
            record.direct.held = false;
            end_filling(identity_of(
                record)); // if there is such a record, all was there before it was completed
            return;       // or the driver had refused
        }
        // A worker may have died before it could say that it had stored it.
        if (!mine.kept && !mine.stored && !record.direct.stored && !images_.has_direct(record))
            throw Error(
                Errc::corrupt_data,
                "the GPU memory of " + name(record) +
                    " is lost: the worker that it was handed over to has died before it was "
                    "stored; end the process");
    }
    if (mine.kept)
        fill(driver, record, mine, *mine.kept, moves);
    else if (mine.stored)
        fill(driver, record, mine, *mine.stored, moves);
    else
        fill(driver, record, mine, images_.open_direct(record), moves);
    mine.kept.reset();
    mine.stored.reset();
}

void DirectWork::fill(DriverLibrary& driver, const TaskRecord& record, Held& mine,
                      const ImageReader& image, const std::vector<GpuMove>& moves) {
    CustomStorage& custom = storage(driver);
    const std::vector<driver::GpuPair> pairs = pairs_of(moves);
    if (!mine.restore) {
        driver.initialize(); // this may be another process than the one that has stored it
        proc::require_pipes_in_thread_names(record.pid);
        require_same_checkpoint(record);
        auto operation = std::make_unique<CustomStorage::Operation>();
        begin_filling(identity_of(record));
        record.direct.filling = true;
        touch(record.direct.moved_at); // the driver has its whole time
        announce(record.direct, record.direct.restoring);
        try {
            begin_restore(custom, record.pid, image.info(), pairs, *operation);
        } catch (...) {
            record.direct.restoring = false;
            if (driver.state(record.pid) == ProcessState::checkpointed) {
                record.direct.filling = false;
                end_filling(identity_of(record));
            }
            throw;
        }
        mine.restore = std::move(operation);
        record.direct.held = true; // what is kept is held before
        record.direct.restoring = false;
        touch(record.direct.moved_at);
    }
    const auto devices = number_devices(image.info().gpus, *mine.restore, pairs);
    fill_devices(custom, devices, image, config_.threads, record.direct.moved_at);
    note_filled(identity_of(record));
    record.direct.filling = false; // every byte is there, whoever completes it
    begin_completing(record.direct);
    record.direct.held = mine.kept != nullptr; // else the image has it
    complete(mine.restore, record.direct);
    record.direct.held = false;
    end_filling(identity_of(record));
}

} // namespace gpustasis
