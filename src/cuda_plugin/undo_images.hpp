// SPDX-License-Identifier: Apache-2.0
/// The images that memory is put back from when a dump is undone, by criu, or by a process beside it.
#pragma once

#include "core/lineage.hpp"
#include "core/parent_index.hpp"
#include "core/unique_fd.hpp"
#include "cuda_plugin/task_table.hpp"
#include "dropped_memory/refill.hpp"
#include "seal/data_key.hpp"

#include <cstddef>
#include <mutex>
#include <optional>

namespace gpustasis {

/// Sealed images need the data key, which no process inherits (seal::Secret): who forks makes a KeyHandover
/// before, and the child takes it, before it does anything else.
class UndoImages {
public:
    /// `lineage` is that of the directory that the images are in, and outlives this, as does the open image directory
    /// `account_in`; -1: that is the same.
    explicit UndoImages(Lineage& lineage, int account_in = -1) noexcept
        : lineage_(lineage), account_in_(account_in) {}

    Lineage& lineage() const noexcept { return lineage_; }
    /// The directory that the account of an undo goes into.
    int account_in() const { return account_in_ < 0 ? lineage_.directory(0) : account_in_; }

    /// The images of this dump are sealed, and all that it is built on; `key` opens them. Throws Error: io.
    void use_key(const seal::DataKey& key);
    /// Wipes it.
    void forget_key() noexcept;
    /// nullptr: the images are in the clear.
    const seal::DataKey* key() const noexcept { return key_ ? &*key_ : nullptr; }

    /// In a process that was forked: `index` is its copy of one whose sealed files the parent has opened, by keys
    /// that are not here. From any thread, while no other uses `index`. Throws as ParentIndex::reopen().
    void reopen(ParentIndex& index) const;

    /// From any thread. Throws as open_dropped().
    ImageReader open(const DroppedTask& task) const;

    /// Whether there is an image under the name of that of `record`, which it has once it is complete, and it is of the
    /// same checkpoint. From any thread. Throws as open_dropped().
    bool has_direct(const TaskRecord& record) const;

    /// The image of the GPU memory of `record` that the driver has handed over, or, of a restore, is to be handed:
    /// that of the checkpoint of the record, and of its digest if that is known. From any thread. Throws as open_dropped().
    ImageReader open_direct(const TaskRecord& record) const;

private:
    friend class KeyHandover;
    ImageReader open_file(const std::string& name) const;
    Lineage& lineage_;
    int account_in_;
    std::optional<seal::DataKey> key_; ///< none: images are in the clear
    mutable std::mutex opening_;
};

/// The key on its way from a process to one that it forks, in a pipe: memory of the kernel's, which is never
/// swapped. Does nothing where there is no key.
class KeyHandover {
public:
    /// Throws Error: io.
    explicit KeyHandover(const UndoImages& images);

    /// In the child: `images` is its copy of the parent's. Throws Error: io if the key's memory cannot be locked.
    void take(UndoImages& images);

private:
    UniqueFd reading_; ///< none: there is no key
    std::size_t size_ = 0;
};

} // namespace gpustasis
