// SPDX-License-Identifier: Apache-2.0
#include "core/parent_index.hpp"

#include "core/error.hpp"
#include "core/image_metadata.hpp"
#include "core/image_reader.hpp"

#include <sys/random.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>

namespace gpustasis {
namespace {

// Odd multipliers that nobody can know: an index made to have all its hashes in one slot would
// otherwise hold up a dump for hours.
std::array<std::uint64_t, 2> random_multipliers() {
    std::array<std::uint64_t, 2> values{};
    if (::getrandom(values.data(), sizeof values, 0) != sizeof values)
        throw io_error("getrandom", errno);
    return {values[0] | 1, values[1] | 1};
}

} // namespace

ParentIndex ParentIndex::read(Lineage& lineage) {
    ParentIndex index;
    index.manifest_ = read_manifest(lineage.directory(1));
    for (const ManifestTask& task : index.manifest_.tasks)
        if (task.externalized)
            index.add_image(lineage, task);
    if (index.chunk_size_ == 0)
        throw Error(Errc::bad_argument, lineage.path(1) + " holds no memory to build on");
    index.sort_sources();
    for (const Source& source : index.sources_)
        index.files_.push_back(lineage.file(source));
    index.build_table();
    return index;
}

void ParentIndex::add_image(Lineage& lineage, const ManifestTask& task) {
    const ImageReader image = ImageReader::open(lineage.directory(1), task.image_name());
    const ImageInfo& info = image.info();
    if (image.digest() != task.digest || info.checkpoint_id != manifest_.checkpoint_id ||
        info.pid != task.pid || info.kind != task.kind)
        throw Error(Errc::corrupt_data, lineage.path(1) + "/" + task.image_name() +
                                            " is not the image that its manifest lists");
    if (chunk_size_ != 0 && chunk_size_ != info.chunk_size)
        throw Error(Errc::corrupt_data, lineage.path(1) + " has images of different chunk sizes");
    chunk_size_ = info.chunk_size;

    std::vector<std::uint16_t> numbers; // by the image's own numbers of sources
    numbers.push_back(add_source({.checkpoint_id = info.checkpoint_id,
                                  .digest = image.digest(),
                                  .file_size = image.file_size(),
                                  .pid = info.pid,
                                  .depth = 1,
                                  .kind = info.kind}));
    for (Source source : info.sources) {
        ++source.depth;
        numbers.push_back(add_source(source));
    }
    for (std::uint64_t number = 0; number < image.chunk_count(); ++number) {
        const ChunkInfo chunk = image.chunk(number);
        if (chunk.encoding == Encoding::zero)
            continue;
        places_.push_back({.plain_hash = chunk.hash,
                           .offset = chunk.offset,
                           .stored_hash = chunk.stored_hash,
                           .stored_size = chunk.stored_size,
                           .plain_size = chunk.plain_size,
                           .source = numbers[chunk.source],
                           .encoding = chunk.encoding});
    }
}

// By a map: an image may name 65,535 of them, a checkpoint may have as many images, and a search
// through a list for each would hold up a dump for hours.
std::uint16_t ParentIndex::add_source(const Source& source) {
    const std::tuple place{source.depth, source.pid, source.kind};
    if (const auto known = numbers_.find(place); known != numbers_.end()) {
        if (sources_[known->second] != source)
            throw Error(Errc::corrupt_data,
                        "images of the parent contradict each other about theirs");
        return known->second;
    }
    if (source.depth > format::kMaxDepth || sources_.size() == format::kMaxSources)
        throw Error(Errc::bad_argument, "the chain of parents is too long to build on");
    const auto number = static_cast<std::uint16_t>(sources_.size());
    sources_.push_back(source);
    numbers_.emplace(place, number);
    return number;
}

void ParentIndex::sort_sources() {
    std::vector<std::uint16_t> order(sources_.size());
    std::iota(order.begin(), order.end(), std::uint16_t{0});
    const auto place = [&](std::uint16_t i) {
        return std::tuple{sources_[i].depth, sources_[i].pid, sources_[i].kind};
    };
    std::ranges::sort(order, {}, place);
    std::vector<Source> sorted;
    std::vector<std::uint16_t> moved(order.size());
    for (const std::uint16_t old : order) {
        moved[old] = static_cast<std::uint16_t>(sorted.size());
        sorted.push_back(sources_[old]);
    }
    sources_ = std::move(sorted);
    for (Place& known : places_)
        known.source = moved[known.source];
    numbers_.clear();
}

void ParentIndex::build_table() {
    multipliers_ = random_multipliers();
    table_.assign(std::bit_ceil(places_.size() * 2 + 1), 0);
    for (std::size_t number = 0; number < places_.size(); ++number) {
        // Content that is there many times is kept once: the first.
        std::uint32_t& slot =
            table_[slot_number(places_[number].plain_hash, places_[number].plain_size)];
        if (slot == 0)
            slot = static_cast<std::uint32_t>(number + 1);
    }
}

std::size_t ParentIndex::slot_number(const Id& plain_hash,
                                     std::uint32_t plain_size) const noexcept {
    std::array<std::uint64_t, 2> half{};
    static_assert(sizeof half == sizeof plain_hash);
    std::memcpy(half.data(), plain_hash.data(), sizeof half);
    const std::size_t mask = table_.size() - 1;
    const std::uint64_t mixed = half[0] * multipliers_[0] + half[1] * multipliers_[1];
    std::size_t slot = (mixed ^ (mixed >> 32U)) & mask;
    while (table_[slot] != 0) {
        const Place& place = places_[table_[slot] - 1];
        if (place.plain_hash == plain_hash && place.plain_size == plain_size)
            break;
        slot = (slot + 1) & mask;
    }
    return slot;
}

const ParentIndex::Place* ParentIndex::find(const Id& plain_hash,
                                            std::uint32_t plain_size) const noexcept {
    const std::uint32_t slot = table_[slot_number(plain_hash, plain_size)];
    return slot == 0 ? nullptr : &places_[slot - 1];
}

} // namespace gpustasis
