// SPDX-License-Identifier: Apache-2.0
// What a damaged or hostile image can do: be refused.
#include "check.hpp"
#include "sample.hpp"

#include "core/file.hpp"
#include "core/hash.hpp"
#include "core/image_format.hpp"
#include "core/image_frame.hpp"
#include "core/image_metadata.hpp"
#include "core/image_output.hpp"
#include "core/image_reader.hpp"
#include "core/image_writer.hpp"
#include "core/sealed_block.hpp"

#include <cstring>
#include <functional>
#include <limits>

using namespace gpustasis;
using sample::Buffer;
using sample::Memory;

namespace {

constexpr const char* kName = "gpustasis-1.img";

Buffer small_image(const sample::TempDir& dir, std::uint32_t alignment) {
    Memory memory;
    Buffer lz4_and_raw = sample::pattern_bytes(4096);
    const Buffer noise = sample::random_bytes(4096, 7);
    lz4_and_raw.insert(lz4_and_raw.end(), noise.begin(), noise.end());
    memory.map(0x10000, lz4_and_raw);
    memory.map(0x20000, Buffer(4096));
    write_image(dir.fd(), kName, info_of(memory), memory, {.threads = 1, .alignment = alignment});
    return sample::read_file(dir.fd(), kName);
}

/// True if opening and verifying `bytes` finds nothing wrong. Any Error is a refusal.
bool is_accepted(const sample::TempDir& dir, Bytes bytes) {
    sample::write_file(dir.fd(), kName, bytes);
    try {
        ImageReader::open(dir.fd(), kName).verify(1);
        return true;
    } catch (const Error& e) {
        CHECK(e.code() == Errc::corrupt_data || e.code() == Errc::unsupported);
        CHECK(std::strstr(e.what(), kName) != nullptr);
        return false;
    }
}

using Check = std::function<void(const ImageReader&)>;

void verify(const ImageReader& reader) {
    reader.verify(1);
}

void restore(const ImageReader& reader) {
    Memory memory;
    memory.map(0x10000, Buffer(8192));
    memory.map(0x20000, Buffer(4096));
    reader.restore(memory, 1, false);
}

void every_single_bit_flip_is_found(std::uint32_t alignment, const Check& check) {
    const sample::TempDir dir;
    Buffer image = small_image(dir, alignment);
    CHECK(is_accepted(dir, image));
    const int fd = ::openat(dir.fd(), kName, O_WRONLY | O_CLOEXEC);
    CHECK(fd >= 0);
    for (std::size_t bit = 0; bit < image.size() * 8; bit += kStride) {
        const auto at = static_cast<off_t>(bit / 8);
        const std::byte original = image[bit / 8];
        const std::byte flipped = original ^ static_cast<std::byte>(1U << (bit % 8));
        CHECK(::pwrite(fd, &flipped, 1, at) == 1);
        bool found = false;
        try {
            check(ImageReader::open(dir.fd(), kName));
        } catch (const Error& e) {
            found = e.code() == Errc::corrupt_data;
        }
        if (!found)
            std::fprintf(stderr, "bit %zu\n", bit);
        CHECK(found);
        CHECK(::pwrite(fd, &original, 1, at) == 1);
    }
    ::close(fd);
}

void every_truncation_and_extension_is_found() {
    const sample::TempDir dir;
    Buffer image = small_image(dir, 64);
    for (std::size_t keep = 0; keep < image.size(); keep += kStride)
        CHECK(!is_accepted(dir, Bytes(image).first(keep)));
    image.push_back(std::byte{0});
    CHECK(!is_accepted(dir, image));
}

void two_halves_of_different_images_are_found() {
    const sample::TempDir dir;
    const Buffer image = small_image(dir, 64);
    Memory memory;
    memory.map(0x10000, Buffer(4096));
    ImageInfo info = info_of(memory);
    info.checkpoint_id = sample::id_of(0x99);
    write_image(dir.fd(), "other", info, memory, {.alignment = 64});
    const Buffer other = sample::read_file(dir.fd(), "other");
    Buffer mixed = image;
    std::copy_n(other.begin(), format::kHeaderSize, mixed.begin());
    CHECK(!is_accepted(dir, mixed));
}

/// The parts of an image as bytes, to forge: put together again with every checksum made right.
class Forgery {
public:
    explicit Forgery(const Buffer& image) : image_(image) {
        const auto at = [&](std::size_t offset) {
            std::uint64_t value = 0;
            std::memcpy(&value, &image_[trailer_offset() + offset], sizeof value);
            return value;
        };
        metadata_offset = at(0);
        metadata_size = at(8);
        index_offset = at(32);
        chunk_count = at(40);
    }
    template <class T>
    Forgery& set(std::size_t offset, T value) {
        std::memcpy(&image_[offset], &value, sizeof value);
        return *this;
    }
    Forgery& header(std::size_t offset, auto value) { return set(offset, value); }
    Forgery& metadata(std::size_t offset, auto value) {
        return set(metadata_offset + offset, value);
    }
    Forgery& entry(std::size_t chunk, std::size_t offset, auto value) {
        return set(index_offset + chunk * format::kIndexEntrySize + offset, value);
    }
    Forgery& trailer(std::size_t offset, auto value) {
        return set(trailer_offset() + offset, value);
    }

    Buffer sealed() {
        const Bytes bytes(image_);
        set(240, hash128(bytes.first(240)));
        trailer(16, hash128(bytes.subspan(metadata_offset, metadata_size)));
        trailer(48, hash128(bytes.subspan(index_offset, image_.size() - 128 - index_offset)));
        trailer(64, hash128(bytes.first(240)));
        trailer(112, hash128(bytes.subspan(trailer_offset(), 112)));
        return image_;
    }

    std::uint64_t metadata_offset = 0;
    std::uint64_t metadata_size = 0;
    std::uint64_t index_offset = 0;
    std::uint64_t chunk_count = 0;

private:
    std::size_t trailer_offset() const { return image_.size() - format::kTrailerSize; }
    Buffer image_;
};

void values_out_of_range_are_refused() {
    const sample::TempDir dir;
    const Buffer image = small_image(dir, 64);
    using Forge = std::function<void(Forgery&)>;
    const std::uint64_t huge = std::numeric_limits<std::uint64_t>::max();
    const std::size_t region = 96 + 280; // of the metadata: one GPU stands before the regions
    const std::vector<Forge> forgeries{
        [](Forgery& f) { f.header(12, 255U); }, // header_size
        [](Forgery& f) { f.header(68, 0U); },   // chunk_size
        [](Forgery& f) { f.header(68, 2048U); },
        [](Forgery& f) { f.header(68, 12288U); },
        [](Forgery& f) { f.header(68, 8U << 20); },
        [](Forgery& f) { f.header(68, 8192U); }, // other number of chunks
        [](Forgery& f) { f.header(72, 0U); },    // alignment
        [](Forgery& f) { f.header(72, 48U); },
        [](Forgery& f) { f.header(72, 8192U); },
        [](Forgery& f) { f.header(72, 4096U); }, // other places
        [](Forgery& f) { f.header(64, 0U); },    // pid
        [](Forgery& f) { f.header(64, 0x80000000U); },
        [](Forgery& f) { f.header(76, std::uint8_t{1}); }, // kind, which no feature announces
        [](Forgery& f) { f.header(77, std::uint8_t{1}); }, // reserved
        [](Forgery& f) { f.header(239, std::uint8_t{1}); },
        [=](Forgery& f) { f.trailer(0, huge); }, // metadata_offset
        [=](Forgery& f) { f.trailer(8, huge); }, // metadata_size
        [](Forgery& f) { f.trailer(8, f.metadata_size - 1); },
        [=](Forgery& f) { f.trailer(32, huge); }, // index_offset
        [=](Forgery& f) { f.trailer(40, huge); }, // chunk_count
        [](Forgery& f) { f.trailer(40, f.chunk_count - 1); },
        [](Forgery& f) { f.trailer(40, format::kMaxChunks + 1); },
        [=](Forgery& f) { f.trailer(80, huge); },           // file_size
        [](Forgery& f) { f.trailer(88, std::uint8_t{1}); }, // reserved
        [](Forgery& f) { f.metadata(24, 4U); },             // state_before
        [](Forgery& f) { f.metadata(32, 3U); },             // region_count
        [](Forgery& f) { f.metadata(32, 0xffffffffU); },
        [](Forgery& f) { f.metadata(36, 2U); }, // gpu_count
        [](Forgery& f) { f.metadata(36, 0xffffffffU); },
        [](Forgery& f) { f.metadata(55, 'x'); },             // comm without an end
        [](Forgery& f) { f.metadata(50, 'x'); },             // comm with something behind
        [](Forgery& f) { f.metadata(87, 'x'); },             // driver_version
        [](Forgery& f) { f.metadata(88, std::uint8_t{1}); }, // reserved
        [](Forgery& f) { f.metadata(96 + 279, 'x'); },       // GPU name
        [=](Forgery& f) { f.metadata(region, std::uint64_t{0x10001}); },
        [=](Forgery& f) { f.metadata(region, std::uint64_t{0x20000}); }, // overlaps the next
        [=](Forgery& f) { f.metadata(region, std::uint64_t{0x30000}); }, // out of order
        [=](Forgery& f) { f.metadata(region, huge - 4095); },
        [=](Forgery& f) { f.metadata(region + 8, std::uint64_t{0}); },
        [=](Forgery& f) { f.metadata(region + 8, std::uint64_t{4095}); },
        [=](Forgery& f) { f.metadata(region + 8, std::uint64_t{4096}); },
        [=](Forgery& f) { f.metadata(region + 24 + 8, std::uint64_t{1} << 57); },
        [=](Forgery& f) { f.metadata(region + 24 + 8, std::uint64_t{1} << 40); },
        [=](Forgery& f) { f.metadata(region + 16, 8U); },              // protection
        [=](Forgery& f) { f.metadata(region + 20, std::uint8_t{2}); }, // kind
        [=](Forgery& f) { f.metadata(region + 21, std::uint8_t{1}); }, // reserved
        [](Forgery& f) { f.entry(0, 16, std::uint64_t{0}); },          // offset
        [=](Forgery& f) { f.entry(0, 16, huge); },
        [](Forgery& f) { f.entry(0, 16, std::uint64_t{320}); },
        [](Forgery& f) { f.entry(0, 24, std::uint64_t{1}); }, // stored_hash
        [](Forgery& f) { f.entry(0, 32, 0U); },               // stored_size
        [](Forgery& f) { f.entry(0, 32, 4096U); },
        [](Forgery& f) { f.entry(0, 32, 0xffffffffU); },
        [](Forgery& f) { f.entry(1, 32, 4095U); }, // of a raw chunk
        [](Forgery& f) { f.entry(1, 24, std::uint64_t{1}); },
        [](Forgery& f) { f.entry(1, 36, std::uint8_t{1}); },    // raw called lz4
        [](Forgery& f) { f.entry(1, 36, std::uint8_t{3}); },    // ref
        [](Forgery& f) { f.entry(1, 36, std::uint8_t{4}); },    // unknown
        [](Forgery& f) { f.entry(1, 37, std::uint8_t{1}); },    // reserved
        [](Forgery& f) { f.entry(2, 16, std::uint64_t{320}); }, // zero with a place
        [](Forgery& f) { f.entry(2, 32, 1U); },
        [](Forgery& f) { f.entry(2, 0, std::uint64_t{1}); }, // hash of zeros
        [](Forgery& f) { f.entry(2, 36, std::uint8_t{2}); }, // zero called raw
    };
    CHECK(is_accepted(dir, Forgery(image).sealed()));
    for (std::size_t i = 0; i < forgeries.size(); ++i) {
        Forgery forgery(image);
        forgeries[i](forgery);
        const bool accepted = is_accepted(dir, forgery.sealed());
        if (accepted)
            std::fprintf(stderr, "forgery %zu was accepted\n", i);
        CHECK(!accepted);
    }
}

/// An image of CPU memory: 4 KiB at 0x10000 and, with a parent, a source of either kind.
Buffer cpu_image(const sample::TempDir& dir, bool has_parent) {
    Memory memory;
    memory.map(0x10000, Buffer(4096));
    ImageInfo info = info_of(memory);
    info.kind = MemoryKind::cpu;
    info.gpus.clear();
    info.driver_version.clear();
    info.driver_api_version = 0;
    if (!has_parent) {
        write_image(dir.fd(), kName, info, memory, {.threads = 1, .alignment = 64});
        return sample::read_file(dir.fd(), kName);
    }
    info.parent_id = sample::id_of(0x55);
    for (const MemoryKind kind : {MemoryKind::gpu, MemoryKind::cpu})
        info.sources.push_back({.checkpoint_id = info.parent_id,
                                .digest = sample::id_of(0x66),
                                .file_size = 4096,
                                .pid = 4242,
                                .depth = 1,
                                .kind = kind});
    format::check_info(info, Errc::bad_argument);
    info.regions.clear();
    FileOutput file(dir.fd(), kName, IoMode::buffered, 1);
    file.commit(write_frame(file, info, 1, format::kHeaderSize, {}).file_size);
    return sample::read_file(dir.fd(), kName);
}

/// Opens `image` with a change made, and every checksum made right.
void open_forged(const sample::TempDir& dir, const Buffer& image,
                 const std::function<void(Forgery&)>& change) {
    Forgery forgery(image);
    change(forgery);
    sample::write_file(dir.fd(), kName, forgery.sealed());
    ImageReader::open(dir.fd(), kName);
}

void the_kind_of_memory_is_checked() {
    const sample::TempDir dir;
    const Buffer image = cpu_image(dir, false);
    constexpr std::uint64_t kNoFeature = 0;
    const auto nothing = [](Forgery&) {};
    open_forged(dir, image, nothing);
    const auto refused = [&](const Buffer& whole, const std::function<void(Forgery&)>& change) {
        CHECK_THROWS(Errc::corrupt_data, open_forged(dir, whole, change));
    };
    refused(image, [](Forgery& f) { f.header(76, std::uint8_t{2}); });
    refused(image, [](Forgery& f) { f.header(76, std::uint8_t{255}); });
    refused(image, [](Forgery& f) { f.header(76, std::uint8_t{0}); }); // and the feature says CPU
    refused(image, [=](Forgery& f) { f.header(16, kNoFeature); });     // and the kind says CPU
    refused(image, [](Forgery& f) { f.metadata(96 + 20, std::uint8_t{2}); }); // no kind of region
    open_forged(dir, image, [](Forgery& f) { f.metadata(96 + 20, std::uint8_t{1}); }); // shared
    // Both together are GPU memory, which is what they say.
    open_forged(dir, image,
                [=](Forgery& f) { f.header(16, kNoFeature).header(76, std::uint8_t{0}); });

    const Buffer child = cpu_image(dir, true);
    open_forged(dir, child, nothing);
    constexpr std::size_t kSecondKind = 96 + 48 + 46;
    refused(child, [](Forgery& f) { f.metadata(96 + 46, std::uint8_t{1}); }); // each twice
    refused(child, [=](Forgery& f) { f.metadata(kSecondKind, std::uint8_t{0}); });
    refused(child, [=](Forgery& f) { f.metadata(kSecondKind, std::uint8_t{2}); });
    refused(child, [=](Forgery& f) { f.metadata(kSecondKind + 1, std::uint8_t{1}); }); // reserved
    refused(child, [](Forgery& f) { // of GPU memory, with a source of CPU memory and no feature
        f.header(16, format::kParent).header(76, std::uint8_t{0});
    });
}

void features_and_versions_are_told_apart() {
    const sample::TempDir dir;
    const Buffer image = small_image(dir, 64);
    const auto open = [&](Forgery& forgery) {
        sample::write_file(dir.fd(), kName, forgery.sealed());
        ImageReader::open(dir.fd(), kName);
    };
    for (unsigned bit = 0; bit < 64; ++bit) {
        Forgery required(image);
        required.header(16, std::uint64_t{1} << bit);
        // Known are bit 0, which says that there is a parent, bit 3: it holds CPU memory, bit 4: what it has
        // alike with another image of its checkpoint lies there, bit 5: files, and bit 6: memory of GPUs.
        const bool known = bit == 0 || (bit >= 3 && bit <= 6);
        CHECK_THROWS(known ? Errc::corrupt_data : Errc::unsupported, open(required));
        Forgery optional(image);
        optional.header(24, std::uint64_t{1} << bit);
        open(optional);
    }
    Forgery newer(image);
    newer.header(8, 2U);
    CHECK_THROWS(Errc::unsupported, open(newer));
}

void what_is_not_a_file_is_refused() {
    const sample::TempDir dir;
    CHECK_THROWS(Errc::io, ImageReader::open(dir.fd(), "missing"));
    CHECK(::mkfifo(dir.path("fifo").c_str(), 0600) == 0);
    CHECK_THROWS(Errc::corrupt_data, ImageReader::open(dir.fd(), "fifo"));
    CHECK(::mkdirat(dir.fd(), "dir", 0700) == 0);
    CHECK_THROWS(Errc::corrupt_data, ImageReader::open(dir.fd(), "dir"));
    sample::write_file(dir.fd(), "empty", {});
    CHECK_THROWS(Errc::corrupt_data, ImageReader::open(dir.fd(), "empty"));
}

// The chunk that failed never reaches the task.
void nothing_unchecked_is_restored() {
    const sample::TempDir dir;
    Buffer image = small_image(dir, 64);
    const std::uint64_t raw_offset = [&] {
        return ImageReader::open(dir.fd(), kName).chunk(1).offset;
    }();
    image[raw_offset + 100] ^= std::byte{1};
    sample::write_file(dir.fd(), kName, image);
    const ImageReader reader = ImageReader::open(dir.fd(), kName);
    Memory memory;
    memory.map(0x10000, Buffer(8192));
    memory.map(0x20000, Buffer(4096));
    CHECK_THROWS(Errc::corrupt_data, reader.restore(memory, 2, false));
    Buffer page(4096);
    memory.read(0x11000, page);
    CHECK(page == Buffer(4096));
    sample::LendingMemory lending(1);
    lending.map_like(memory, std::byte{0});
    CHECK_THROWS(Errc::corrupt_data, reader.restore(lending, 2, false));
    lending.read(0x11000, page);
    CHECK(page == Buffer(4096));
    CHECK(lending.out() == 0);
    try {
        reader.verify(1);
        CHECK(false && "damage was not found");
    } catch (const Error& e) {
        CHECK(std::strstr(e.what(), "chunk 1 at 0x11000") != nullptr);
    }
}

} // namespace

int main() {
    every_single_bit_flip_is_found(1, verify);
    every_single_bit_flip_is_found(64, verify);
    every_single_bit_flip_is_found(64, restore);
    every_truncation_and_extension_is_found();
    two_halves_of_different_images_are_found();
    values_out_of_range_are_refused();
    the_kind_of_memory_is_checked();
    features_and_versions_are_told_apart();
    what_is_not_a_file_is_refused();
    nothing_unchecked_is_restored();
}
