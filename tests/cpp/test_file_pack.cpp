// SPDX-License-Identifier: Apache-2.0
// A pack gives back the files that were packed, or is refused.
#include "check.hpp"
#include "sample.hpp"

#include "core/error.hpp"
#include "core/fields.hpp"
#include "core/file_pack.hpp"
#include "core/image_writer.hpp"
#include "core/pack_index.hpp"

#include <sys/stat.h>

#include <cstring>
#include <functional>

using namespace gpustasis;
using sample::Buffer;

namespace {

constexpr std::size_t kPage = 4096;

struct Sample {
    sample::TempDir source, target;
    std::vector<std::string> names;
    PackResult result;

    void add(const std::string& name, const Buffer& bytes) {
        sample::write_file(source.fd(), name, bytes);
        names.push_back(name);
    }
    void write(const PackOptions& options = {}) {
        result = write_pack(sample::id_of(0x11), source.fd(), names, target.fd(), options);
    }
};

void add_all(Sample& sample) {
    sample.add("pages-1.img", sample::random_bytes(3 * kPage + 17, 1));
    sample.add("empty.img", {});
    sample.add("also-empty.img", {});
    sample.add("one.img", Buffer(1, std::byte{7}));
    sample.add("a-page.img", sample::pattern_bytes(kPage));
    sample.add("less.img", sample::pattern_bytes(kPage - 1));
    sample.add("more.img", sample::pattern_bytes(kPage + 1));
    sample.add("zeros.img", Buffer(40 * kPage));
    sample.add(std::string(255, 'n'), sample::pattern_bytes(100));
    sample.add(".hidden", sample::pattern_bytes(5));
}

void what_was_packed_comes_back() {
    for (const std::uint32_t chunk_size : {4096U, 0U}) {
        Sample sample;
        add_all(sample);
        CHECK(::fchmodat(sample.source.fd(), "one.img", 0640, 0) == 0);
        sample.write({.chunk_size = chunk_size});
        const PackReader pack = PackReader::open(sample.target.fd());
        CHECK(pack.image().digest() == sample.result.digest);
        CHECK(pack.image().info().checkpoint_id == sample::id_of(0x11));
        CHECK(pack.files().size() == sample.names.size() && sample.result.files == 10);
        CHECK(pack.size() == sample.result.plain_size);
        CHECK(pack.find("one.img")->mode == 0640 && pack.find("two.img") == nullptr);
        pack.verify(2);
        const sample::TempDir out, without;
        pack.extract(out.fd(), 2);
        pack.extract(without.fd(), 1, "one.img");
        CHECK(!without.has("one.img") && without.has("more.img"));
        for (const std::string& name : sample.names) {
            const Buffer wanted = sample::read_file(sample.source.fd(), name);
            CHECK(sample::read_file(out.fd(), name) == wanted);
            CHECK(pack.read(*pack.find(name)) == wanted);
            struct stat before {
            }, after{};
            CHECK(::fstatat(sample.source.fd(), name.c_str(), &before, 0) == 0);
            CHECK(::fstatat(out.fd(), name.c_str(), &after, 0) == 0);
            CHECK(before.st_mode == after.st_mode);
            CHECK(before.st_mtim.tv_nsec == after.st_mtim.tv_nsec);
        }
        CHECK_THROWS(Errc::io, pack.extract(out.fd(), 1)); // they are there already
    }
}

void threads_change_nothing() {
    Sample sample;
    add_all(sample);
    sample.write({.threads = 1, .chunk_size = 4096});
    const Buffer one = sample::read_file(sample.target.fd(), kPackName);
    std::ranges::reverse(sample.names);
    sample.write({.threads = 5, .chunk_size = 4096});
    CHECK(sample::read_file(sample.target.fd(), kPackName) == one);
}

void many_files_have_a_long_index() {
    Sample sample;
    for (int i = 0; i < 700; ++i)
        sample.add("a-file-of-a-large-tree-" + std::to_string(i),
                   Buffer(static_cast<std::size_t>(i % 3), std::byte{1}));
    sample.write({.chunk_size = 4096});
    const PackReader pack = PackReader::open(sample.target.fd());
    pack.verify(1);
    for (const PackedFile& file : pack.files())
        CHECK(pack.read(file) == sample::read_file(sample.source.fd(), file.name));
}

void read_all(int dir) {
    const PackReader pack = PackReader::open(dir);
    pack.verify(1);
}

void every_byte_counts() {
    Sample sample;
    sample.add("a.img", sample::random_bytes(300, 1));
    sample.add("b.img", sample::pattern_bytes(5000));
    sample.add("c.img", Buffer(kPage));
    sample.write({.threads = 1, .chunk_size = 4096});
    Buffer bytes = sample::read_file(sample.target.fd(), kPackName);
    for (std::size_t at = 0; at < bytes.size(); at += kStride) {
        bytes[at] ^= std::byte{0x10};
        sample::write_file(sample.target.fd(), kPackName, bytes);
        CHECK_THROWS(Errc::corrupt_data, read_all(sample.target.fd()));
        bytes[at] ^= std::byte{0x10};
    }
    for (std::size_t size = 0; size < bytes.size(); size += 31) {
        sample::write_file(sample.target.fd(), kPackName, Bytes(bytes).first(size));
        CHECK_THROWS(Errc::corrupt_data, read_all(sample.target.fd()));
    }
}

ImageInfo info_of_pack(std::uint64_t length) {
    ImageInfo info;
    info.checkpoint_id = sample::id_of(0x11);
    info.pid = 1;
    info.kind = MemoryKind::files;
    info.chunk_size = 4096;
    info.regions = {{.address = 0, .length = length}};
    return info;
}

using Change = std::function<void(Buffer&)>;
using ChangeInfo = std::function<void(ImageInfo&)>;

/// What somebody makes who makes all hashes right.
void forge(int dir, const Change& change, const ChangeInfo& change_info) {
    const std::vector<PackedFile> files = {{.name = "a.img", .mode = 0600, .size = 10},
                                           {.name = "b.img", .mode = 0600, .size = 5000}};
    Buffer content = format::encode_pack_index(files);
    content.resize(4 * kPage);
    std::ranges::fill(MutBytes(content).subspan(kPage, 10), std::byte{1});
    change(content);
    ImageInfo info = info_of_pack(content.size());
    change_info(info);
    sample::Memory memory;
    memory.map(info.regions[0].address, content);
    write_image(dir, kPackName, info, memory, {.threads = 1});
}

void forged(const Change& change, const ChangeInfo& change_info = [](ImageInfo&) {}) {
    const sample::TempDir dir;
    forge(dir.fd(), change, change_info);
    CHECK_THROWS(Errc::corrupt_data, read_all(dir.fd()));
}

template <class T>
Change put(std::size_t at, T value) {
    return [=](Buffer& content) { std::memcpy(content.data() + at, &value, sizeof value); };
}

constexpr std::size_t kFirst = format::kPackHeadSize;
constexpr std::size_t kName = kFirst + 24;
constexpr std::size_t kSecond = kName + 5;

void what_no_writer_makes_is_refused() {
    const auto nothing = [](Buffer&) {};
    const sample::TempDir right;
    forge(right.fd(), nothing, [](ImageInfo&) {});
    read_all(right.fd());
    forged(put(0, std::uint64_t{3}));              // more files than the index has
    forged(put(0, std::uint64_t{1}));              // fewer
    forged(put(0, ~std::uint64_t{0}));             // out of bounds
    forged(put(8, std::uint64_t{59}));             // a longer index
    forged(put(8, std::uint64_t{1} << 40));        // out of bounds
    forged(put(16, std::uint8_t{1}));              // reserved
    forged(put(kFirst, std::uint16_t{0}));         // no name
    forged(put(kFirst, std::uint16_t{500}));       // longer than all that is there
    forged(put(kFirst + 2, std::uint16_t{04600})); // a mode with more than permissions
    forged(put(kFirst + 4, std::uint8_t{1}));      // reserved
    forged(put(kFirst + 8, std::uint64_t{5000}));  // the files do not fill the region
    forged(put(kFirst + 8, ~std::uint64_t{0}));    // out of bounds
    forged(put(kName, '/'));
    forged(put(kName, '\0'));
    forged(put(kName, 'b'));                        // twice the same
    forged(put(kName, 'c'));                        // not ascending
    forged(put(kSecond + 30, std::uint8_t{1}));     // padding of the index
    forged(put(kPage + 10, std::uint8_t{1}));       // padding of a file
    forged(put(2 * kPage + 5000, std::uint8_t{1})); // of the last
    forged([](Buffer& content) { content.resize(content.size() + kPage); });
    forged([](Buffer& content) { content.resize(content.size() - kPage); });
    forged(nothing, [](ImageInfo& info) { info.kind = MemoryKind::cpu; });
    forged(nothing, [](ImageInfo& info) { info.pid = 2; });
    forged(nothing, [](ImageInfo& info) { info.regions[0].address = kPage; });
}

void what_cannot_be_packed_is_refused() {
    Sample sample;
    sample.add("a.img", Buffer(1));
    const auto refused = [&](Errc code, std::vector<std::string> names) {
        CHECK_THROWS(code,
                     write_pack(sample::id_of(1), sample.source.fd(), names, sample.target.fd()));
    };
    refused(Errc::bad_argument, {"a.img", "a.img"});
    refused(Errc::bad_argument, {"../a.img"});
    refused(Errc::bad_argument, {""});
    refused(Errc::bad_argument, {"gpustasis-1.img"});
    refused(Errc::io, {"b.img"});
    CHECK(::symlinkat("a.img", sample.source.fd(), "link") == 0);
    refused(Errc::io, {"link"});
    CHECK(::mkdirat(sample.source.fd(), "directory", 0700) == 0);
    refused(Errc::bad_argument, {"directory"});
    CHECK(sample.target.empty());
}

} // namespace

int main() {
    what_was_packed_comes_back();
    threads_change_nothing();
    many_files_have_a_long_index();
    every_byte_counts();
    what_no_writer_makes_is_refused();
    what_cannot_be_packed_is_refused();
}
