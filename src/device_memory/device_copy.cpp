// SPDX-License-Identifier: Apache-2.0
#include "device_memory/device_copy.hpp"

#include "core/chunk_codec.hpp"
#include "core/error.hpp"

#include <algorithm>
#include <cstring>

namespace gpustasis {
namespace {

constexpr std::uint64_t kBlock = 4U << 20; // copied at once from a GPU; no chunk is larger
constexpr std::size_t kBlocks = CopyLane::kSize / kBlock;
constexpr std::uint64_t kPiece = 256U << 10; // copied at once to a GPU, at most
constexpr std::size_t kPieces = CopyLane::kSize / kPiece;
// Lent at once: what is not can be copied meanwhile.
constexpr std::size_t kMostLentBlocks = kBlocks / 2;
constexpr std::size_t kMostLentPieces = kPieces / 2;

/// The device that has all `size` bytes from `address`, as its region counts them.
template <class Devices>
auto& find(const Devices& devices, std::uint64_t address, std::size_t size) {
    const std::size_t number = device_number(address);
    if (number >= devices.size() || devices[number] == nullptr ||
        device_offset(address) > whole_pages(devices[number]->size) ||
        size > whole_pages(devices[number]->size) - device_offset(address))
        throw Error(Errc::bad_argument,
                    "no GPU has " + std::to_string(size) + " bytes at " + std::to_string(address));
    return *devices[number];
}

template <class Device>
std::vector<std::unique_ptr<Device>>
make(CustomStorage& storage, const std::vector<NumberedDevice>& devices, MovedAt& moved_at) {
    std::vector<std::unique_ptr<Device>> made;
    for (const NumberedDevice& device : devices) {
        if (device.memory.size == 0) // no lane was made for it, and nothing is to be copied
            continue;
        if (made.size() <= device.number)
            made.resize(device.number + 1);
        made[device.number] = std::make_unique<Device>(storage, device.memory, moved_at);
    }
    return made;
}

} // namespace

void touch(MovedAt& moved_at) noexcept {
    moved_at.store(std::chrono::steady_clock::now().time_since_epoch().count(),
                   std::memory_order_relaxed);
}

// Block b goes to slot b modulo kBlocks, once all of the block before it there was read.
struct DeviceSource::Device {
    Device(CustomStorage& storage, const DeviceMemory& memory, MovedAt& moved)
        : size(memory.size), lane(storage, memory), moved_at(moved),
          block_count((memory.size + kBlock - 1) / kBlock) {
        for (std::size_t i = 0; i < kBlocks; ++i)
            slots[i].block = i;
        try {
            for (std::size_t stream = 0; stream < CopyLane::kStreams; ++stream)
                threads.emplace_back([this, stream] { copy(stream); });
        } catch (...) {
            end();
            throw;
        }
    }
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;
    ~Device() { end(); }

    void cancel() noexcept {
        {
            const std::lock_guard lock(mutex);
            ends = true;
        }
        changed.notify_all();
    }

    void end() noexcept {
        cancel();
        for (std::thread& thread : threads)
            thread.join();
    }

    struct Slot {
        std::uint64_t block = 0; ///< whose turn it is
        std::uint64_t left = 0;  ///< bytes of it that are there and not read; 0: not there yet
        std::uint64_t lent = 0;  ///< bytes of those
    };

    std::uint64_t size_of(std::uint64_t block) const noexcept {
        return std::min(kBlock, size - block * kBlock);
    }
    std::byte* memory_of(std::uint64_t block) const noexcept {
        return lane.memory() + block % kBlocks * kBlock;
    }

    void copy(std::size_t stream) noexcept {
        try {
            std::unique_lock lock(mutex);
            while (!ends && next < block_count) {
                const std::uint64_t block = next++;
                Slot& slot = slots[block % kBlocks];
                changed.wait(lock, [&] { return ends || slot.block == block; });
                if (ends)
                    return;
                lock.unlock();
                lane.to_host(stream, memory_of(block), block * kBlock, size_of(block));
                lane.wait(stream);
                touch(moved_at);
                lock.lock();
                slot.left = size_of(block);
                changed.notify_all();
            }
        } catch (...) {
            const std::lock_guard lock(mutex);
            if (!failure)
                failure = std::current_exception();
            changed.notify_all();
        }
    }

    void read(std::uint64_t offset, MutBytes out) {
        if (offset + out.size() > size) { // what the region has more than the GPU
            const std::size_t real = offset < size ? size - offset : 0;
            std::ranges::fill(out.subspan(real), std::byte{0});
            out = out.first(real);
        }
        while (!out.empty()) {
            const std::uint64_t block = offset / kBlock;
            const std::uint64_t within = offset % kBlock;
            const std::size_t count = std::min<std::uint64_t>(out.size(), size_of(block) - within);
            await(block);
            std::memcpy(out.data(), memory_of(block) + within, count);
            have_read(block, count);
            out = out.subspan(count);
            offset += count;
        }
    }

    MutBytes lend(std::uint64_t offset, std::size_t count) {
        const std::uint64_t block = offset / kBlock;
        if (count == 0 || offset + count > size || (offset + count - 1) / kBlock != block)
            return {};
        await(block);
        const std::lock_guard lock(mutex);
        Slot& slot = slots[block % kBlocks];
        if (slot.lent == 0 && lent_blocks == kMostLentBlocks)
            return {};
        lent_blocks += slot.lent == 0 ? 1 : 0;
        slot.lent += count;
        return {memory_of(block) + offset % kBlock, count};
    }

    void take_back(std::uint64_t block, std::size_t count) noexcept {
        {
            const std::lock_guard lock(mutex);
            Slot& slot = slots[block % kBlocks];
            slot.lent -= count;
            lent_blocks -= slot.lent == 0 ? 1 : 0;
        }
        have_read(block, count);
    }

    // `block` is there.
    void await(std::uint64_t block) {
        Slot& slot = slots[block % kBlocks];
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] {
            return ends || failure || (slot.block == block && slot.left != 0) || slot.block > block;
        });
        if (failure)
            std::rethrow_exception(failure);
        if (ends)
            throw Error(Errc::io, "no more memory of a GPU is read");
        if (slot.block > block)
            throw Error(Errc::bad_argument, "memory of a GPU was read twice");
    }

    void have_read(std::uint64_t block, std::size_t count) noexcept {
        Slot& slot = slots[block % kBlocks];
        {
            const std::lock_guard lock(mutex);
            slot.left -= count;
            if (slot.left != 0)
                return;
            slot.block += kBlocks;
        }
        changed.notify_all();
    }

    const std::uint64_t size;
    CustomStorage::Lane lane;
    MovedAt& moved_at;
    const std::uint64_t block_count;
    std::mutex mutex;
    std::condition_variable changed;
    Slot slots[kBlocks];
    std::size_t lent_blocks = 0; ///< of which something is lent
    std::uint64_t next = 0;
    bool ends = false;
    std::exception_ptr failure;
    std::vector<std::thread> threads;
};

DeviceSource::DeviceSource(CustomStorage& storage, const std::vector<NumberedDevice>& devices,
                           MovedAt& moved_at)
    : devices_(make<Device>(storage, devices, moved_at)) {}

DeviceSource::~DeviceSource() = default;

void DeviceSource::cancel() noexcept {
    for (const std::unique_ptr<Device>& device : devices_)
        if (device)
            device->cancel();
}

void DeviceSource::read(std::uint64_t address, MutBytes out) {
    find(devices_, address, out.size()).read(device_offset(address), out);
}

MutBytes DeviceSource::lend(std::uint64_t address, std::size_t size) {
    return find(devices_, address, size).lend(device_offset(address), size);
}

void DeviceSource::take_back(std::uint64_t address, MutBytes lent) noexcept {
    devices_[device_number(address)]->take_back(device_offset(address) / kBlock, lent.size());
}

struct DeviceSink::Device {
    Device(CustomStorage& storage, const DeviceMemory& memory, MovedAt& moved)
        : size(memory.size), lane(storage, memory), moved_at(moved) {
        for (std::size_t i = 0; i < kPieces; ++i)
            pieces[i].number = i;
        if (size != 0) {
            lane.set_zero(0, 0, size);
            lane.wait(0);
        }
        touch(moved_at);
    }

    struct Piece {
        std::size_t number = 0;
        std::uint64_t copy = 0; ///< the last out of it, as its stream counts them; 0: none
    };

    std::size_t stream_of(const Piece& piece) const noexcept {
        return piece.number % CopyLane::kStreams;
    }

    Piece take() {
        std::unique_lock lock(mutex);
        freed.wait(lock, [this] { return free_count != 0; });
        const Piece piece = pieces[first]; // the one whose copy was begun the longest ago
        first = (first + 1) % kPieces;
        --free_count;
        return piece;
    }
    void put_back(const Piece& piece) noexcept {
        {
            const std::lock_guard lock(mutex);
            pieces[(first + free_count++) % kPieces] = piece;
        }
        freed.notify_one();
    }

    void write(std::uint64_t offset, Bytes bytes) {
        if (offset + bytes.size() > size) { // what the region has more than the GPU is zero
            const std::size_t real = offset < size ? size - offset : 0;
            if (!is_zero(bytes.subspan(real)))
                throw Error(Errc::corrupt_data, "the image holds more of a GPU than the " +
                                                    std::to_string(size) +
                                                    " bytes that the driver wants back");
            bytes = bytes.first(real);
        }
        while (!bytes.empty()) {
            const MutBytes host = take_free().first(std::min<std::uint64_t>(bytes.size(), kPiece));
            copy_bytes(bytes.first(host.size()), host.data());
            put(offset, host);
            bytes = bytes.subspan(host.size());
            offset += host.size();
        }
    }

    MutBytes lend(std::uint64_t offset, std::size_t count) {
        if (count == 0 || count > kPiece || offset + count > size)
            return {};
        if (lent.fetch_add(1) >= kMostLentPieces) {
            --lent;
            return {};
        }
        try {
            return take_free().first(count);
        } catch (...) {
            --lent;
            throw;
        }
    }

    // The memory of a piece that no copy uses. To wait for a stream is to wait for all that was begun on it: what was put
    // just now too, at the speed of one GPU. So that is done once for all copies before, and not for each piece.
    MutBytes take_free() {
        Piece piece = take();
        Stream& stream = streams[stream_of(piece)];
        try {
            if (piece.copy > stream.done.load()) {
                const std::lock_guard turn(stream.waited); // who comes next need not wait again
                if (piece.copy > stream.done.load()) {
                    const std::uint64_t begun = stream.begun.load();
                    lane.wait(stream_of(piece));
                    stream.done = begun;
                }
            }
        } catch (...) {
            put_back(piece);
            throw;
        }
        return {lane.memory() + piece.number * kPiece, kPiece};
    }

    void put(std::uint64_t offset, MutBytes host) {
        Piece piece{number_of(host), 0};
        Stream& stream = streams[stream_of(piece)];
        try {
            // Counted when it was begun, under a lock: what is counted, a wait that comes after has waited for.
            const std::lock_guard lock(stream.begins);
            piece.copy = stream.begun.load() + 1;
            lane.to_device(stream_of(piece), host.data(), offset, host.size());
            stream.begun = piece.copy;
            touch(moved_at);
        } catch (...) {
            put_back(piece);
            throw;
        }
        put_back(piece);
    }

    std::size_t number_of(MutBytes host) const noexcept {
        return static_cast<std::size_t>(host.data() - lane.memory()) / kPiece;
    }

    const std::uint64_t size;
    CustomStorage::Lane lane;
    MovedAt& moved_at;
    std::mutex mutex;
    std::condition_variable freed;
    // A ring of those in no use: nothing may fail that gives one back.
    Piece pieces[kPieces];
    struct Stream {
        std::mutex begins;                    ///< held while a copy is begun
        std::mutex waited;                    ///< held while it is waited for
        std::atomic<std::uint64_t> begun = 0; ///< copies
        std::atomic<std::uint64_t> done = 0;  ///< of these, that are known to be
    };
    Stream streams[CopyLane::kStreams];
    std::size_t first = 0;
    std::size_t free_count = kPieces;
    std::atomic<std::size_t> lent = 0;
};

DeviceSink::DeviceSink(CustomStorage& storage, const std::vector<NumberedDevice>& devices,
                       MovedAt& moved_at)
    : devices_(make<Device>(storage, devices, moved_at)) {}

DeviceSink::~DeviceSink() = default;

void DeviceSink::write(std::uint64_t address, Bytes bytes) {
    find(devices_, address, bytes.size()).write(device_offset(address), bytes);
}

void DeviceSink::write_zeros(std::uint64_t, std::uint64_t) {}

MutBytes DeviceSink::lend(std::uint64_t address, std::size_t size) {
    return find(devices_, address, size).lend(device_offset(address), size);
}

void DeviceSink::put(std::uint64_t address, MutBytes lent) {
    Device& device = find(devices_, address, lent.size());
    --device.lent;
    device.put(device_offset(address), lent);
}

void DeviceSink::take_back(std::uint64_t address, MutBytes lent) noexcept {
    Device& device = *devices_[device_number(address)];
    --device.lent;
    device.put_back({device.number_of(lent), 0});
}

void DeviceSink::finish() {
    for (const std::unique_ptr<Device>& device : devices_)
        for (std::size_t stream = 0; device && stream < CopyLane::kStreams; ++stream)
            device->lane.wait(stream);
}

} // namespace gpustasis
