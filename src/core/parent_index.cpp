// SPDX-License-Identifier: Apache-2.0
#include "core/parent_index.hpp"

#include "core/chunk_io.hpp"
#include "core/error.hpp"
#include "core/image_metadata.hpp"
#include "core/image_reader.hpp"

#include <sys/random.h>

#include <bit>
#include <cerrno>
#include <cstring>
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

// What the index needs of a chunk, whose stored bytes are in source number `source`.
ParentIndex::Place place_of(const ChunkInfo& chunk, std::uint16_t source) {
    return {.plain_hash = chunk.hash,
            .offset = chunk.offset,
            .stored_hash = chunk.stored_hash,
            .stored_size = chunk.stored_size,
            .plain_size = chunk.plain_size,
            .source = source,
            .encoding = chunk.encoding};
}

/// The image of `task` in the directory at `depth`.
ImageReader open_image(Lineage& lineage, std::uint32_t depth, const Id& checkpoint_id,
                       const ManifestTask& task) {
    const auto opened = lineage.opened(depth, task.image_name());
    ImageReader image = opened ? ImageReader::from_input(opened, task.image_name())
                               : ImageReader::open(lineage.directory(depth), task.image_name());
    const ImageInfo& info = image.info();
    if (image.digest() != task.digest || info.checkpoint_id != checkpoint_id ||
        info.pid != task.pid || info.kind != task.kind)
        throw Error(Errc::corrupt_data, lineage.path(depth) + "/" + task.image_name() +
                                            " is not the image that its manifest lists");
    return image;
}

Source source_of(const ImageReader& image, std::uint32_t depth) {
    const ImageInfo& info = image.info();
    return {.checkpoint_id = info.checkpoint_id,
            .digest = image.digest(),
            .file_size = image.file_size(),
            .pid = info.pid,
            .depth = depth,
            .kind = info.kind};
}

} // namespace

ParentIndex::ParentIndex(std::uint32_t chunk_size)
    : chunk_size_(chunk_size == 0 ? kDefaultChunkSize : chunk_size) {
    build_table();
}

ParentIndex ParentIndex::read(Lineage& lineage) {
    ParentIndex index;
    index.chunk_size_ = 0; // not known yet
    index.manifest_ = lineage.manifest(1);
    for (const ManifestTask& task : index.manifest_.tasks)
        if (task.externalized)
            index.add_image(lineage, task);
    if (index.chunk_size_ == 0)
        throw Error(Errc::bad_argument, lineage.path(1) + " holds no memory to build on");
    index.files_.resize(index.sources_.size());
    for (const std::uint16_t number : index.order())
        index.files_[number] = index.find_file(lineage, number);
    index.build_table();
    return index;
}

void ParentIndex::reopen(Lineage& lineage) {
    for (const std::uint16_t number : order())
        files_[number] = find_file(lineage, number);
}

void ParentIndex::add_image(Lineage& lineage, const ManifestTask& task) {
    const ImageReader image = open_image(lineage, 1, manifest_.checkpoint_id, task);
    const ImageInfo& info = image.info();
    if (chunk_size_ != 0 && chunk_size_ != info.chunk_size)
        throw Error(Errc::corrupt_data, lineage.path(1) + " has images of different chunk sizes");
    chunk_size_ = info.chunk_size;

    std::vector<std::uint16_t> numbers; // by the image's own numbers of sources
    numbers.push_back(add_source(source_of(image, 1)));
    for (Source source : info.sources) {
        ++source.depth;
        numbers.push_back(add_source(source));
    }
    for (std::uint64_t number = 0; number < image.chunk_count(); ++number)
        if (const ChunkInfo chunk = image.chunk(number); chunk.encoding != Encoding::zero)
            places_.push_back(place_of(chunk, numbers[chunk.source]));
}

void ParentIndex::add(Lineage& lineage, const Id& checkpoint_id, const ManifestTask& task,
                      const std::string& owner) {
    if (sources_.size() == format::kMaxSources)
        return;
    const ImageReader image = open_image(lineage, 0, checkpoint_id, task);
    if (image.info().chunk_size != chunk_size_)
        throw Error(Errc::bad_argument, task.image_name() + " has another chunk size");
    const Source own = source_of(image, 0);
    if (numbers_.contains({own.depth, own.pid, own.kind}))
        throw Error(Errc::bad_argument, task.image_name() + " is known already");
    files_.push_back({.file = lineage.file(own), .input = nullptr});
    const std::uint16_t source = add_source(own);
    owners_.resize(sources_.size());
    owners_[source] = owner;
    for (std::uint64_t number = 0; number < image.chunk_count(); ++number)
        if (const ChunkInfo chunk = image.chunk(number);
            chunk.encoding != Encoding::zero && chunk.source == 0)
            add_place(place_of(chunk, source));
}

void ParentIndex::forget_held_by(const ImageReader& image) {
    std::vector<bool> forgotten(places_.size());
    for (std::uint64_t number = 0; number < image.chunk_count(); ++number) {
        const ChunkInfo chunk = image.chunk(number);
        if (chunk.encoding == Encoding::zero || chunk.source != 0)
            continue;
        if (const std::uint32_t slot = table_[slot_number(chunk.hash, chunk.plain_size)]; slot != 0)
            forgotten[slot - 1] = true;
    }
    std::vector<Place> kept; // of content that is there many times, all or none
    for (const Place& place : places_)
        if (!forgotten[table_[slot_number(place.plain_hash, place.plain_size)] - 1])
            kept.push_back(place);
    places_ = std::move(kept);
    build_table();
}

// What is in the clear is opened for a reader's own way to read; it is held from now on.
ParentIndex::SourceFile ParentIndex::find_file(Lineage& lineage, std::size_t source) const {
    if (lineage.is_sealed())
        return {.file = nullptr, .input = lineage.input(sources_[source], IoMode::buffered)};
    return {.file = lineage.file(sources_[source]), .input = nullptr};
}

std::shared_ptr<const ImageInput> ParentIndex::input(std::size_t source, IoMode io) const {
    const SourceFile& found = files_[source];
    if (found.input)
        return found.input;
    return std::make_shared<const ChunkInput>(found.file, 0, sources_[source].file_size, io);
}

std::vector<std::uint16_t> ParentIndex::order() const {
    std::vector<std::uint16_t> numbers;
    numbers.reserve(numbers_.size());
    for (const auto& [place, number] : numbers_)
        numbers.push_back(number);
    return numbers;
}

// What was stored although it was known is known from there: the place before was found damaged, or is
// another owner's.
void ParentIndex::add_place(const Place& place) {
    std::uint32_t& slot = table_[slot_number(place.plain_hash, place.plain_size)];
    if (slot != 0) {
        places_[slot - 1] = place;
        return;
    }
    places_.push_back(place);
    slot = static_cast<std::uint32_t>(places_.size());
    if (places_.size() * 2 >= table_.size())
        build_table();
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
    if (slot == 0)
        return nullptr;
    const Place& place = places_[slot - 1];
    const bool of_other = sources_[place.source].depth == 0 && owners_[place.source] != owner_;
    return of_other ? nullptr : &place;
}

} // namespace gpustasis
