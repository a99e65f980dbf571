// SPDX-License-Identifier: Apache-2.0
// Any bytes at all as an image or a manifest: the reader accepts or throws Error, no more.
// The mutator makes checksums right again after most mutations, so that what lies behind them is
// reached.
#include "check.hpp"
#include "sample.hpp"

#include "core/file_pack.hpp"
#include "core/hash.hpp"
#include "core/image_format.hpp"
#include "core/image_reader.hpp"
#include "core/manifest.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

using namespace gpustasis;

extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t max);
extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size,
                                               std::size_t max, unsigned seed);
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

// Zero chunks make much memory of few bytes: read this much of it per input.
constexpr std::uint64_t kMaxPlain = 256U << 10;

/// One file in memory, with a path that can be opened.
class MemoryFile {
public:
    MemoryFile() : fd_(::memfd_create("fuzz", MFD_CLOEXEC)) { CHECK(fd_ >= 0); }
    void set(Bytes bytes) const {
        CHECK(::pwrite(fd_, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
        CHECK(::ftruncate(fd_, static_cast<off_t>(bytes.size())) == 0);
    }
    int fd() const { return fd_; }
    std::string path() const { return "/proc/self/fd/" + std::to_string(fd_); }

private:
    int fd_;
};

/// A directory in which the manifest is a link to a MemoryFile.
class ManifestDir {
public:
    explicit ManifestDir(const MemoryFile& file) {
        CHECK(::symlinkat(file.path().c_str(), directory_.fd(), kManifestName) == 0);
    }
    int fd() const { return directory_.fd(); }

private:
    sample::TempDir directory_;
};

template <class Body>
void only_error(const Body& body) {
    try {
        body();
    } catch (const Error& e) {
        CHECK(e.code() == Errc::corrupt_data || e.code() == Errc::unsupported);
    }
}

// What docs/format.md promises of an image that was accepted.
void check_chunk(const ImageReader& reader, const ChunkInfo& chunk) {
    CHECK(chunk.plain_size != 0 && chunk.plain_size <= reader.info().chunk_size);
    const std::vector<Source>& sources = reader.info().sources;
    CHECK(chunk.source <= sources.size());
    const std::uint64_t size =
        chunk.source == 0 ? reader.file_size() : sources[chunk.source - 1U].file_size;
    CHECK(chunk.offset <= size && chunk.stored_size <= size - chunk.offset);
    switch (chunk.encoding) {
    case Encoding::zero:
        CHECK(chunk.stored_size == 0 && chunk.offset == 0 && chunk.source == 0);
        return;
    case Encoding::lz4:
        CHECK(chunk.stored_size != 0 && chunk.stored_size < chunk.plain_size);
        return;
    case Encoding::raw: CHECK(chunk.stored_size == chunk.plain_size); return;
    }
    CHECK(false && "an encoding that there is not");
}

void check_regions(const ImageInfo& info) {
    std::uint64_t end = 0;
    for (const Region& region : info.regions) {
        CHECK(region.address >= end && region.length != 0 && region.protection <= 7);
        CHECK(region.address % 4096 == 0 && region.length % 4096 == 0);
        end = region.address + region.length;
        CHECK(end > region.address);
    }
}

// What docs/format.md promises of a pack that was accepted.
void use_pack(const PackReader& pack) {
    std::uint64_t total = 0;
    for (const PackedFile& file : pack.files()) {
        CHECK(can_be_packed(file.name) && file.mode <= 0777);
        CHECK(pack.read(file).size() == file.size);
        total += file.size;
    }
    CHECK(total == pack.size());
    pack.verify(1);
}

void use_image(const ImageReader& reader, int fd) {
    check_regions(reader.info());
    std::vector<std::byte> plain;
    std::uint64_t total = 0;
    std::uint64_t end = 0;
    for (std::uint64_t i = 0; i < reader.chunk_count() && total < kMaxPlain; ++i) {
        const ChunkInfo chunk = reader.chunk(i);
        check_chunk(reader, chunk);
        CHECK(chunk.address >= end);
        end = chunk.address + chunk.plain_size;
        total += chunk.plain_size;
        if (chunk.source != 0)
            continue; // its file is not there
        plain.resize(chunk.plain_size);
        only_error([&] {
            reader.read_chunk(i, plain);
            CHECK(hash128(plain) == chunk.hash);
        });
    }
    if (total < kMaxPlain && reader.info().sources.empty())
        only_error([&] { reader.verify(1); });
    if (total < kMaxPlain && reader.info().kind == MemoryKind::files)
        only_error([&] { use_pack(PackReader::open_part(fd, 0, reader.file_size(), "fuzzed")); });
}

/// Makes the checksums of a mutated file right, where the file is whole enough to have them.
class Repair {
public:
    explicit Repair(MutBytes file) : file_(file) {}

    void manifest() {
        if (file_.size() >= 32)
            put(file_.size() - 16, hash128(Bytes(file_).first(file_.size() - 16)));
    }
    void image(bool layout) {
        if (file_.size() < format::kHeaderSize + format::kTrailerSize)
            return;
        const std::size_t trailer = file_.size() - format::kTrailerSize;
        put(240, hash128(Bytes(file_).first(240)));
        const auto index_size = get(trailer + 40) * format::kIndexEntrySize;
        if (layout) {
            put(trailer + 80, std::uint64_t{file_.size()});
            put(trailer + 32, trailer - index_size);
            put(trailer, trailer - index_size - get(trailer + 8));
        }
        if (layout)
            places(get(trailer + 32), get(trailer + 40), get(trailer));
        chunks(get(trailer + 32), get(trailer + 40));
        hash_run(trailer + 16, get(trailer), get(trailer + 8));
        hash_run(trailer + 48, get(trailer + 32), index_size);
        put(trailer + 64, hash128(Bytes(file_).first(240)));
        put(trailer + 112, hash128(Bytes(file_).subspan(trailer, 112)));
    }

private:
    bool has(std::uint64_t offset, std::uint64_t size) const {
        return offset <= file_.size() && size <= file_.size() - offset;
    }
    std::uint64_t get(std::size_t offset) const {
        std::uint64_t value;
        std::memcpy(&value, &file_[offset], sizeof value);
        return value;
    }
    std::uint16_t source_of(std::size_t entry) const {
        std::uint16_t source;
        std::memcpy(&source, &file_[entry + format::kIndexSourceOffset], sizeof source);
        return source;
    }
    template <class T>
    void put(std::size_t offset, const T& value) {
        std::memcpy(&file_[offset], &value, sizeof value);
    }
    void hash_run(std::size_t to, std::uint64_t offset, std::uint64_t size) {
        if (has(offset, size))
            put(to, hash128(Bytes(file_).subspan(offset, size)));
    }
    // Put chunks one behind the other as their sizes have it, and give what is left, more or less
    // than nothing, to the last of them.
    void places(std::uint64_t index_offset, std::uint64_t count, std::uint64_t metadata_offset) {
        if (count > file_.size() || !has(index_offset, count * format::kIndexEntrySize))
            return;
        const std::uint64_t alignment = std::max<std::uint64_t>(get(72) & 0xffff, 1);
        std::uint64_t end = format::align_up(format::kHeaderSize, alignment);
        std::size_t last = 0;
        for (std::uint64_t i = 0; i < count; ++i) {
            const std::size_t entry = index_offset + i * format::kIndexEntrySize;
            if (file_[entry + 36] == std::byte{0} || source_of(entry) != 0)
                continue;
            last = entry;
            put(entry + 16, end);
            end = format::align_up(end + (get(entry + 32) & 0xffffffff), alignment);
        }
        if (last != 0 && end != metadata_offset)
            put(last + 32, static_cast<std::uint32_t>(metadata_offset - get(last + 16)));
    }
    // Hashes of stored bytes: of lz4 chunks so that they reach the decoder, of raw ones whole.
    void chunks(std::uint64_t index_offset, std::uint64_t count) {
        if (count > file_.size() || !has(index_offset, count * format::kIndexEntrySize))
            return;
        for (std::uint64_t i = 0; i < count; ++i) {
            const std::size_t entry = index_offset + i * format::kIndexEntrySize;
            const std::uint64_t offset = get(entry + 16);
            const std::uint64_t size = get(entry + 32) & 0xffffffff;
            if (!has(offset, size))
                continue;
            const Bytes stored = Bytes(file_).subspan(offset, size);
            if (file_[entry + 36] == std::byte{1})
                put(entry + 24, hash64(stored));
            if (file_[entry + 36] == std::byte{2})
                put(entry, hash128(stored));
        }
    }
    MutBytes file_;
};

bool is_manifest(Bytes file) {
    return file.size() > 6 && std::memcmp(file.data() + 5, "MF", 2) == 0;
}

} // namespace

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size,
                                               std::size_t max, unsigned seed) {
    std::minstd_rand random(seed);
    const std::size_t header = std::min(size, format::kHeaderSize);
    // The numbers stand at the two ends: mutate only those of most images, in place.
    switch (random() % 4) {
    case 0: size = LLVMFuzzerMutate(data, size, max); break;
    case 1: LLVMFuzzerMutate(data, header, header); break;
    default: {
        const std::size_t tail = std::min<std::size_t>(size, 1024);
        LLVMFuzzerMutate(data + size - tail, tail, tail);
    }
    }
    const MutBytes file(reinterpret_cast<std::byte*>(data), size);
    if (random() % 16 != 0) {
        if (is_manifest(file))
            Repair(file).manifest();
        else
            Repair(file).image(random() % 2 == 0);
    }
    return size;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    static const MemoryFile file;
    static const ManifestDir dir(file);
    const Bytes bytes(reinterpret_cast<const std::byte*>(data), size);
    file.set(bytes);
    if (is_manifest(bytes))
        only_error([&] { read_manifest(dir.fd()); });
    else
        only_error([&] { use_image(ImageReader::open(AT_FDCWD, file.path()), file.fd()); });
    return 0;
}
