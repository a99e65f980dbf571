// SPDX-License-Identifier: Apache-2.0
#include "seal/sealed_output.hpp"

#include "core/error.hpp"
#include "core/image_format.hpp"
#include "seal/errors.hpp"
#include "seal/secret.hpp"

#include <algorithm>
#include <bit>
#include <chrono>
#include <utility>

namespace gpustasis::seal {
namespace {

constexpr std::uint32_t kMode = 0600; // as the file in the clear would have

struct Wiped {
    MutBytes bytes;
    ~Wiped() { wipe(bytes); }
};

std::uint64_t now_ns() {
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    return static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

SealedOutput::Options checked(SealedOutput::Options options) {
    const bool is_frame = options.frame_size >= kMinSealedFrame &&
                          options.frame_size <= kMaxSealedFrame &&
                          std::has_single_bit(options.frame_size);
    if (!is_frame || !can_be_sealed(options.name) || options.file_id < kSealedFile ||
        options.file_id > kMaxFileId ||
        (options.file_id != kSealedFile && !options.others.empty()) || options.alignment == 0)
        throw Error(Errc::bad_argument, "cannot be sealed as it is written: " + options.name);
    return options;
}

} // namespace

SealedOutput::SealedOutput(FreshKey& key, int dir, Options options)
    : options_(checked(std::move(options))),
      header_(encode_header({.sealed_id = key.key().sealed_id(),
                             .frame_size = options_.frame_size,
                             .file_id = options_.file_id,
                             .is_single = true,
                             .lists_others = !options_.others.empty()})),
      sealer_(key.sealer(options_.file_id, header_)),
      part_(writing([&] { return PartFile(dir, sealed_name(options_.file_id)); })),
      blocks_(part_.fd(), options_.io) {
    writing([&] {
        blocks_.put(0, header_.size(),
                    [&](MutBytes to) { std::ranges::copy(header_, to.begin()); });
    });
}

SealedOutput::~SealedOutput() {
    for (auto& [number, frame] : open_)
        wipe(frame.plain);
}

bool SealedOutput::reserve(std::uint64_t size) {
    const std::uint32_t step = options_.frame_size;
    const std::uint64_t content_end = end_of_frames(kSealedHeaderSize, size, step);
    const std::uint64_t index_end = end_of_frames(content_end, index_of(size).size(), step);
    return writing([&] { return blocks_.reserve(index_end + kFrameOverhead + kEndSize); });
}

std::vector<std::byte> SealedOutput::index_of(std::uint64_t size) const {
    return encode_index({{{options_.name, kMode, size, now_ns()}}, options_.others});
}

void SealedOutput::write(std::uint64_t offset, MutBytes buffer, std::size_t size) {
    fill(offset, Bytes(buffer).first(size), format::align_up(size, options_.alignment));
}

void SealedOutput::put(std::uint64_t offset, Bytes bytes) {
    fill(offset, bytes, bytes.size());
}

// Numbers are taken in order, so that each is that of a frame's place: with one goes every one before
// it, and commit() seals what nothing was put into.
SealedOutput::OpenFrames::iterator SealedOutput::open_frame(std::uint64_t number) {
    while (next_ <= number) {
        open_.try_emplace(next_, sealer_.take());
        ++next_;
    }
    const auto found = open_.find(number);
    if (found == open_.end())
        throw Error(Errc::bad_argument, options_.name + ": bytes were put twice");
    return found;
}

void SealedOutput::fill(std::uint64_t offset, Bytes bytes, std::uint64_t padded) {
    const std::uint64_t end = offset + padded;
    {
        const std::lock_guard lock(mutex_);
        ++unfinished_;
        end_ = std::max(end_, end);
    }
    if (end > kMaxContentSize || end < offset)
        throw Error(Errc::bad_argument, options_.name + " would be too long");
    while (offset < end) {
        const std::uint64_t at = offset % options_.frame_size;
        const std::uint64_t size = std::min<std::uint64_t>(options_.frame_size - at, end - offset);
        const Bytes piece = bytes.first(std::min<std::size_t>(size, bytes.size()));
        if (piece.size() == options_.frame_size)
            seal_whole(offset, piece);
        else
            fill_frame(offset, piece, size);
        bytes = bytes.subspan(piece.size());
        offset += size;
    }
    const std::lock_guard lock(mutex_);
    --unfinished_;
}

// One that comes whole is sealed out of the caller's memory.
void SealedOutput::seal_whole(std::uint64_t offset, Bytes plain) {
    OpenFrames::node_type frame;
    {
        const std::lock_guard lock(mutex_);
        const auto found = open_frame(offset / options_.frame_size);
        if (!found->second.plain.empty())
            throw Error(Errc::bad_argument, options_.name + ": bytes were put twice");
        frame = open_.extract(found);
    }
    write_frame(std::move(frame.mapped().number), FrameKind::content, plain,
                end_of_frames(kSealedHeaderSize, offset, options_.frame_size));
}

// A part of one frame; `padded` bytes of it are spoken for, with zeros behind `piece`.
void SealedOutput::fill_frame(std::uint64_t offset, Bytes piece, std::uint64_t padded) {
    const std::uint64_t number = offset / options_.frame_size;
    std::byte* plain = nullptr;
    {
        const std::lock_guard lock(mutex_);
        OpenFrame& frame = open_frame(number)->second;
        if (frame.plain.empty())
            frame.plain.resize(options_.frame_size);
        plain = frame.plain.data();
    }
    // Nobody else puts anything there, and the frame stays until it is full.
    copy_bytes(piece, plain + offset % options_.frame_size);
    OpenFrames::node_type full;
    {
        const std::lock_guard lock(mutex_);
        OpenFrame& frame = open_.at(number);
        frame.filled += padded;
        if (frame.filled == options_.frame_size)
            full = open_.extract(number);
    }
    if (!full)
        return;
    const Wiped wiped{full.mapped().plain};
    write_frame(
        std::move(full.mapped().number), FrameKind::content, wiped.bytes,
        end_of_frames(kSealedHeaderSize, number * options_.frame_size, options_.frame_size));
}

void SealedOutput::write_frame(FrameNumber&& number, FrameKind kind, Bytes plain,
                               std::uint64_t at) {
    const auto head =
        encode_frame_header({number.value(), static_cast<std::uint32_t>(plain.size()), kind});
    const auto seal = [&](MutBytes sealed) {
        std::ranges::copy(head, sealed.begin());
        sealer_.seal(std::move(number), head, plain, sealed.subspan(kFrameHeaderSize));
        if (kind == FrameKind::end)
            std::ranges::copy(sealed.last(kTagSize), end_tag_.begin());
    };
    writing([&] { blocks_.put(at, plain.size() + kFrameOverhead, seal); });
}

void SealedOutput::commit(std::uint64_t size) {
    end(size);
    publish();
}

void SealedOutput::end(std::uint64_t size) {
    const std::uint32_t step = options_.frame_size;
    const std::uint64_t frames = frames_for(size, step);
    // With a frame that failed goes its number: zeros, or nothing, would be in its place.
    if (unfinished_ != 0)
        throw Error(Errc::bad_argument, options_.name + ": bytes of it could not be put");
    if (end_ > size)
        throw Error(Errc::bad_argument, options_.name + ": bytes were put behind its end");
    if (frames != 0 && next_ < frames)
        open_frame(frames - 1);
    while (!open_.empty()) { // not full, with zeros where nothing was put
        auto frame = open_.extract(open_.begin());
        frame.mapped().plain.resize(step);
        const Wiped wiped{frame.mapped().plain};
        const std::uint64_t offset = frame.key() * step;
        write_frame(std::move(frame.mapped().number), FrameKind::content,
                    wiped.bytes.first(
                        static_cast<std::size_t>(std::min<std::uint64_t>(step, size - offset))),
                    end_of_frames(kSealedHeaderSize, offset, step));
    }
    const std::vector<std::byte> index = index_of(size);
    if (index.size() > kMaxIndexSize)
        throw Error(Errc::bad_argument, "more files than a sealed file can list");
    std::uint64_t at = end_of_frames(kSealedHeaderSize, size, step);
    for (std::size_t done = 0; done < index.size(); done += step) {
        const Bytes rest = Bytes(index).subspan(done);
        const Bytes piece = rest.first(std::min<std::size_t>(rest.size(), step));
        write_frame(sealer_.take(), FrameKind::index, piece, at);
        at += piece.size() + kFrameOverhead;
    }
    const SealedEnd end{size, index.size(), 1, at + kFrameOverhead + kEndSize,
                        options_.others.size()};
    write_frame(sealer_.take(), FrameKind::end, encode_end(end), at);
    writing([&] {
        blocks_.finish(end.file_size);
        part_.sync();
    });
}

void SealedOutput::publish() {
    writing([this] { part_.commit(); });
}

} // namespace gpustasis::seal
