// SPDX-License-Identifier: Apache-2.0
// A sealed file that is not the one that was written is refused: changed, cut, its frames moved, repeated, or
// taken from another one; also where whoever changed it has the key.
#include "check.hpp"
#include "sealed_sample.hpp"

#include "core/error.hpp"
#include "core/hash.hpp"
#include "seal/sealed_format.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string_view>

using namespace gpustasis;
using namespace gpustasis::seal;
using sample::Buffer;
using sample::Directory;

namespace {

constexpr std::size_t kFrame = kMinSealedFrame + kFrameOverhead;

/// That `bytes` is no sealed file of this key, and for this reason; "": for any.
void refused(const Buffer& bytes, const DataKey& key, std::string_view reason = "") {
    static const Directory dir; // one for all: there are thousands
    dir.write(kSealedName, bytes);
    try {
        sample::read_whole(dir, key);
    } catch (const Error& error) {
        CHECK(error.code() == Errc::corrupt_data || error.code() == Errc::unsupported);
        if (std::string_view(error.what()).find(reason) == std::string_view::npos) {
            std::fprintf(stderr, "refused for \"%s\"\n", error.what());
            CHECK(false && "it was refused for another reason");
        }
        return;
    }
    CHECK(false && "it was opened");
}

struct Sealed {
    FreshKey key;
    Buffer bytes;

    Sealed() {
        const Directory dir;
        sample::seal_into(dir, key);
        sample::read_whole(dir, key.key());
        bytes = dir.read(kSealedName);
    }
};

void every_byte_counts() {
    const Sealed sealed;
    for (std::size_t at = 0; at < sealed.bytes.size(); at += kStride) {
        Buffer changed = sealed.bytes;
        changed[at] ^= std::byte{0x10};
        refused(changed, sealed.key.key());
    }
}

void every_length_counts() {
    const Sealed sealed;
    for (std::size_t size = 0; size < sealed.bytes.size(); size += 13)
        refused(
            Buffer(sealed.bytes.begin(), sealed.bytes.begin() + static_cast<std::ptrdiff_t>(size)),
            sealed.key.key());
    Buffer longer = sealed.bytes;
    longer.push_back(std::byte{0});
    refused(longer, sealed.key.key());
    longer.insert(longer.end(), sealed.bytes.begin(), sealed.bytes.end()); // itself behind itself
    refused(longer, sealed.key.key());
}

auto frame(const Buffer& bytes, std::size_t number) {
    return bytes.begin() + static_cast<std::ptrdiff_t>(kSealedHeaderSize + number * kFrame);
}

void frames_stay_in_their_places() {
    const Sealed sealed;
    const Sealed other; // of the same files
    constexpr auto size = static_cast<std::ptrdiff_t>(kFrame);
    CHECK(sealed.bytes.size() > kSealedHeaderSize + 3 * kFrame);

    Buffer changed = sealed.bytes; // swapped
    std::swap_ranges(changed.begin() + kSealedHeaderSize,
                     changed.begin() + kSealedHeaderSize + size,
                     changed.begin() + kSealedHeaderSize + size);
    refused(changed, sealed.key.key());

    changed = sealed.bytes; // repeated in place of the next
    std::copy(frame(sealed.bytes, 0), frame(sealed.bytes, 1),
              changed.begin() + kSealedHeaderSize + size);
    refused(changed, sealed.key.key());
    std::copy(frame(sealed.bytes, 1),
              frame(sealed.bytes, 1) + kFrameHeaderSize, // and numbered rightly
              changed.begin() + kSealedHeaderSize + size);
    refused(changed, sealed.key.key());

    changed = sealed.bytes; // repeated before the others
    changed.insert(changed.begin() + kSealedHeaderSize, frame(sealed.bytes, 0),
                   frame(sealed.bytes, 1));
    refused(changed, sealed.key.key());

    changed = sealed.bytes; // cut out
    changed.erase(changed.begin() + kSealedHeaderSize, changed.begin() + kSealedHeaderSize + size);
    refused(changed, sealed.key.key());

    changed = sealed.bytes; // from another checkpoint of the same job
    std::copy(frame(other.bytes, 0), frame(other.bytes, 1), changed.begin() + kSealedHeaderSize);
    refused(changed, sealed.key.key());
    changed = sealed.bytes; // its end, or its header
    std::copy(other.bytes.end() - kFrameOverhead - kEndSize, other.bytes.end(),
              changed.end() - kFrameOverhead - kEndSize);
    refused(changed, sealed.key.key());
    changed = sealed.bytes;
    std::copy(other.bytes.begin(), other.bytes.begin() + kSealedHeaderSize, changed.begin());
    refused(changed, sealed.key.key());

    refused(sealed.bytes, other.key.key(), "the key is that of another sealed checkpoint");
}

/// A sealed file of these frames, made by somebody who has the key and writes what he likes.
struct Forged {
    FreshKey key;
    Buffer bytes;

    Forged(const Buffer& content, const Buffer& index, SealedEnd end, bool gap = false,
           std::uint32_t frame_size = kMinSealedFrame) {
        bytes = encode_header({.sealed_id = key.key().sealed_id(), .frame_size = frame_size});
        FrameSealer sealer = key.sealer(kSealedFile, bytes);
        const auto put = [&](FrameKind kind, Bytes plain) {
            FrameNumber number = sealer.take();
            const auto head = encode_frame_header(
                {number.value(), static_cast<std::uint32_t>(plain.size()), kind});
            Buffer sealed(plain.size() + kTagSize);
            sealer.seal(std::move(number), head, plain, sealed);
            bytes.insert(bytes.end(), head.begin(), head.end());
            bytes.insert(bytes.end(), sealed.begin(), sealed.end());
        };
        if (!content.empty())
            put(FrameKind::content, content);
        if (!index.empty())
            put(FrameKind::index, index);
        if (gap)
            static_cast<void>(sealer.take());
        if (end.file_size == 0)
            end.file_size = bytes.size() + kFrameOverhead + kEndSize;
        put(FrameKind::end, encode_end(end));
    }
};

/// That a file of these is refused for this reason.
void no(const Buffer& content, const Buffer& index, const SealedEnd& end, std::string_view reason) {
    const Forged forged(content, index, end);
    refused(forged.bytes, forged.key.key(), reason);
}

void hostile_numbers_are_bounded() {
    const SealedEntry entry{"a", 0600, 3, 0};
    const Buffer index = encode_entry(entry);
    Buffer content = index;
    content.resize(index.size() + 3);
    const Directory dir;
    {
        const Forged right(content, index, {content.size(), index.size(), 1, 0});
        dir.write(kSealedName, right.bytes);
        sample::read_whole(dir, right.key.key()); // so what follows fails for its own reason
    }
    constexpr std::uint64_t huge = ~std::uint64_t{0};
    constexpr auto bounds = "the end of the sealed file has a number out of bounds";
    constexpr auto length = "bytes and says";
    no(content, index, {huge, index.size(), 1, 0}, bounds);
    no(content, index, {content.size(), huge, 1, 0}, bounds);
    no(content, index, {content.size(), index.size(), huge, 0}, bounds);
    no(content, index, {kMaxContentSize + 1, index.size(), 1, 0}, bounds);
    no(content, index, {content.size(), kMaxIndexSize + 1, 1, 0}, bounds);
    no(content, index, {content.size(), index.size(), kMaxSealedFiles + 1, 0}, bounds);
    no(content, index, {content.size(), kMaxIndexSize, 1, 0}, length);
    no(content, index, {content.size(), index.size(), 1, huge}, length);
    no(content, index, {content.size() - 1, index.size(), 1, 0}, length);
    {
        // One byte more than there is: all numbers fit each other, but not the file.
        const Forged right(content, index, {content.size(), index.size(), 1, 0});
        no(content, index, {content.size() + 1, index.size(), 1, right.bytes.size() + 1}, length);
    }
    no({}, index, {0, index.size(), 1, 0}, "not what the sealed file holds");
    no(content, index, {content.size(), index.size(), 2, 0}, "too short for its 2 entries");
    no(content, index, {content.size(), index.size(), 0, 0}, "longer than its entries");

    Buffer longer = index;
    longer.push_back(std::byte{0});
    no(content, longer, {content.size(), longer.size(), 1, 0}, "longer than its entries");
    const Forged gap(content, index, {content.size(), index.size(), 1, 0}, true);
    refused(gap.bytes, gap.key.key(), "other frames than its end says");

    Buffer twice = index; // one name for two files
    twice.insert(twice.end(), index.begin(), index.end());
    Buffer both = content;
    both.insert(both.end(), content.begin(), content.end());
    no(both, twice, {both.size(), twice.size(), 2, 0}, "not in ascending order");
}

void hostile_entries_are_refused() {
    constexpr auto name = "a name that no file of a checkpoint has";
    constexpr auto bounds = "mode or size out of bounds";
    const auto with_entry = [&](const SealedEntry& hostile, std::string_view reason) {
        const Buffer of = encode_entry(hostile);
        Buffer with = of;
        with.resize(of.size() + 3);
        no(with, of, {with.size(), of.size(), 1, 0}, reason);
    };
    with_entry({".", 0600, 3, 0}, name);
    with_entry({"..", 0600, 3, 0}, name);
    with_entry({"a/b", 0600, 3, 0}, name);
    with_entry({"/a", 0600, 3, 0}, name);
    with_entry({std::string("a\0b", 3), 0600, 3, 0}, name);
    with_entry({"", 0600, 3, 0}, name);
    with_entry({std::string(256, 'a'), 0600, 3, 0}, name);
    with_entry({kSealedName, 0600, 3, 0}, name);
    with_entry({kEnvelopeName, 0600, 3, 0}, name);
    with_entry({"a", 0600, ~std::uint64_t{0}, 0}, bounds);
    with_entry({"a", 0600, kMaxContentSize + 1, 0}, bounds);
    with_entry({"a", 0600, 4, 0}, "not what the sealed file holds");
    with_entry({"a", 0600, kMaxContentSize, 0}, "not what the sealed file holds");

    Buffer setuid = encode_entry({"a", 0600, 3, 0}); // encode_entry() itself leaves such bits out
    setuid[3] = std::byte{0x0c};
    Buffer with_setuid = setuid;
    with_setuid.resize(setuid.size() + 3);
    no(with_setuid, setuid, {with_setuid.size(), setuid.size(), 1, 0}, bounds);
}

/// Another size that takes as many bytes in frames as `size` does, counted modulo 2^64.
std::uint64_t size_that_wraps(std::uint64_t size) {
    constexpr std::uint64_t most = ~std::uint64_t{0};
    const std::uint64_t rest = most % kFrame + 1 + end_of_frames(0, size, kMinSealedFrame);
    const std::uint64_t frames = (rest + kFrame - 1) / kFrame;
    const std::uint64_t other = most / kFrame * kMinSealedFrame + rest - frames * kFrameOverhead;
    CHECK(other > size &&
          end_of_frames(0, other, kMinSealedFrame) == end_of_frames(0, size, kMinSealedFrame));
    return other;
}

// Whoever has the key can choose numbers that fit only because they overflow.
void numbers_that_overflow_are_refused() {
    const Buffer index = encode_entry({"a", 0600, 3, 0});
    Buffer content = index;
    content.resize(index.size() + 3);
    constexpr auto bounds = "the end of the sealed file has a number out of bounds";
    no(content, index, {size_that_wraps(content.size()), index.size(), 1, 0}, bounds);
    no(content, index, {content.size(), size_that_wraps(index.size()), 1, 0}, bounds);

    constexpr std::uint64_t half = std::uint64_t{1} << 63U;
    Buffer both = encode_entry({"a", 0600, half + 3, 0});
    const Buffer second = encode_entry({"b", 0600, half + 3, 0});
    both.insert(both.end(), second.begin(), second.end());
    content = both;
    content.resize(both.size() + 6);
    no(content, both, {content.size(), both.size(), 2, 0}, "mode or size out of bounds");

    Buffer many; // 2^12 files of 2^52 bytes
    for (unsigned number = 1000; number < 1000 + (1U << 12U); ++number) {
        const Buffer entry = encode_entry({std::to_string(number), 0600, kMaxContentSize, 0});
        many.insert(many.end(), entry.begin(), entry.end());
    }
    const Forged forged(many, many, {many.size(), many.size(), 1U << 12U, 0}, false,
                        kMaxSealedFrame);
    refused(forged.bytes, forged.key.key(), "not what the sealed file holds");

    constexpr std::uint64_t least_entry = 24; // so many that what they take at least is nothing
    CHECK_THROWS(Errc::corrupt_data,
                 decode_index(index, {.file_count = ~std::uint64_t{0} / least_entry + 1}));
}

void hostile_headers_are_refused() {
    const Sealed sealed;
    const auto with = [&](std::size_t at, std::uint32_t number, std::string_view reason) {
        constexpr std::size_t hashed = 112;
        Buffer changed = sealed.bytes;
        std::memcpy(changed.data() + at, &number, sizeof number);
        const Id hash = hash128(Bytes(changed).first(hashed));
        std::ranges::copy(hash, changed.begin() + hashed);
        refused(changed, sealed.key.key(), reason);
    };
    constexpr std::size_t features = 16;
    constexpr std::size_t frame_size = 48;
    constexpr std::size_t file_id = 52;
    for (const std::uint32_t size : {0U, 1U, kMinSealedFrame / 2, kMinSealedFrame + 1, 12288U,
                                     2 * kMaxSealedFrame, 0x80000000U})
        with(frame_size, size, "frame size " + std::to_string(size) + " is out of bounds");
    with(file_id, 2, "file number 2");
    with(features, 1, "needs features this version does not know");
    const Buffer none;
    refused(none, sealed.key.key(), "too short for a sealed file");
    refused(Buffer(sealed.bytes.begin(), sealed.bytes.begin() + kSealedHeaderSize),
            sealed.key.key(), "too short for a sealed file");
}

// Two readers, one from the front and one from the end, must see the same files.
void entries_before_contents_are_those_of_the_index() {
    const Buffer index = encode_entry({"a", 0600, 3, 0});
    Buffer content = encode_entry({"b", 0600, 3, 0});
    content.resize(content.size() + 3);
    const Forged forged(content, index, {content.size(), index.size(), 1, 0});
    refused(forged.bytes, forged.key.key(), "is another one in the index");
}

} // namespace

int main() {
    every_byte_counts();
    every_length_counts();
    frames_stay_in_their_places();
    hostile_numbers_are_bounded();
    hostile_entries_are_refused();
    numbers_that_overflow_are_refused();
    hostile_headers_are_refused();
    entries_before_contents_are_those_of_the_index();
}
