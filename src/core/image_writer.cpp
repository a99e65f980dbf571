#include "core/image_writer.hpp"

#include "core/chunk_codec.hpp"
#include "core/chunk_map.hpp"
#include "core/error.hpp"
#include "core/file.hpp"
#include "core/hash.hpp"
#include "core/image_format.hpp"
#include "core/image_metadata.hpp"
#include "core/workers.hpp"

#include <array>
#include <atomic>
#include <bit>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <vector>

namespace cudackpt {
namespace {

using format::align_up;

std::vector<std::byte> buffer(std::size_t size) {
    return std::vector<std::byte>(size);
}

// Gives chunks their places in the file in the order of their numbers, whichever thread is ready
// first: this is what makes the file the same for any number of threads.
class PlaceInOrder {
public:
    PlaceInOrder(std::uint64_t begin, std::uint64_t alignment)
        : end_(begin), alignment_(alignment) {}

    // The offset of chunk `index`, once all chunks before it have theirs. nullopt: cancelled.
    std::optional<std::uint64_t> take(std::uint64_t index, std::uint64_t stored_size) {
        std::unique_lock lock(mutex_);
        moved_.wait(lock, [&] { return next_ == index || cancelled_; });
        if (cancelled_)
            return std::nullopt;
        const std::uint64_t offset = end_;
        end_ = align_up(end_ + stored_size, alignment_);
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
    std::uint64_t end() const noexcept { return end_; }

private:
    std::mutex mutex_;
    std::condition_variable moved_;
    std::uint64_t next_ = 0;
    std::uint64_t end_;
    const std::uint64_t alignment_;
    bool cancelled_ = false;
};

// One image being written: what the workers share.
class Pipeline {
public:
    Pipeline(int fd, const ImageInfo& info, MemorySource& source, const WriteOptions& options)
        : fd_(fd), source_(source), options_(options), chunk_size_(info.chunk_size),
          map_(info.regions, info.chunk_size),
          places_(align_up(format::kHeaderSize, options.alignment), options.alignment),
          index_(map_.count() * format::kIndexEntrySize),
          zero_hash_(hash128(buffer(info.chunk_size))) {}

    void run() {
        FirstFailure failure;
        const auto work = [&] {
            try {
                take_chunks(failure);
            } catch (...) {
                failure.record();
                places_.cancel();
            }
        };
        run_workers(worker_count(options_.threads, map_.count()), failure, work);
    }

    std::uint64_t data_end() const noexcept { return places_.end(); }
    Bytes index() const noexcept { return index_; }
    std::uint64_t chunk_count() const noexcept { return map_.count(); }
    const EncodingTotals& totals() const noexcept { return totals_; }

private:
    void take_chunks(const FirstFailure& failure) {
        std::vector<std::byte> plain = buffer(chunk_size_);
        std::vector<std::byte> packed = buffer(options_.compress ? lz4_limit(chunk_size_) : 0);
        EncodingTotals totals;
        while (!failure.any()) {
            const std::uint64_t index = next_.fetch_add(1, std::memory_order_relaxed);
            if (index >= map_.count())
                break;
            const ChunkPlace place = map_.at(index);
            const MutBytes bytes = MutBytes(plain).first(place.size);
            source_.read(place.address, bytes);
            if (!write_chunk(index, bytes, packed, totals))
                break;
        }
        const std::lock_guard lock(totals_mutex_);
        totals_ += totals;
    }

    // False if another worker has failed meanwhile.
    bool write_chunk(std::uint64_t index, Bytes plain, MutBytes packed, EncodingTotals& totals) {
        const EncodedChunk chunk =
            encode_chunk(plain, options_.compress, options_.lz4_acceleration, packed);
        const bool zero = chunk.encoding == Encoding::zero;
        format::IndexEntry entry;
        entry.encoding = chunk.encoding;
        entry.plain_hash = zero && plain.size() == chunk_size_ ? zero_hash_ : hash128(plain);
        entry.stored_size = static_cast<std::uint32_t>(chunk.stored.size());
        if (chunk.encoding == Encoding::lz4)
            entry.stored_hash = hash64(chunk.stored);

        const auto offset = places_.take(index, entry.stored_size);
        if (!offset)
            return false;
        entry.offset = zero ? 0 : *offset;
        format::pack_index_entry(entry, MutBytes(index_).subspan(index * format::kIndexEntrySize,
                                                                 format::kIndexEntrySize));
        totals.add(chunk.encoding, plain.size(), entry.stored_size);
        write_at(fd_, *offset, chunk.stored);
        return true;
    }

    const int fd_;
    MemorySource& source_;
    const WriteOptions& options_;
    const std::uint32_t chunk_size_;
    const ChunkMap map_;
    PlaceInOrder places_;
    std::vector<std::byte> index_;
    const Id zero_hash_; // of a whole chunk of zeros: most zero chunks are whole
    std::atomic<std::uint64_t> next_ = 0;
    std::mutex totals_mutex_;
    EncodingTotals totals_;
};

void check_options(const WriteOptions& options) {
    if (options.lz4_acceleration < 1 || options.lz4_acceleration > kMaxAcceleration)
        throw Error(Errc::bad_argument,
                    "lz4 acceleration out of range: " + std::to_string(options.lz4_acceleration));
    if (!std::has_single_bit(options.alignment) || options.alignment > format::kMaxAlignment)
        throw Error(Errc::bad_argument,
                    "alignment out of range: " + std::to_string(options.alignment));
}

// Everything of the file but the chunks. Padding is never written: it is what the file has where
// nothing was put.
WriteResult write_frame(int fd, const ImageInfo& info, const Pipeline& pipeline,
                        std::uint32_t alignment) {
    const std::vector<std::byte> header = format::pack_header({.checkpoint_id = info.checkpoint_id,
                                                               .parent_id = info.parent_id,
                                                               .pid = info.pid,
                                                               .chunk_size = info.chunk_size,
                                                               .alignment = alignment,
                                                               .hash = {}});
    const std::vector<std::byte> metadata = format::pack_metadata(info);
    format::Trailer trailer;
    trailer.metadata_offset = pipeline.data_end();
    trailer.metadata_size = metadata.size();
    trailer.metadata_hash = hash128(metadata);
    trailer.index_offset = trailer.metadata_offset + metadata.size();
    trailer.chunk_count = pipeline.chunk_count();
    trailer.index_hash = hash128(pipeline.index());
    trailer.header_hash = format::hash_at_end(header);
    const std::uint64_t trailer_offset = trailer.index_offset + pipeline.index().size();
    trailer.file_size = trailer_offset + format::kTrailerSize;
    const std::vector<std::byte> packed_trailer = format::pack_trailer(trailer);

    write_at(fd, 0, header);
    write_at(fd, trailer.metadata_offset, metadata);
    write_at(fd, trailer.index_offset, pipeline.index());
    write_at(fd, trailer_offset, packed_trailer);
    return {.totals = pipeline.totals(),
            .file_size = trailer.file_size,
            .digest = format::hash_at_end(packed_trailer)};
}

} // namespace

void EncodingTotals::add(Encoding encoding, std::uint64_t plain, std::uint64_t stored) noexcept {
    const std::array<Count*, 4> counts{&zero, &lz4, &raw, &ref};
    Count& count = *counts[static_cast<std::size_t>(encoding)];
    ++count.chunks;
    count.plain += plain;
    count.stored += stored;
}

EncodingTotals& EncodingTotals::operator+=(const EncodingTotals& other) noexcept {
    const auto sum = [](Count& to, const Count& from) {
        to.chunks += from.chunks;
        to.plain += from.plain;
        to.stored += from.stored;
    };
    sum(zero, other.zero);
    sum(lz4, other.lz4);
    sum(raw, other.raw);
    sum(ref, other.ref);
    return *this;
}

WriteResult write_image(int dir_fd, const std::string& name, const ImageInfo& info,
                        MemorySource& source, const WriteOptions& options) {
    ImageInfo checked = info;
    if (checked.chunk_size == 0)
        checked.chunk_size = kDefaultChunkSize;
    format::check_info(checked, Errc::bad_argument);
    check_options(options);

    try {
        PartFile file(dir_fd, name);
        Pipeline pipeline(file.fd(), checked, source, options);
        pipeline.run();
        const WriteResult result = write_frame(file.fd(), checked, pipeline, options.alignment);
        file.commit();
        return result;
    } catch (const Error& e) {
        throw Error(e.code(), name + ": " + e.what());
    }
}

} // namespace cudackpt
