// SPDX-License-Identifier: Apache-2.0
/// What a checkpoint that is to be made can refer to: the chunks of its parent, by content.
#pragma once

#include "core/chunk_codec.hpp"
#include "core/image_info.hpp"
#include "core/lineage.hpp"
#include "core/manifest.hpp"

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

namespace gpustasis {

/// Built from the indexes of all of the parent's images; no chunk is read. Holds about 56 bytes a
/// chunk that is not zero. Reading is safe from several threads.
class ParentIndex {
public:
    /// Where the stored bytes of a chunk lie.
    struct Place {
        Id plain_hash{};
        std::uint64_t offset = 0;
        std::uint64_t stored_hash = 0;
        std::uint32_t stored_size = 0;
        std::uint32_t plain_size = 0;
        std::uint16_t source = 0; ///< index into sources(), not number
        Encoding encoding = Encoding::raw;
    };

    /// Of the checkpoint at depth 1 of `lineage`. Every file that it could refer to is opened in `lineage`
    /// and found to be there and right.
    /// Throws Error: io, corrupt_data, unsupported; bad_argument if that is a checkpoint without
    /// images.
    static ParentIndex read(Lineage& lineage);

    const Manifest& manifest() const noexcept { return manifest_; }
    /// Of all of its images; another one would match nothing.
    std::uint32_t chunk_size() const noexcept { return chunk_size_; }
    std::size_t size() const noexcept { return places_.size(); }

    /// As seen from the checkpoint to be made; ascending by depth, then pid, then kind.
    const std::vector<Source>& sources() const noexcept { return sources_; }

    /// The open file of sources()[source].
    const std::shared_ptr<const UniqueFd>& file(std::size_t source) const { return files_[source]; }

    /// The chunk with this content, or nullptr.
    const Place* find(const Id& plain_hash, std::uint32_t plain_size) const noexcept;

private:
    void add_image(Lineage& lineage, const ManifestTask& task);
    std::uint16_t add_source(const Source& source);
    void sort_sources();
    void build_table();
    /// The slot that this content has, or would get.
    std::size_t slot_number(const Id& plain_hash, std::uint32_t plain_size) const noexcept;

    Manifest manifest_;
    std::uint32_t chunk_size_ = 0;
    std::vector<Source> sources_;
    /// Of sources_ by depth, pid and kind, while they are collected.
    std::map<std::tuple<std::uint32_t, std::uint32_t, MemoryKind>, std::uint16_t> numbers_;
    std::vector<std::shared_ptr<const UniqueFd>> files_; ///< of sources_
    std::vector<Place> places_;
    std::array<std::uint64_t, 2> multipliers_{};
    std::vector<std::uint32_t> table_; ///< open addressing: number of a place + 1; 0: free
};

} // namespace gpustasis
