// SPDX-License-Identifier: Apache-2.0
#include "core/image_writer.hpp"

#include "core/chunk_codec.hpp"
#include "core/chunk_io.hpp"
#include "core/direct_io.hpp"
#include "core/error.hpp"
#include "core/hash.hpp"
#include "core/image_format.hpp"
#include "core/image_frame.hpp"
#include "core/image_metadata.hpp"
#include "core/workers.hpp"
#include "core/write_queue.hpp"

#include <algorithm>
#include <atomic>
#include <bit>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace gpustasis {
namespace {

/// Gives chunks their places in the order of their numbers, whichever thread is ready first: this
/// is what makes the file the same for any number of threads.
class PlaceInOrder {
public:
    PlaceInOrder(std::uint64_t begin, std::uint64_t alignment)
        : end_(begin), alignment_(alignment) {}

    /// The offset of chunk `index`, once all chunks before it have theirs. nullopt: cancelled.
    std::optional<std::uint64_t> take(std::uint64_t index, std::uint64_t stored_size) {
        std::unique_lock lock(mutex_);
        moved_.wait(lock, [&] { return next_ == index || cancelled_; });
        if (cancelled_)
            return std::nullopt;
        const std::uint64_t offset = end_;
        end_ = format::align_up(end_ + stored_size, alignment_);
        ++next_;
        lock.unlock();
        moved_.notify_all();
        return offset;
    }
    void cancel() noexcept {
        {
            const std::lock_guard lock(mutex_);
            cancelled_ = true;
        }
        moved_.notify_all();
    }
    /// Where the last chunk and its padding end. Once all threads are done.
    std::uint64_t end() const noexcept { return end_; }

private:
    std::mutex mutex_;
    std::condition_variable moved_;
    std::uint64_t next_ = 0;
    std::uint64_t end_;
    const std::uint64_t alignment_;
    bool cancelled_ = false;
};

using format::align_up;

std::vector<std::byte> buffer(std::size_t size) {
    return std::vector<std::byte>(size);
}

// What one thread needs to read a chunk of the parent; of size 0 if none will be.
struct ParentScratch {
    explicit ParentScratch(std::size_t size) : stored(size), plain(size) {}
    AlignedBuffer stored;
    AlignedBuffer plain;
};

// One image being written: what the workers share.
class Pipeline {
public:
    Pipeline(ImageOutput& output, const ImageInfo& info, MemorySource& source,
             const WriteOptions& options)
        : output_(output),
          places_(align_up(format::kHeaderSize, options.alignment), options.alignment),
          source_(source), options_(options), chunk_size_(info.chunk_size),
          map_(info.regions, info.chunk_size), index_(map_.count() * format::kIndexEntrySize),
          zero_hash_(hash128(buffer(info.chunk_size))), threads_(count_threads()),
          makers_(count_makers()),
          queue_(threads_ + makers_, chunk_size_, options.compress ? lz4_limit(chunk_size_) : 0,
                 [this](WriteQueue::Buffer& made) { write(made); }) {
        if (options.parent == nullptr || !options.check_parent)
            return;
        const std::vector<Source>& sources = options.parent->sources();
        for (std::size_t i = 0; i < sources.size(); ++i)
            parent_inputs_.push_back(options.parent->input(i, options.io));
    }

    void run() {
        FirstFailure failure;
        const auto work = [&] {
            try {
                if (started_.fetch_add(1, std::memory_order_relaxed) < makers_)
                    make_chunks(failure);
                queue_.drain();
            } catch (...) {
                failure.record();
                places_.cancel();
                queue_.cancel();
                source_.cancel();
            }
        };
        run_workers(threads_, failure, work);
    }

    std::uint64_t damaged_in_parent() const noexcept { return damaged_; }
    const std::string& first_damage() const noexcept { return first_damage_; }

    // Of the known sources, those that are referred to, in their order, which entries then count by: the
    // file names no image that it does not need.
    std::vector<Source> keep_used_sources() {
        if (options_.parent == nullptr)
            return {};
        const std::vector<Source>& all = options_.parent->sources();
        std::vector<std::uint16_t> numbers(all.size());
        for_each_reference([&](std::uint16_t source) { numbers[source - 1] = 1; });
        std::vector<Source> used;
        for (const std::uint16_t i : options_.parent->order()) {
            if (numbers[i] == 0)
                continue;
            used.push_back(all[i]);
            numbers[i] = static_cast<std::uint16_t>(used.size());
        }
        for_each_reference([&](std::uint16_t& source) { source = numbers[source - 1]; });
        return used;
    }

    Bytes index() const noexcept { return index_; }
    std::uint64_t data_end() const noexcept { return places_.end(); }
    const EncodingTotals& totals() const noexcept { return totals_; }

private:
    template <class Use>
    void for_each_reference(const Use& use) {
        for (std::uint64_t number = 0; number < map_.count(); ++number) {
            std::byte* at =
                index_.data() + number * format::kIndexEntrySize + format::kIndexSourceOffset;
            std::uint16_t source;
            std::memcpy(&source, at, sizeof source);
            if (source == 0)
                continue;
            use(source);
            std::memcpy(at, &source, sizeof source);
        }
    }

    unsigned count_threads() const noexcept {
        return worker_count(options_.threads, map_.count(),
                            output_.is_direct() ? Waits::device : Waits::processor);
    }

    // The others only write. What is not written directly is copied by the processor: then whoever
    // made a chunk writes it, out of his cache.
    unsigned count_makers() const noexcept {
        return output_.is_direct() ? std::min(threads_, worker_count(0, map_.count())) : threads_;
    }

    void make_chunks(const FirstFailure& failure) {
        queue_.enter();
        WriteQueue::Buffer* buffer = queue_.take();
        EncodingTotals totals;
        ParentScratch scratch(parent_inputs_.empty() ? 0 : chunk_size_);
        while (buffer != nullptr && !failure.any()) {
            const std::uint64_t index = next_.fetch_add(1, std::memory_order_relaxed);
            if (index >= map_.count())
                break;
            const ChunkPlace place = map_.at(index);
            fetch(place, *buffer);
            if (!make_chunk(index, place.size, *buffer, totals, scratch))
                break;
            if (buffer->size == 0 || buffer->is_packed)
                buffer->lent.reset();
            if (buffer->size != 0)
                buffer = pass_on(buffer);
        }
        if (buffer != nullptr)
            queue_.put_back(buffer);
        queue_.leave();
        const std::lock_guard lock(totals_mutex_);
        totals_ += totals;
    }

    // A device takes few large pages in one request, and many small ones in many: it writes from our buffers, and not from
    // what is lent. Outputs write zeros behind a chunk up to a block's end, where the bytes of others are lent.
    void fetch(const ChunkPlace& place, WriteQueue::Buffer& buffer) {
        if (!output_.is_direct() && place.size % kDirectAlignment == 0 &&
            place.size % options_.alignment == 0)
            buffer.lent = Lent<MemorySource>(source_, place.address, place.size);
        if (buffer.lent.bytes().empty())
            source_.read(place.address, buffer.plain.bytes().first(place.size));
    }

    // Returns a buffer for the next chunk; nullptr: another worker has failed.
    WriteQueue::Buffer* pass_on(WriteQueue::Buffer* made) {
        if (makers_ == threads_) {
            write(*made);
            return made;
        }
        queue_.submit(made);
        return queue_.take();
    }

    // What `buffer` holds becomes an entry of the index, and what is to be written of it is in its
    // size. False if another worker has failed meanwhile.
    bool make_chunk(std::uint64_t index, std::size_t plain_size, WriteQueue::Buffer& buffer,
                    EncodingTotals& totals, ParentScratch& scratch) {
        const MutBytes plain = buffer.plain_bytes().first(plain_size);
        Bytes stored;
        format::IndexEntry entry = make_entry(plain, buffer.packed.bytes(), stored, scratch);
        const auto offset = places_.take(index, stored.size());
        if (!offset)
            return false;
        if (!stored.empty())
            entry.offset = *offset;
        format::pack_index_entry(entry, MutBytes(index_).subspan(index * format::kIndexEntrySize,
                                                                 format::kIndexEntrySize));
        totals.add(entry.encoding, holder_of(entry), plain_size, stored.size());
        buffer.offset = *offset;
        buffer.size = stored.size();
        buffer.is_packed = is_packed(entry.encoding);
        return true;
    }

    Holder holder_of(const format::IndexEntry& entry) const noexcept {
        return entry.source == 0 ? Holder::own
                                 : format::holder_of(entry.source, options_.parent->sources());
    }

    void write(WriteQueue::Buffer& made) {
        output_.write(made.offset, made.is_packed ? made.packed.bytes() : made.plain_bytes(),
                      made.size);
        made.lent.reset();
    }

    // Everything but the place of `stored`, which is what this file is to hold of the chunk.
    format::IndexEntry make_entry(Bytes plain, MutBytes packed, Bytes& stored,
                                  ParentScratch& scratch) {
        format::IndexEntry entry;
        if (is_zero(plain)) {
            entry.plain_hash = plain.size() == chunk_size_ ? zero_hash_ : hash128(plain);
            return entry;
        }
        entry.plain_hash = hash128(plain);
        if (options_.parent != nullptr && refer(plain, entry, scratch))
            return entry;
        const EncodedChunk chunk =
            encode_chunk(plain, options_.compress, options_.lz4_acceleration, packed);
        stored = chunk.stored;
        entry.encoding = chunk.encoding;
        entry.stored_size = static_cast<std::uint32_t>(stored.size());
        if (is_packed(chunk.encoding))
            entry.stored_hash = hash64(stored);
        return entry;
    }

    // Whether an image that is there already has that content.
    bool refer(Bytes plain, format::IndexEntry& entry, ParentScratch& scratch) {
        const ParentIndex::Place* place =
            options_.parent->find(entry.plain_hash, static_cast<std::uint32_t>(plain.size()));
        if (place == nullptr || (options_.check_parent && !is_sound(*place, plain, scratch)))
            return false;
        entry.offset = place->offset;
        entry.stored_hash = place->stored_hash;
        entry.stored_size = place->stored_size;
        entry.encoding = place->encoding;
        entry.source = static_cast<std::uint16_t>(place->source + 1);
        return true;
    }

    // Whether every reader will find `plain` where the parent has it.
    bool is_sound(const ParentIndex::Place& place, Bytes plain, ParentScratch& scratch) {
        try {
            const Bytes stored = parent_inputs_[place.source]->read(place.offset, place.stored_size,
                                                                    scratch.stored.bytes());
            if (is_packed(place.encoding) && hash64(stored) != place.stored_hash)
                throw Error(Errc::corrupt_data, "stored bytes do not match their checksum");
            const MutBytes decoded = scratch.plain.bytes().first(plain.size());
            decode_chunk(place.encoding, stored, decoded);
            if (!same_bytes(decoded, plain))
                throw Error(Errc::corrupt_data, "content does not match its checksum");
            return true;
        } catch (const Error& e) {
            const std::lock_guard lock(damage_mutex_);
            if (damaged_++ == 0) {
                const Source& source = options_.parent->sources()[place.source];
                first_damage_ = image_name(source.pid, source.kind) + " of checkpoint " +
                                id_text(source.checkpoint_id) + ", at " +
                                std::to_string(place.offset) + ": " + e.what();
            }
            return false;
        }
    }

    ImageOutput& output_;
    PlaceInOrder places_;
    MemorySource& source_;
    const WriteOptions& options_;
    const std::uint32_t chunk_size_;
    const ChunkMap map_;
    std::vector<std::byte> index_;
    const Id zero_hash_; // of a whole chunk of zeros: most zero chunks are whole
    /// By source of the parent, if it is to be checked.
    std::vector<std::shared_ptr<const ImageInput>> parent_inputs_;
    std::mutex damage_mutex_;
    std::uint64_t damaged_ = 0;
    std::string first_damage_;
    std::atomic<std::uint64_t> next_ = 0;
    std::atomic<unsigned> started_ = 0;
    std::mutex totals_mutex_;
    EncodingTotals totals_;
    const unsigned threads_;
    const unsigned makers_;
    WriteQueue queue_;
};

void check_options(const ImageInfo& info, const WriteOptions& options) {
    if (options.parent != nullptr && options.parent->chunk_size() != info.chunk_size)
        throw Error(Errc::bad_argument, "chunk size " + std::to_string(info.chunk_size) +
                                            " is not the parent's, " +
                                            std::to_string(options.parent->chunk_size()));
    if (options.lz4_acceleration < 1 || options.lz4_acceleration > kMaxAcceleration)
        throw Error(Errc::bad_argument,
                    "lz4 acceleration out of range: " + std::to_string(options.lz4_acceleration));
    if (!std::has_single_bit(options.alignment) || options.alignment > format::kMaxAlignment)
        throw Error(Errc::bad_argument,
                    "alignment out of range: " + std::to_string(options.alignment));
}

// What is left out of `info` follows from the options. Throws if it breaks a bound.
ImageInfo check(ImageInfo info, const WriteOptions& options) {
    info.sources.clear();
    info.parent_id = options.parent != nullptr ? options.parent->manifest().checkpoint_id : Id{};
    if (info.chunk_size == 0)
        info.chunk_size =
            options.parent != nullptr ? options.parent->chunk_size() : kDefaultChunkSize;
    format::check_info(info, Errc::bad_argument);
    check_options(info, options);
    return info;
}

WriteResult write_checked(ImageOutput& output, ImageInfo info, MemorySource& source,
                          const WriteOptions& options) {
    Pipeline pipeline(output, info, source, options);
    pipeline.run();
    info.sources = pipeline.keep_used_sources();
    const FrameResult frame =
        write_frame(output, info, options.alignment, pipeline.data_end(), pipeline.index());
    output.commit(frame.file_size);
    return {.totals = pipeline.totals(),
            .file_size = frame.file_size,
            .damaged_in_parent = pipeline.damaged_in_parent(),
            .first_damage = pipeline.first_damage(),
            .digest = frame.digest};
}

} // namespace

WriteResult write_image(int dir_fd, const std::string& name, const ImageInfo& info,
                        MemorySource& source, const WriteOptions& options) {
    ImageInfo checked = check(info, options);
    try {
        FileOutput output(dir_fd, name, options.io, options.alignment);
        return write_checked(output, std::move(checked), source, options);
    } catch (const Error& e) {
        throw Error(e, name + ": " + e.what());
    }
}

WriteResult write_image(ImageOutput& output, const ImageInfo& info, MemorySource& source,
                        const WriteOptions& options) {
    return write_checked(output, check(info, options), source, options);
}

} // namespace gpustasis
