// SPDX-License-Identifier: Apache-2.0
#include "core/image_reader.hpp"

#include "core/chunk_io.hpp"
#include "core/direct_io.hpp"
#include "core/error.hpp"
#include "core/file.hpp"
#include "core/hash.hpp"
#include "core/image_format.hpp"
#include "core/image_frame.hpp"
#include "core/workers.hpp"

#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <iterator>
#include <mutex>
#include <utility>
#include <vector>

namespace gpustasis {
namespace {

using format::align_up;

[[noreturn]] void corrupt(const std::string& what) {
    throw Error(Errc::corrupt_data, what);
}

// Errors of the reader name the file.
template <class Body>
auto named(const std::string& name, const Body& body) {
    try {
        return body();
    } catch (const Error& e) {
        throw Error(e, name + ": " + e.what());
    }
}

UniqueFd duplicate(int fd) {
    UniqueFd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (!copy)
        throw io_error("cannot duplicate a descriptor", errno);
    return copy;
}

} // namespace

struct ImageReader::State : ImageFrame {
    State(const std::string& image_name, IoMode mode, ImageFrame frame)
        : ImageFrame(std::move(frame)), name(image_name), io(mode) {
        if (totals.zero.chunks != 0)
            zero_hash = hash128(std::vector<std::byte>(info.chunk_size));
    }

    std::string name;
    IoMode io;
    std::vector<std::shared_ptr<const ImageInput>>
        inputs; ///< this file; none if only its ends are at hand
    /// info.sources, the first of them first. Written once, and read by nobody before `attached` is
    /// set.
    std::vector<std::shared_ptr<const ImageInput>> others;
    std::atomic<bool> attached = false;
    std::mutex attaching;
    Id zero_hash{}; ///< of a whole chunk of zeros, if there is a zero chunk

    /// Memory that one worker needs for any chunk.
    struct Scratch {
        AlignedBuffer plain;
        AlignedBuffer stored;
    };

    bool reads_directly() const;
    std::uint32_t padded_size(const format::IndexEntry& entry) const;
    const ImageInput& input_of(const format::IndexEntry& entry) const;
    void decode(const format::IndexEntry& entry, MutBytes stored, MutBytes plain) const;
    static void check_stored(const format::IndexEntry& entry, Bytes stored, MutBytes plain);
    static void check_plain(const format::IndexEntry& entry, Bytes plain);
    bool is_sound_zero(const format::IndexEntry& entry, MutBytes plain) const;

    /// Call `use(number, entry, place, scratch)` for every chunk, on `threads` threads; an Error
    /// from it gets the chunk's number and address.
    template <class Use>
    void for_each_chunk(unsigned threads, const Progress& progress, const Use& use) const;
};

// Of what is read of a packed chunk. In another image the padding is that one's business.
std::uint32_t ImageReader::State::padded_size(const format::IndexEntry& chunk) const {
    return chunk.source != 0 ? chunk.stored_size
                             : static_cast<std::uint32_t>(align_up(chunk.stored_size, alignment));
}

const ImageInput& ImageReader::State::input_of(const format::IndexEntry& chunk) const {
    if (chunk.source < inputs.size())
        return *inputs[chunk.source];
    if (chunk.source == 0)
        throw Error(Errc::bad_argument,
                    "its bytes are not at hand: only the ends of the image are");
    if (!attached)
        throw Error(Errc::bad_argument, "lies in another image, and sources are not attached");
    return *others[chunk.source - 1];
}

// Read and decode into `plain`, which is exactly the chunk's size, and check every hash.
void ImageReader::State::decode(const format::IndexEntry& chunk, MutBytes stored,
                                MutBytes plain) const {
    switch (chunk.encoding) {
    case Encoding::zero: std::ranges::fill(plain, std::byte{0}); break;
    case Encoding::raw: input_of(chunk).read(chunk.offset, plain.size(), plain); break;
    case Encoding::lz4: {
        const Bytes read = input_of(chunk).read(chunk.offset, padded_size(chunk), stored);
        if (!is_zero(read.subspan(chunk.stored_size)))
            corrupt("padding behind it is not zero");
        return check_stored(chunk, read.first(chunk.stored_size), plain);
    }
    }
    check_plain(chunk, plain);
}

// `plain` is room for what they decode to.
void ImageReader::State::check_stored(const format::IndexEntry& chunk, Bytes stored,
                                      MutBytes plain) {
    if (stored.size() != chunk.stored_size)
        corrupt("has " + std::to_string(stored.size()) + " stored bytes, not " +
                std::to_string(chunk.stored_size));
    if (is_packed(chunk.encoding) && hash64(stored) != chunk.stored_hash)
        corrupt("stored bytes do not match their checksum");
    if (chunk.encoding == Encoding::raw)
        return check_plain(chunk, stored);
    decode_chunk(chunk.encoding, stored, plain);
    check_plain(chunk, plain);
}

void ImageReader::State::check_plain(const format::IndexEntry& chunk, Bytes plain) {
    if (hash128(plain) != chunk.plain_hash)
        corrupt("content does not match its checksum");
}

// For a zero chunk, without touching memory for most of them.
bool ImageReader::State::is_sound_zero(const format::IndexEntry& chunk, MutBytes plain) const {
    if (chunk.encoding != Encoding::zero)
        return false;
    if (plain.size() != info.chunk_size)
        decode(chunk, {}, plain);
    else if (chunk.plain_hash != zero_hash)
        corrupt("content does not match its checksum");
    return true;
}

bool ImageReader::State::reads_directly() const {
    const auto is_direct = [](const auto& input) { return input->is_direct(); };
    return std::ranges::any_of(inputs, is_direct) ||
           (attached && std::ranges::any_of(others, is_direct));
}

template <class Use>
void ImageReader::State::for_each_chunk(unsigned threads, const Progress& progress,
                                        const Use& use) const {
    FirstFailure failure;
    ProgressMeter meter(progress);
    std::atomic<std::uint64_t> next = 0;
    const Waits waits = reads_directly() ? Waits::device : Waits::processor;
    const unsigned count = worker_count(threads, map.count(), waits);
    std::vector<AlignedBuffer> plain = AlignedBuffer::side_by_side(count, info.chunk_size);
    std::vector<AlignedBuffer> stored = AlignedBuffer::side_by_side(count, info.chunk_size);
    std::atomic<std::size_t> taken = 0;
    run_workers(count, failure, [&] {
        const std::size_t mine = taken.fetch_add(1, std::memory_order_relaxed);
        Scratch scratch{std::move(plain[mine]), std::move(stored[mine])};
        while (!failure.any()) {
            const std::uint64_t number = next.fetch_add(1, std::memory_order_relaxed);
            if (number >= map.count())
                return;
            const ChunkPlace place = map.at(number);
            try {
                use(number, entry(number), place, scratch);
            } catch (const Error& e) {
                blame_chunk(number, e);
            }
            meter.add(place.size);
        }
    });
    meter.finish();
}

ImageReader ImageReader::open(int dir_fd, const std::string& name, IoMode io) {
    return named(name, [&] {
        const auto fd = std::make_shared<const UniqueFd>(open_regular(dir_fd, name));
        auto state =
            std::make_unique<State>(name, io,
                                    read_frame(gpustasis::file_size(fd->get()),
                                               [&](std::uint64_t offset, std::uint64_t size) {
                                                   return read_part(fd->get(), offset, size);
                                               }));
        state->inputs.push_back(
            std::make_shared<const ChunkInput>(fd, 0, state->trailer.file_size, io));
        return ImageReader(std::move(state));
    });
}

ImageReader ImageReader::open_part(int fd, std::uint64_t offset, std::uint64_t length,
                                   const std::string& name) {
    return named(name, [&] {
        const auto copy = std::make_shared<const UniqueFd>(duplicate(fd));
        if (const std::uint64_t whole = gpustasis::file_size(fd);
            offset > whole || length > whole - offset)
            corrupt("lies beyond the end of the file it is in");
        // Members of archives seldom begin where direct I/O could.
        auto state = std::make_unique<State>(
            name, IoMode::buffered, read_frame(length, [&](std::uint64_t at, std::uint64_t size) {
                return read_part(fd, offset + at, size);
            }));
        state->inputs.push_back(
            std::make_shared<const ChunkInput>(copy, offset, length, state->io));
        return ImageReader(std::move(state));
    });
}

ImageReader ImageReader::from_input(std::shared_ptr<const ImageInput> input,
                                    const std::string& name) {
    return named(name, [&] {
        const auto part = [&](std::uint64_t offset, std::uint64_t size) {
            std::vector<std::byte> bytes(size);
            input->read(offset, bytes.size(), bytes);
            return bytes;
        };
        auto state =
            std::make_unique<State>(name, IoMode::buffered, read_frame(input->size(), part));
        state->inputs.push_back(std::move(input));
        return ImageReader(std::move(state));
    });
}

ImageReader ImageReader::from_ends(Bytes header, Bytes tail, std::uint64_t size,
                                   const std::string& name) {
    return named(name, [&] {
        if (header.size() > size || tail.size() > size)
            throw Error(Errc::bad_argument, "its ends are longer than all of it");
        auto state = std::make_unique<State>(name, IoMode::buffered,
                                             read_frame(size, read_ends(header, tail, size)));
        return ImageReader(std::move(state));
    });
}

std::uint64_t ImageReader::tail_size(Bytes trailer, std::uint64_t size) {
    try {
        const std::uint64_t begin = format::unpack_trailer(trailer).metadata_offset;
        if (begin >= format::kHeaderSize &&
            begin <= size - std::min<std::uint64_t>(size, format::kTrailerSize))
            return size - begin;
    } catch (const Error&) { // NOLINT(bugprone-empty-catch): from_ends() says what is wrong
    }
    return format::kTrailerSize;
}

ImageReader::ImageReader(std::unique_ptr<State> state) noexcept : state_(std::move(state)) {}
ImageReader::ImageReader(ImageReader&&) noexcept = default;
ImageReader& ImageReader::operator=(ImageReader&&) noexcept = default;
ImageReader::~ImageReader() = default;

const ImageInfo& ImageReader::info() const noexcept {
    return state_->info;
}
const EncodingTotals& ImageReader::totals() const noexcept {
    return state_->totals;
}
std::uint64_t ImageReader::file_size() const noexcept {
    return state_->trailer.file_size;
}
std::uint32_t ImageReader::alignment() const noexcept {
    return state_->alignment;
}
Id ImageReader::digest() const noexcept {
    return state_->trailer.digest;
}
std::uint64_t ImageReader::chunk_count() const noexcept {
    return state_->map.count();
}

ChunkInfo ImageReader::chunk(std::uint64_t index) const {
    if (index >= chunk_count())
        throw Error(Errc::bad_argument,
                    state_->name + ": there is no chunk " + std::to_string(index));
    const format::IndexEntry entry = state_->entry(index);
    const ChunkPlace place = state_->map.at(index);
    return {.address = place.address,
            .plain_size = place.size,
            .stored_size = entry.stored_size,
            .offset = entry.offset,
            .stored_hash = entry.stored_hash,
            .encoding = entry.encoding,
            .source = entry.source,
            .hash = entry.plain_hash};
}

void ImageReader::attach_sources(Lineage& lineage) {
    named(state_->name, [&] {
        const std::scoped_lock turn(state_->attaching);
        if (state_->attached)
            return;
        std::vector<std::shared_ptr<const ImageInput>> others;
        for (const Source& source : state_->info.sources)
            others.push_back(lineage.input(source, state_->io));
        state_->others = std::move(others);
        state_->attached = true;
    });
}

void ImageReader::read_chunk(std::uint64_t index, MutBytes plain) const {
    if (plain.size() != chunk(index).plain_size)
        throw Error(Errc::bad_argument, state_->name + ": buffer is not of the chunk's size");
    named(state_->name, [&] {
        try {
            const format::IndexEntry entry = state_->entry(index);
            std::vector<std::byte> stored(is_packed(entry.encoding) ? state_->padded_size(entry)
                                                                    : 0);
            state_->decode(entry, stored, plain);
        } catch (const Error& e) {
            state_->blame_chunk(index, e);
        }
    });
}

void ImageReader::check_stored(std::uint64_t index, Bytes stored) const {
    const std::uint32_t plain_size = chunk(index).plain_size;
    named(state_->name, [&] {
        try {
            AlignedBuffer plain(plain_size);
            state_->check_stored(state_->entry(index), stored, plain.bytes().first(plain_size));
        } catch (const Error& e) {
            state_->blame_chunk(index, e);
        }
    });
}

void ImageReader::restore(MemorySink& sink, unsigned threads, bool fresh,
                          const Progress& progress) const {
    named(state_->name, [&] {
        // As in the writer: a device fills our buffers, and not what is lent.
        const bool lends = !state_->reads_directly();
        state_->for_each_chunk(threads, progress,
                               [&](std::uint64_t, const format::IndexEntry& entry,
                                   const ChunkPlace& place, State::Scratch& scratch) {
                                   const MutBytes plain = scratch.plain.bytes().first(place.size);
                                   if (state_->is_sound_zero(entry, plain)) {
                                       if (!fresh)
                                           sink.write_zeros(place.address, place.size);
                                       return;
                                   }
                                   Lent<MemorySink> lent;
                                   if (lends)
                                       lent = Lent<MemorySink>(sink, place.address, place.size);
                                   if (lent.bytes().empty()) {
                                       state_->decode(entry, scratch.stored.bytes(), plain);
                                       sink.write(place.address, plain);
                                   } else {
                                       state_->decode(entry, scratch.stored.bytes(), lent.bytes());
                                       lent.put();
                                   }
                               });
    });
}

void ImageReader::visit_stored(unsigned threads, const UseStored& use,
                               const Progress& progress) const {
    named(state_->name, [&] {
        state_->for_each_chunk(threads, progress,
                               [&](std::uint64_t number, const format::IndexEntry& entry,
                                   const ChunkPlace& place, State::Scratch& scratch) {
                                   const MutBytes plain = scratch.plain.bytes().first(place.size);
                                   if (state_->is_sound_zero(entry, plain))
                                       return;
                                   state_->decode(entry, scratch.stored.bytes(), plain);
                                   use(number,
                                       is_packed(entry.encoding)
                                           ? Bytes(scratch.stored.bytes()).first(entry.stored_size)
                                           : Bytes(plain));
                               });
    });
}

void ImageReader::verify(unsigned threads, const Progress& progress) const {
    visit_stored(threads, [](std::uint64_t, Bytes) {}, progress);
}

} // namespace gpustasis
