// SPDX-License-Identifier: Apache-2.0
/// What the worker does with GPU memory that the driver hands over to it (custom_storage.hpp): it stores it while the
/// driver waits, and puts it back. The driver knows no way back, so the memory is never in one place alone that may
/// fail: where the image cannot be written, it is kept in this process's memory, and where that is full, it stays where
/// it is, on the GPUs, until one of both works.
#pragma once

#include "core/image_reader.hpp"
#include "core/image_writer.hpp"
#include "cuda_plugin/config.hpp"
#include "cuda_plugin/driver_facts.hpp"
#include "cuda_plugin/driver_library.hpp"
#include "cuda_plugin/task_table.hpp"
#include "cuda_plugin/undo_images.hpp"
#include "device_memory/custom_storage.hpp"
#include "device_memory/device_copy.hpp"

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace gpustasis {

/// Writes images of memory that this process alone can read. It is used in the worker, as fork() has copied it.
class DirectStore {
public:
    DirectStore() = default;
    DirectStore(const DirectStore&) = delete;
    DirectStore& operator=(const DirectStore&) = delete;
    virtual ~DirectStore() = default;

    /// The memory, when it is there.
    struct Memory {
        std::vector<Region> regions;
        MemorySource* source = nullptr;
    };
    /// Write the image of `record`, for which room is reserved first; only then `open` is called. By the key of `images`
    /// it is sealed, if this dump is. Sets record.direct.room_was_reserved and sealed. Throws what `open` throws; as
    /// write_image, FileOutput::reserve, SealedOutput.
    virtual WriteResult write(TaskRecord& record, const DriverFacts& facts,
                              const UndoImages& images, const std::function<Memory()>& open) = 0;
    /// That this needs, beside those of the lineage: the worker keeps no others.
    virtual std::vector<int> descriptors() const = 0;
};

/// The GPUs that the memory in an image of GPU memory goes to.
std::vector<Id> gpus_of(const ImageInfo& info, const std::vector<GpuMove>& moves);

/// Host memory that this process may fill with GPU memory: a memfd has no limit, and where the host has none left, the
/// kernel kills whichever process is the largest.
class KeptRoom {
public:
    /// `bytes` more are about to be written. Throws Error: io, as a disk that is full, if there is no room.
    void take(std::uint64_t bytes);

private:
    std::mutex mutex_;
    std::uint64_t left_ = 0; ///< until it is looked again
};

/// For several tasks from several threads at once. Sets DirectRecord::held.
class DirectWork {
public:
    /// All outlive it. `store`: none in a restore.
    DirectWork(const Config& config, const UndoImages& images, DirectStore* store)
        : config_(config), images_(images), store_(store) {}

    /// initialize(), and CustomStorage::prepare() with the GPUs that task `pid` can see. Throws as these.
    void prepare(DriverLibrary& driver, pid_t pid, const std::vector<Id>& gpus, std::size_t used);

    /// CustomStorage::prepare() for tasks that will be there soon, after initialize(). What cannot be prepared now is told
    /// by prepare() then.
    void prepare_ahead(DriverLibrary& driver, const std::vector<Id>& gpus,
                       std::size_t used) noexcept;

    /// The task is LOCKED, and CHECKPOINTED on return; its image is durable, and what became of it is in the record.
    /// Throws Error: the image was not made. Unless the driver refused, the memory is kept here then, or on the GPUs:
    /// restore() puts it back.
    void checkpoint(DriverLibrary& driver, TaskRecord& record);

    /// The task is CHECKPOINTED, or what checkpoint() has left it as, and LOCKED on return, or as it was if the driver
    /// had refused. Throws Error: its memory is not there yet, it can be tried again; corrupt_data: its memory is lost.
    void restore(DriverLibrary& driver, const TaskRecord& record,
                 const std::vector<GpuMove>& moves);

private:
    struct Held {
        std::mutex mutex; ///< a call that was given up may still run
        // As prepare() was told; of `gpus` the first `used` hold memory.
        std::vector<Id> gpus;
        std::size_t used = 0;
        // Each nullptr if there is none.
        std::unique_ptr<CustomStorage::Operation>
            checkpoint; ///< in flight: its memory is on the GPUs alone
        std::unique_ptr<CustomStorage::Operation> restore; ///< in flight: it lacks memory
        std::unique_ptr<ImageReader> kept;                 ///< in this process's memory
        std::unique_ptr<ImageReader>
            stored; ///< that this process has written: open, whoever removes its name
    };
    Held& held(pid_t pid);
    CustomStorage& storage(DriverLibrary& driver);
    std::vector<Id> gpus_to_copy(DriverLibrary& driver, pid_t pid, const Held& mine);
    void store(DriverLibrary& driver, TaskRecord& record, Held& mine);
    void keep(Held& mine, const TaskRecord& record);
    void fill(DriverLibrary& driver, const TaskRecord& record, Held& mine, const ImageReader& image,
              const std::vector<GpuMove>& moves);

    const Config& config_;
    const UndoImages& images_;
    DirectStore* store_;
    std::mutex mutex_;
    std::unique_ptr<CustomStorage> storage_; ///< nullptr: not needed yet
    std::map<pid_t, std::unique_ptr<Held>> held_;
    KeptRoom kept_room_;
};

} // namespace gpustasis
