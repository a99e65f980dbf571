// SPDX-License-Identifier: Apache-2.0
#include "driver_emulator/driver/storage_operation.hpp"

#include "driver_emulator/driver/caller.hpp"
#include "driver_emulator/driver/stream_order.hpp"

#include <algorithm>
#include <cstdio>
#include <fcntl.h>
#include <utility>

namespace gpustasis::emulator {
namespace {

int open_of_target(pid_t pid, int fd) noexcept {
    char path[64];
    std::snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, fd);
    return open(path, O_RDWR | O_CLOEXEC);
}

/// Memory of the target on one GPU, before it is mapped.
struct Piece {
    Device* device = nullptr; ///< ours, of that GPU
    int memory = -1;          ///< the file, until a mapping has it
    std::vector<StorageRun> runs;
    std::uint64_t size = 0;
};

/// What is being made of a reply; gives back what has not become an operation's.
struct Offer {
    Offer() = default;
    ~Offer() {
        for (const Piece& piece : pieces) {
            if (piece.memory >= 0) {
                close(piece.memory);
            }
        }
    }
    Offer(const Offer&) = delete;
    Offer& operator=(const Offer&) = delete;

    StorageTable table;
    std::unique_ptr<StorageOperation> operation;
    std::vector<Piece> pieces;
};

bool lock_table(int file) noexcept {
    struct flock lock {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    return fcntl(file, F_SETLK, &lock) == 0;
}

Device* find_gpu(Driver& driver, const Uuid& uuid) noexcept {
    for (unsigned i = 0; i < driver.objects.device_count; ++i) {
        if (driver.objects.devices[i].uuid == uuid) {
            return &driver.objects.devices[i];
        }
    }
    return nullptr;
}

/// Opens what the target offers, while no other caller can ask it.
Result accept(Driver& driver, pid_t pid, const ChannelReply& reply, Offer& offer) {
    offer.operation = std::make_unique<StorageOperation>(open_of_target(pid, reply.table));
    offer.operation->pid = pid;
    offer.operation->id = reply.id;
    const int table = offer.operation->table.get();
    if (table < 0 || !lock_table(table) ||
        pread(table, &offer.table, sizeof offer.table, 0) != sizeof offer.table ||
        offer.table.magic != kTableMagic || offer.table.device_count > kMaxGpus) {
        return Result::operating_system;
    }
    std::uint64_t end = sizeof offer.table;
    for (unsigned i = 0; i < offer.table.device_count; ++i) {
        const StorageTable::Entry& entry = offer.table.devices[i];
        Piece& piece = offer.pieces.emplace_back();
        piece.device = find_gpu(driver, entry.gpu);
        piece.memory = open_of_target(pid, entry.memory);
        piece.runs.resize(entry.run_count);
        const std::size_t bytes = entry.run_count * sizeof(StorageRun);
        if (piece.device == nullptr || piece.memory < 0 ||
            pread(table, piece.runs.data(), bytes, static_cast<off_t>(end)) !=
                static_cast<ssize_t>(bytes)) {
            return Result::operating_system;
        }
        for (const StorageRun& run : piece.runs) {
            piece.size += run.size;
        }
        end += bytes;
    }
    return Result::success;
}

void unmap(Driver& driver, const StorageOperation& operation) {
    for (const StorageDevice& device : operation.devices) {
        driver.objects.streams.erase(static_cast<Stream*>(device.stream));
    }
    for (const std::uint64_t address : operation.addresses) {
        driver.objects.mappings.remove(address);
    }
}

/// Maps a piece in the primary context of its GPU. Caller holds driver.mutex.
Result map(Driver& driver, const StorageTable& table, Piece& piece, StorageOperation& operation) {
    Objects& objects = driver.objects;
    operation.addresses.reserve(operation.addresses.size() + 1);
    operation.devices.reserve(operation.devices.size() + 1);
    if (piece.device->primary == nullptr) {
        return Result::invalid_context; // it was reset meanwhile
    }
    auto stream = std::make_unique<Stream>();
    stream->context = piece.device->primary.get();
    stream->flags = kStreamNonBlocking;
    const std::uint64_t address = objects.mappings.reserve(piece.size);
    if (address == 0) {
        return Result::out_of_memory;
    }
    operation.addresses.push_back(address);
    const LinkRates rates{piece.device->ordinal,
                          piece.device->gpu,
                          {table.d2h_ms_per_gib, table.h2d_ms_per_gib},
                          link_page()};
    objects.mappings.add(std::make_shared<const StorageMapping>(
        address, std::exchange(piece.memory, -1), piece.runs, rates));
    operation.devices.push_back({address, piece.size, stream.get()});
    objects.streams.emplace(stream.get(), std::move(stream));
    return Result::success;
}

/// In the order of our GPUs, whatever the target's is.
Result map_all(Driver& driver, Offer& offer) {
    std::sort(offer.pieces.begin(), offer.pieces.end(),
              [](const Piece& a, const Piece& b) { return a.device->ordinal < b.device->ordinal; });
    const std::lock_guard lock(driver.mutex);
    StorageOperation& operation = *offer.operation;
    Result result = Result::success;
    try {
        for (Piece& piece : offer.pieces) {
            result =
                result == Result::success ? map(driver, offer.table, piece, operation) : result;
        }
        if (result == Result::success) {
            operation.info = {&operation, operation.devices.data(),
                              static_cast<unsigned>(operation.devices.size())};
            driver.objects.operations.emplace(&operation, std::move(offer.operation));
        }
    } catch (const std::bad_alloc&) {
        result = Result::out_of_memory;
    }
    if (result != Result::success) {
        unmap(driver, operation);
    }
    return result;
}

Result finish(const StorageOperation& operation, bool undo) {
    ChannelRequest request{};
    request.operation = Operation::complete;
    request.storage = operation.id;
    request.undo = undo ? 1 : 0;
    ChannelReply reply{};
    return request_operation(operation.pid, request, reply);
}

void add_contexts(Driver& driver, ChannelRequest& request) {
    const std::lock_guard lock(driver.mutex);
    for (unsigned i = 0; i < driver.objects.device_count; ++i) {
        const Device& device = driver.objects.devices[i];
        if (device.primary != nullptr && device.primary_users > 0) {
            request.contexts[request.context_count++] = device.uuid;
        }
    }
}

bool is_own(const Driver& driver, pid_t pid) noexcept {
    RestoreThread thread;
    return find_restore_thread(pid, thread) == Result::success &&
           thread.tid == driver.restore_thread;
}

Result begin(Driver& driver, pid_t pid, ChannelRequest& request, StorageInfo** out) {
    if (is_own(driver, pid)) {
        return Result::not_supported;
    }
    add_contexts(driver, request);
    request.wants_storage = 1;
    Offer offer;
    ChannelReply reply{};
    Result result = request_operation(pid, request, reply, [&](const ChannelReply& answer) {
        return accept(driver, pid, answer, offer);
    });
    if (offer.operation == nullptr) {
        return result; // of the target, which has begun nothing
    }
    StorageOperation& operation = *offer.operation;
    if (result == Result::success) {
        result = map_all(driver, offer);
    }
    if (result != Result::success) {
        static_cast<void>(finish(operation, true));
        return result;
    }
    *out = &operation.info;
    return Result::success;
}

/// Takes the operation out of the table: from now on its handle is nobody's.
std::unique_ptr<StorageOperation> take(Driver& driver, const void* handle) {
    const std::lock_guard lock(driver.mutex);
    const auto found = driver.objects.operations.find(handle);
    if (found == driver.objects.operations.end()) {
        return nullptr;
    }
    auto operation = std::move(found->second);
    driver.objects.operations.erase(found);
    return operation;
}

/// Waits for the operation's streams. Those whose context was reset are gone, and done.
Result synchronise_streams(Driver& driver, const StorageOperation& operation) {
    std::vector<LanePoint> points;
    std::uint64_t last = 0;
    bool captures = false;
    {
        const std::lock_guard lock(driver.mutex);
        for (const StorageDevice& device : operation.devices) {
            const auto found = driver.objects.streams.find(static_cast<Stream*>(device.stream));
            if (found == driver.objects.streams.end()) {
                continue;
            }
            const Stream& stream = *found->first;
            captures = captures || stream.capture != Capture::none;
            last = std::max(last, stream.last_sequence);
            if (stream.lane != nullptr) {
                points.push_back({stream.lane, stream.lane->submitted()});
            }
        }
    }
    for (const LanePoint& point : points) {
        point.wait();
    }
    const Result done = driver.link.wait(last);
    return captures ? Result::stream_capture_unsupported : done;
}

} // namespace

int begin_storage_operation(pid_t pid, ChannelRequest request, StorageInfo** out) noexcept {
    return call([&](Driver& driver) { return begin(driver, pid, request, out); });
}

int complete_storage_operation(const void* handle) noexcept {
    return call([=](Driver& driver) {
        const auto operation = take(driver, handle);
        if (operation == nullptr) {
            return Result::invalid_value;
        }
        const Result copied = synchronise_streams(driver, *operation);
        {
            const std::lock_guard lock(driver.mutex);
            unmap(driver, *operation);
        }
        // What was copied wrong is not complete: the target is told nothing, and sees its caller gone.
        return copied != Result::success ? copied : finish(*operation, false);
    });
}

} // namespace gpustasis::emulator
