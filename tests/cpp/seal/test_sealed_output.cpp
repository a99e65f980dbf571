// SPDX-License-Identifier: Apache-2.0
// What is sealed while it is written: bytes that come in any order, by several threads, are there again, and
// only for who has the key; a failure leaves nothing; and all sealed files of a checkpoint are one.
#include "check.hpp"
#include "sealed_sample.hpp"

#include "core/error.hpp"
#include "core/image_reader.hpp"
#include "core/image_writer.hpp"
#include "seal/key_source.hpp"
#include "seal/sealed_checkpoint.hpp"
#include "seal/sealed_output.hpp"

#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

using namespace gpustasis;
using namespace gpustasis::seal;
using sample::Buffer;
using sample::Directory;

namespace {

constexpr const char* kName = "gpustasis-1.img";

SealedOutput::Options options(std::uint32_t file_id = kFirstOther, std::uint32_t alignment = 1) {
    return {
        .file_id = file_id, .name = kName, .alignment = alignment, .frame_size = kMinSealedFrame};
}

Buffer read_back(const Directory& dir, std::uint32_t file_id, const DataKey& key) {
    const auto input = open_sealed_image(dir.fd(), file_id, kName, key);
    Buffer bytes(input->size());
    CHECK(input->read(0, bytes.size(), bytes).size() == bytes.size());
    return bytes;
}

struct Piece {
    std::size_t offset;
    std::size_t size;   // bytes that are put
    std::size_t padded; // with zeros behind them
};

/// Cuts `size` bytes into chunks that begin at multiples of `alignment`; some are left out.
std::vector<Piece> cut(std::size_t size, std::size_t alignment, std::mt19937& random) {
    std::vector<Piece> pieces;
    for (std::size_t at = 0; at < size;) {
        const std::size_t wanted = 1 + random() % (3 * kMinSealedFrame);
        const std::size_t bytes = std::min(wanted, size - at);
        const std::size_t padded = (bytes + alignment - 1) / alignment * alignment;
        if (random() % 5 != 0)
            pieces.push_back({at, bytes, padded});
        at += padded;
    }
    return pieces;
}

void any_order_gives_the_same() {
    std::mt19937 random(20260101);
    for (int round = 0; round < 60; round += kStride) {
        const std::size_t alignment = std::size_t{1} << random() % 13;
        const std::size_t size = random() % (20 * kMinSealedFrame);
        std::vector<Piece> pieces = cut(size, alignment, random);
        std::size_t end = 0;
        for (const Piece& piece : pieces)
            end = std::max(end, piece.offset + piece.padded);
        end += random() % (2 * kMinSealedFrame); // zeros at the end
        Buffer wanted(end);
        for (const Piece& piece : pieces)
            std::ranges::copy(sample::noise(piece.size, static_cast<unsigned>(piece.offset)),
                              wanted.begin() + static_cast<std::ptrdiff_t>(piece.offset));
        std::ranges::shuffle(pieces, random);

        const Directory dir;
        FreshKey key;
        SealedOutput output(key, dir.fd(),
                            options(kFirstOther, static_cast<std::uint32_t>(alignment)));
        {
            std::vector<std::jthread> threads;
            for (std::size_t first = 0; first < 3; ++first)
                threads.emplace_back([&, first] {
                    for (std::size_t number = first; number < pieces.size(); number += 3) {
                        const Piece& piece = pieces[number];
                        Buffer bytes =
                            sample::noise(piece.size, static_cast<unsigned>(piece.offset));
                        if (piece.size == piece.padded)
                            bytes.push_back(std::byte{0x77}); // of the buffer, not of the chunk
                        output.write(piece.offset, bytes, piece.size);
                    }
                });
        }
        CHECK(dir.names() == std::vector<std::string>{"." + sealed_name(kFirstOther) + ".part"});
        output.commit(end);
        CHECK(dir.names() == std::vector<std::string>{sealed_name(kFirstOther)});
        CHECK(read_back(dir, kFirstOther, key.key()) == wanted);
        CHECK(output.listed().file_id == kFirstOther);
    }
}

void bytes_are_put_once() {
    const Directory dir;
    FreshKey key;
    SealedOutput output(key, dir.fd(), options());
    const Buffer frame = sample::noise(kMinSealedFrame, 1);
    output.put(0, frame);
    CHECK_THROWS(Errc::bad_argument, output.put(5, Bytes(frame).first(1))); // that frame is sealed
    CHECK_THROWS(Errc::bad_argument, SealedOutput(key, dir.fd(), options())); // a file, once
}

void what_fails_leaves_nothing() {
    const Directory dir;
    FreshKey key;
    {
        SealedOutput output(key, dir.fd(), options());
        output.put(0, sample::noise(3 * kMinSealedFrame, 1));
    }
    CHECK(dir.names().empty());

    // No room for more, as on a disk that is full.
    std::signal(SIGXFSZ, SIG_IGN);
    rlimit before{};
    CHECK(::getrlimit(RLIMIT_FSIZE, &before) == 0);
    const rlimit small{2 * kMinSealedFrame, before.rlim_max};
    const auto fails = [&](const auto& work) { // as a full disk does
        bool failed = false;
        CHECK(::setrlimit(RLIMIT_FSIZE, &small) == 0);
        try {
            work();
        } catch (const Error& error) {
            failed = error.code() == Errc::io;
        }
        CHECK(::setrlimit(RLIMIT_FSIZE, &before) == 0);
        return failed;
    };
    { // blocks are written once they are full
        constexpr std::size_t size = 3 * BlockOutput::kBlockSize;
        SealedOutput output(key, dir.fd(), options(kFirstOther + 1));
        CHECK(fails([&] { output.put(0, sample::noise(size, 1)); }));
        CHECK_THROWS(Errc::bad_argument, output.commit(size));
    }
    { // and the rest at the end
        constexpr std::size_t size = 8 * kMinSealedFrame;
        SealedOutput output(key, dir.fd(), options(kFirstOther + 2));
        output.put(0, sample::noise(size, 1));
        CHECK(fails([&] { output.commit(size); }));
    }
    CHECK(dir.names().empty());
}

constexpr std::string_view kMarker = "a marker that nobody without the key may read";

/// Memory of a task: a marker between noise and zeros.
class Memory : public MemorySource, public MemorySink {
public:
    explicit Memory(std::size_t size) : bytes(size) {}
    Memory(std::size_t size, unsigned seed) : bytes(size) {
        constexpr std::size_t page = 4096;
        for (std::size_t at = 0; at + 3 * page <= size; at += 3 * page) {
            std::ranges::copy(sample::noise(page, seed + static_cast<unsigned>(at)),
                              bytes.begin() + static_cast<std::ptrdiff_t>(at));
            std::memcpy(bytes.data() + at + page, kMarker.data(), kMarker.size());
        }
    }
    void read(std::uint64_t address, MutBytes out) override {
        std::ranges::copy(Bytes(bytes).subspan(address - kBegin, out.size()), out.begin());
    }
    void write(std::uint64_t address, Bytes from) override {
        std::ranges::copy(from, bytes.begin() + static_cast<std::ptrdiff_t>(address - kBegin));
    }
    void write_zeros(std::uint64_t address, std::uint64_t length) override {
        std::fill_n(bytes.begin() + static_cast<std::ptrdiff_t>(address - kBegin), length,
                    std::byte{0});
    }
    ImageInfo info() const {
        ImageInfo info;
        info.pid = 1;
        info.chunk_size = 16384;
        info.regions = {{.address = kBegin, .length = bytes.size(), .protection = 3}};
        return info;
    }
    static constexpr std::uint64_t kBegin = 0x10000;
    Buffer bytes;
};

bool has_marker(const Buffer& bytes) {
    return !std::ranges::search(bytes, std::as_bytes(std::span(kMarker))).empty();
}

WriteResult write_sealed_image(FreshKey& key, const Directory& dir, Memory& memory,
                               unsigned threads) {
    const WriteOptions how{.threads = threads, .compress = false};
    SealedOutput output(key, dir.fd(), options(kFirstOther, how.alignment));
    return write_image(output, memory.info(), memory, how);
}

void an_image_is_sealed_and_comes_back() {
    for (const unsigned threads : {1U, 2U, 7U}) {
        const Directory dir;
        FreshKey key;
        Memory memory(3U << 20, threads);
        const WriteResult written = write_sealed_image(key, dir, memory, threads);
        CHECK(has_marker(memory.bytes) && !has_marker(dir.read(sealed_name(kFirstOther))));

        for (const auto& input : {open_sealed_image(dir.fd(), kFirstOther, kName, key.key()),
                                  find_sealed_image(dir.fd(), kName, key.key())}) {
            const ImageReader image = ImageReader::from_input(input, kName);
            CHECK(image.digest() == written.digest);
            Memory restored(memory.bytes.size());
            image.restore(restored, threads, false);
            CHECK(restored.bytes == memory.bytes);
        }
        CHECK_THROWS(Errc::io, find_sealed_image(dir.fd(), "gpustasis-2.img", key.key()));
        const FreshKey other;
        CHECK_THROWS(Errc::corrupt_data,
                     open_sealed_image(dir.fd(), kFirstOther, kName, other.key()));
    }
}

void every_byte_counts() {
    const Directory dir;
    FreshKey key;
    Memory memory(6 * 4096, 1);
    write_sealed_image(key, dir, memory, 1);
    const std::string name = sealed_name(kFirstOther);
    const Buffer whole = dir.read(name);
    CHECK(read_back(dir, kFirstOther, key.key()).size() < whole.size());
    for (std::size_t at = 0; at < whole.size(); at += kStride) {
        Buffer changed = whole;
        changed[at] ^= std::byte{0x20};
        dir.write(name, changed);
        try {
            read_back(dir, kFirstOther, key.key());
        } catch (const Error& error) {
            CHECK(error.code() == Errc::corrupt_data || error.code() == Errc::unsupported);
            continue;
        }
        CHECK(false && "a changed byte was not found");
    }
}

/// Three sealed files: 2 and 3 with a file each, and 1 with `manifest`, which lists them.
struct Sealed {
    Directory dir;
    FreshKey key;
    std::vector<OtherFile> others;

    Sealed() {
        for (const std::uint32_t id : {2U, 3U}) {
            SealedOutput::Options named = options(id);
            named.name = "image-" + std::to_string(id);
            SealedOutput output(key, dir.fd(), named);
            output.put(0, sample::noise(5000 * id, id));
            output.commit(5000 * std::size_t{id});
            others.push_back(output.listed());
        }
        SealedOutput::Options first = options(kSealedFile);
        first.name = "manifest";
        first.others = others;
        SealedOutput output(key, dir.fd(), first);
        output.put(0, sample::noise(100, 9));
        output.commit(100);
    }
};

void all_files_are_one() {
    const Sealed sealed;
    const SealedCheckpoint checkpoint(sealed.dir.fd(), sealed.key.key());
    CHECK(sealed.dir.names() == (std::vector<std::string>{"gpustasis-sealed-2.img",
                                                          "gpustasis-sealed-3.img", kSealedName}));
    CHECK(checkpoint.entries().size() == 3 && checkpoint.has("image-3"));
    CHECK(checkpoint.read("image-2", 10000) == sample::noise(10000, 2));
    CHECK_THROWS(Errc::bad_argument, checkpoint.read("image-2", 9999));
    CHECK_THROWS(Errc::bad_argument, checkpoint.read("image-4", 9999));
    const Directory out;
    checkpoint.extract(out.fd(), 2);
    CHECK(out.names() == (std::vector<std::string>{"image-2", "image-3", "manifest"}));
    CHECK(out.read("image-3") == sample::noise(15000, 3));
    checkpoint.compare(out.fd(), 2);
    out.write("image-3", sample::noise(15000, 4));
    CHECK_THROWS(Errc::corrupt_data, checkpoint.compare(out.fd(), 2));
}

void no_file_is_missing_or_added() {
    const Sealed sealed;
    const Sealed other;
    const DataKey& key = sealed.key.key();
    const Buffer two = sealed.dir.read("gpustasis-sealed-2.img");
    const auto refused = [&](Errc code) {
        CHECK_THROWS(code, SealedCheckpoint(sealed.dir.fd(), key));
    };
    CHECK(::unlinkat(sealed.dir.fd(), "gpustasis-sealed-2.img", 0) == 0);
    refused(Errc::io);
    sealed.dir.write("gpustasis-sealed-2.img", sealed.dir.read("gpustasis-sealed-3.img"));
    refused(Errc::corrupt_data); // one twice
    sealed.dir.write("gpustasis-sealed-2.img", other.dir.read("gpustasis-sealed-2.img"));
    refused(Errc::corrupt_data); // of another checkpoint
    sealed.dir.write("gpustasis-sealed-2.img", two);
    SealedCheckpoint(sealed.dir.fd(), key);
    sealed.dir.write("gpustasis-sealed-4.img", two);
    refused(Errc::corrupt_data); // one more
    CHECK(::unlinkat(sealed.dir.fd(), "gpustasis-sealed-4.img", 0) == 0);
    sealed.dir.write("gpustasis-sealed-02.img", two); // no name of ours
    SealedCheckpoint(sealed.dir.fd(), key);
    remove_sealed_files(sealed.dir.fd());
    CHECK(sealed.dir.names() == std::vector<std::string>{"gpustasis-sealed-02.img"});
}

// Only a faulty writer lists another end than that of the file under the number.
void another_end_is_refused() {
    const Directory dir;
    FreshKey key;
    SealedOutput image(key, dir.fd(), options());
    image.commit(0);
    OtherFile listed = image.listed();
    listed.end_tag[3] ^= std::byte{1};
    SealedOutput::Options first = options(kSealedFile);
    first.name = "manifest";
    first.others = {listed};
    SealedOutput(key, dir.fd(), first).commit(0);
    CHECK_THROWS(Errc::corrupt_data, SealedCheckpoint(dir.fd(), key.key()));
}

// Memory is bounded: what is full, padding counted, is in the file and not held.
void full_blocks_are_written_at_once() {
    const Directory dir;
    FreshKey key;
    constexpr std::uint32_t alignment = 512;
    constexpr std::size_t size = 4 * BlockOutput::kBlockSize;
    SealedOutput output(key, dir.fd(), options(kFirstOther, alignment));
    Buffer chunk = sample::noise(alignment, 1);
    for (std::size_t at = alignment; at < size; at += alignment)
        output.write(at, chunk, alignment - 100);
    // Into the front of the first frame nothing was put yet, so its block is held; and the last, which the frames'
    // overhead has begun.
    const std::string part = PartFile::part_name(sealed_name(kFirstOther));
    const Buffer written = dir.read(part);
    CHECK(written.size() == size);
    CHECK(std::ranges::all_of(Bytes(written).first(BlockOutput::kBlockSize),
                              [](std::byte byte) { return byte == std::byte{0}; }));
    CHECK(!std::ranges::all_of(Bytes(written).subspan(BlockOutput::kBlockSize, kMinSealedFrame),
                               [](std::byte byte) { return byte == std::byte{0}; }));
    output.commit(size);
    CHECK(read_back(dir, kFirstOther, key.key()).size() == size);
}

// What opens an envelope has one name, for a plugin that has nothing else.
void a_key_has_one_name() {
    const FreshKey key;
    CHECK(key_descriptor("fd:7") == 7 && key_descriptor("/fd:7") == -1);
    for (const char* source : {"fd:", "fd:0", "fd:2", "fd:-7", "fd:7x", "fd: 7", "fd:99999999999"})
        CHECK(key_descriptor(source) == -1);
    CHECK_THROWS(Errc::io, open_envelope({}, "/nowhere/key.pem"));
    int ends[2];
    CHECK(::pipe(ends) == 0);
    const Secret record = key.key().record();
    CHECK(::write(ends[1], record.bytes().data(), record.size()) ==
          static_cast<ssize_t>(record.size()));
    ::close(ends[1]);
    // No envelope: what is read is not believed; and the descriptor is closed, whatever happens.
    CHECK_THROWS(Errc::corrupt_data, open_envelope({}, "fd:" + std::to_string(ends[0])));
    CHECK(::close(ends[0]) != 0 && errno == EBADF);
}

void numbers_have_one_name() {
    CHECK(sealed_file_id("gpustasis-sealed.img") == 1 && sealed_file_id(sealed_name(77)) == 77);
    for (const char* name :
         {"gpustasis-sealed-1.img", "gpustasis-sealed-.img", "gpustasis-sealed-02.img",
          "gpustasis-sealed-2.imgx", "gpustasis-sealed-+2.img", "gpustasis-sealed-2 .img",
          "gpustasis-sealed-262145.img", "gpustasis-sealed-4294967298.img", "gpustasis-2.img"})
        CHECK(sealed_file_id(name) == 0);
    CHECK(sealed_file_id("gpustasis-sealed-262144.img") == kMaxFileId);
    CHECK(!can_be_sealed("gpustasis-sealed-2.img") && can_be_sealed("gpustasis-sealed-1.img"));
}

} // namespace

int main() {
    any_order_gives_the_same();
    bytes_are_put_once();
    what_fails_leaves_nothing();
    an_image_is_sealed_and_comes_back();
    every_byte_counts();
    all_files_are_one();
    no_file_is_missing_or_added();
    another_end_is_refused();
    numbers_have_one_name();
    full_blocks_are_written_at_once();
    a_key_has_one_name();
}
