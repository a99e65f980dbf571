// SPDX-License-Identifier: Apache-2.0
#include "seal/sealed_reader.hpp"

#include "core/error.hpp"
#include "core/file.hpp"
#include "core/workers.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <utility>

namespace gpustasis::seal {
namespace {

constexpr std::size_t kMaxRun = kMaxSealedFrame; // read at once

struct Wiped {
    std::vector<std::byte>& bytes;
    ~Wiped() { wipe(bytes); }
};

std::vector<std::byte> read_header(int fd) {
    if (file_size(fd) < kSealedHeaderSize + kFrameOverhead + kEndSize)
        throw Error(Errc::corrupt_data, "is too short for a sealed file");
    return read_part(fd, 0, kSealedHeaderSize);
}

SealedHeader header_for(Bytes bytes, const DataKey& key, std::uint32_t file_id) {
    const SealedHeader header = decode_header(bytes);
    if (header.sealed_id != key.sealed_id())
        throw Error(Errc::corrupt_data, "the key is that of another sealed checkpoint");
    if (header.file_id != file_id)
        throw Error(Errc::corrupt_data, "is file " + std::to_string(header.file_id) +
                                            " of its checkpoint, and not file " +
                                            std::to_string(file_id));
    return header;
}

} // namespace

SealedReader::SealedReader(int dir, const std::string& name, const DataKey& key,
                           std::uint32_t file_id, IoMode io)
    : file_(std::make_shared<const UniqueFd>(open_regular(dir, name))),
      frames_(std::make_shared<const ChunkInput>(file_, 0, gpustasis::file_size(file_->get()), io)),
      buffers_(BufferPool::of_process()), header_bytes_(read_header(file_->get())),
      header_(header_for(header_bytes_, key, file_id)), opener_(key, file_id, header_bytes_) {
    const std::uint64_t size = frames_->size();
    const std::uint64_t end_at = size - kFrameOverhead - kEndSize;
    const std::vector<std::byte> end_header = read_part(file_->get(), end_at, kFrameHeaderSize);
    std::uint64_t number = 0; // as it says; it is authentic once the frame opens under it
    std::memcpy(&number, end_header.data(), sizeof number);
    std::vector<std::byte> end(kEndSize);
    open_frame(number, FrameKind::end, end_at, end);
    end_ = decode_end(end, header_, size);
    read_at(file_->get(), size - end_tag_.size(), end_tag_);
    const std::uint64_t content_frames = frames_for(end_.content_size, header_.frame_size);
    const std::uint64_t index_frames = frames_for(end_.index_size, header_.frame_size);
    if (number != content_frames + index_frames)
        throw Error(Errc::corrupt_data, "the sealed file has other frames than its end says");

    std::vector<std::byte> index(end_.index_size);
    std::uint64_t at = end_of_frames(kSealedHeaderSize, end_.content_size, header_.frame_size);
    for (std::uint64_t frame = 0; frame < index_frames; ++frame) {
        const std::uint64_t offset = frame * header_.frame_size;
        const auto plain = static_cast<std::size_t>(
            std::min<std::uint64_t>(header_.frame_size, end_.index_size - offset));
        open_frame(content_frames + frame, FrameKind::index, at,
                   MutBytes(index).subspan(offset, plain));
        at += plain + kFrameOverhead;
    }
    auto [entries, others] = decode_index(index, end_);
    std::uint64_t content_size = 0; // cannot overflow: 2^18 entries of less than 2^53 bytes would
    for (const SealedEntry& entry : entries) {
        content_size += (header_.is_single ? 0 : entry_size(entry)) + entry.size;
        if (content_size > end_.content_size)
            break;
    }
    if (content_size != end_.content_size)
        throw Error(Errc::corrupt_data,
                    "the files of the index are not what the sealed file holds");
    map_ = ContentMap(std::move(entries), header_.is_single);
    others_ = std::move(others);
}

void SealedReader::open_frame(std::uint64_t number, FrameKind kind, std::uint64_t at,
                              MutBytes plain) const {
    open_stored(number, kind, read_part(file_->get(), at, plain.size() + kFrameOverhead), plain);
}

void SealedReader::open_stored(std::uint64_t number, FrameKind kind, Bytes stored,
                               MutBytes plain) const {
    const auto expected =
        encode_frame_header({number, static_cast<std::uint32_t>(plain.size()), kind});
    if (!std::ranges::equal(expected, stored.first(kFrameHeaderSize)))
        throw Error(Errc::corrupt_data, "frame " + std::to_string(number) +
                                            " is not where it should be: another is there");
    opener_.open(number, expected, stored.subspan(kFrameHeaderSize), plain);
}

MutBytes SealedReader::open_content(std::uint64_t number, MutBytes plain) const {
    const std::uint64_t offset = number * header_.frame_size;
    const MutBytes filled = plain.first(static_cast<std::size_t>(
        std::min<std::uint64_t>(header_.frame_size, end_.content_size - offset)));
    open_frame(number, FrameKind::content,
               end_of_frames(kSealedHeaderSize, offset, header_.frame_size), filled);
    return filled;
}

std::optional<std::size_t> SealedReader::find(const std::string& name) const {
    const auto found = std::ranges::lower_bound(entries(), name, {}, &SealedEntry::name);
    if (found == entries().end() || found->name != name)
        return std::nullopt;
    return static_cast<std::size_t>(found - entries().begin());
}

void SealedReader::read(std::size_t file, std::uint64_t offset, MutBytes out) const {
    if (file >= entries().size() || offset > entries()[file].size ||
        out.size() > entries()[file].size - offset)
        throw Error(Errc::bad_argument, "past the end of a sealed file");
    for (std::uint64_t at = map_.begin_of(file) + offset; !out.empty();) {
        const std::size_t size = std::min<std::size_t>(out.size(), kMaxRun - at % kMaxRun);
        read_run(at, out.first(size));
        out = out.subspan(size);
        at += size;
    }
}

// The frames that hold `out`, which is not empty, are read with one call; those that it needs whole
// are opened in it.
void SealedReader::read_run(std::uint64_t at, MutBytes out) const {
    const std::uint64_t step = header_.frame_size;
    const std::uint64_t first = at / step * step;
    const std::uint64_t end =
        std::min<std::uint64_t>((at + out.size() + step - 1) / step * step, end_.content_size);
    const std::size_t size = end_of_frames(0, end - first, header_.frame_size);
    const std::uint64_t stored_at = end_of_frames(kSealedHeaderSize, first, header_.frame_size);
    AlignedBuffer buffer = buffers_->take(kDirectAlignment + size);
    Bytes stored = read_stored(stored_at, size, buffer);
    std::vector<std::byte> scratch;
    const Wiped wiped{scratch};
    while (!out.empty()) {
        const std::uint64_t number = at / step;
        const auto skip = static_cast<std::size_t>(at % step);
        const auto plain_size =
            static_cast<std::size_t>(std::min(step, end_.content_size - number * step));
        const Bytes frame = stored.first(plain_size + kFrameOverhead);
        const std::size_t wanted = std::min(out.size(), plain_size - skip);
        if (wanted == plain_size) {
            open_stored(number, FrameKind::content, frame, out.first(wanted));
        } else {
            scratch.resize(step);
            const MutBytes plain = MutBytes(scratch).first(plain_size);
            open_stored(number, FrameKind::content, frame, plain);
            copy_bytes(plain.subspan(skip, wanted), out.data());
        }
        stored = stored.subspan(frame.size());
        out = out.subspan(wanted);
        at += wanted;
    }
    buffers_->put_back(std::move(buffer));
}

// Sealed frames begin anywhere: what is read directly begins at the block before.
Bytes SealedReader::read_stored(std::uint64_t at, std::size_t size, AlignedBuffer& buffer) const {
    const std::size_t before = is_direct() ? at % kDirectAlignment : 0;
    if (!is_direct())
        begin_read_ahead(file_->get(), at, size);
    return frames_->read(at - before, before + size, buffer.bytes()).subspan(before);
}

void SealedReader::read_all(const Sink& sink, unsigned threads, const SealProgress& tell) const {
    const std::uint64_t frames = frames_for(end_.content_size, header_.frame_size);
    std::atomic<std::uint64_t> next = 0;
    FirstFailure failure;
    ProgressMeter meter(tell);
    run_workers(worker_count(threads, frames), failure, [&] {
        std::vector<std::byte> plain(header_.frame_size);
        const Wiped wiped{plain};
        for (std::uint64_t number = next++; number < frames && !failure.any(); number = next++) {
            const Bytes frame = open_content(number, plain);
            for (const auto& piece : map_.pieces(number * header_.frame_size, frame.size())) {
                const Bytes bytes = frame.subspan(piece.at, piece.size);
                if (!piece.is_entry) {
                    sink(piece.file, piece.offset, bytes);
                    continue;
                }
                // Whoever reads from the front believes this one, so it must be that of the index.
                const std::vector<std::byte> entry = encode_entry(entries()[piece.file]);
                if (!same_bytes(bytes, Bytes(entry).subspan(piece.offset, piece.size)))
                    throw Error(Errc::corrupt_data, "entry of " + entries()[piece.file].name +
                                                        ": is another one in the index");
            }
            meter.add(frame.size());
        }
    });
    meter.finish();
}

} // namespace gpustasis::seal
