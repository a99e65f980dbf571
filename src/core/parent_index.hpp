// SPDX-License-Identifier: Apache-2.0
/// What an image that is to be made can refer to, by content: the chunks of its checkpoint's parent, and
/// those of the images that its checkpoint has already.
#pragma once

#include "core/chunk_codec.hpp"
#include "core/direct_io.hpp"
#include "core/image_info.hpp"
#include "core/image_input.hpp"
#include "core/lineage.hpp"
#include "core/manifest.hpp"

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace gpustasis {

class ImageReader;

/// Built from the indexes of images; no chunk is read. Holds about 56 bytes a chunk that is not zero.
/// Reading is safe from several threads.
class ParentIndex {
public:
    /// Of a checkpoint without a parent: nothing yet. `chunk_size` is that of all of its images; 0: the
    /// default one.
    explicit ParentIndex(std::uint32_t chunk_size = 0);

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

    /// Open the files that it refers to anew, in `lineage`, which is that of read(): in a process that does not have what
    /// they were opened by. Not while another thread reads. Throws Error: io, corrupt_data, as ChainFiles::open().
    void reopen(Lineage& lineage);

    /// Know the chunks that the image of `task` holds, which is complete in the directory at depth 0 of
    /// `lineage`: images written from now on for the same `owner` may refer to it. Where as many sources as there can be are
    /// known, it does nothing. Not while another thread reads.
    /// Throws Error: io, corrupt_data if it is not the image of `task` and `checkpoint_id`;
    /// bad_argument if it has another chunk size.
    void add(Lineage& lineage, const Id& checkpoint_id, const ManifestTask& task,
             const std::string& owner = {});

    /// Not to know what the parent has of the chunks that `image` holds itself: they were stored anew, because the parent's
    /// were found damaged. Not while another thread reads.
    void forget_held_by(const ImageReader& image);

    /// Whose the next images are: of what was added, find() finds what has this owner. A task that
    /// can choose its memory could make a chunk with the hash of another's; what it gives to one that
    /// it could change anyhow does no harm.
    void write_for(const std::string& owner) { owner_ = owner; }

    /// Of the parent; without one, that of no checkpoint.
    const Manifest& manifest() const noexcept { return manifest_; }
    /// Of all images; another one would match nothing.
    std::uint32_t chunk_size() const noexcept { return chunk_size_; }
    std::size_t size() const noexcept { return places_.size(); }

    /// As seen from the checkpoint to be made, in no order.
    const std::vector<Source>& sources() const noexcept { return sources_; }

    /// The numbers of all sources(), ascending by depth, then pid, then kind.
    std::vector<std::uint16_t> order() const;

    /// The image of sources()[source], which is open. Throws Error: unsupported, io, as ChunkInput.
    std::shared_ptr<const ImageInput> input(std::size_t source, IoMode io) const;

    /// The chunk with this content, or nullptr if none is known, or it is another owner's.
    const Place* find(const Id& plain_hash, std::uint32_t plain_size) const noexcept;

private:
    struct SourceFile {
        std::shared_ptr<const UniqueFd> file;
        std::shared_ptr<const ImageInput> input; ///< of what is not in the clear, in its place
    };
    SourceFile find_file(Lineage& lineage, std::size_t source) const;
    void add_image(Lineage& lineage, const ManifestTask& task);
    std::uint16_t add_source(const Source& source);
    void add_place(const Place& place);
    void build_table();
    /// The slot that this content has, or would get.
    std::size_t slot_number(const Id& plain_hash, std::uint32_t plain_size) const noexcept;

    Manifest manifest_;
    std::uint32_t chunk_size_;
    std::vector<Source> sources_;
    /// Of sources_, by depth, pid and kind.
    std::map<std::tuple<std::uint32_t, std::uint32_t, MemoryKind>, std::uint16_t> numbers_;
    std::vector<SourceFile> files_;   ///< of sources_
    std::vector<std::string> owners_; ///< of sources_; empty: of the parent
    std::string owner_;
    std::vector<Place> places_;
    std::array<std::uint64_t, 2> multipliers_{};
    std::vector<std::uint32_t> table_; ///< open addressing: number of a place + 1; 0: free
};

} // namespace gpustasis
