// SPDX-License-Identifier: Apache-2.0
/// The images that memory is put back from when a dump is undone, by criu, or by a process beside it.
#pragma once

#include "core/lineage.hpp"
#include "core/unique_fd.hpp"
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
    /// `lineage` is that of the dump's image directory, and outlives this.
    explicit UndoImages(Lineage& lineage) noexcept : lineage_(lineage) {}

    Lineage& lineage() const noexcept { return lineage_; }

    /// The images of this dump are sealed, and all that it is built on; `key` opens them. Throws Error: io.
    void use_key(const seal::DataKey& key);
    /// Wipes it.
    void forget_key() noexcept;

    /// From any thread. Throws as open_dropped().
    ImageReader open(const DroppedTask& task) const;

private:
    friend class KeyHandover;
    Lineage& lineage_;
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
