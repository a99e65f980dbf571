// SPDX-License-Identifier: Apache-2.0
// The sealed file: what comes out is what went in, with names, modes and times; written whole or not at all.
#include "check.hpp"
#include "sealed_sample.hpp"

#include "core/direct_io.hpp"
#include "core/error.hpp"
#include "seal/content_map.hpp"
#include "seal/sealed_writer.hpp"

#include <algorithm>
#include <array>

using namespace gpustasis;
using sample::Buffer;
using sample::Directory;

namespace {

void files_come_back_with_mode_and_time() {
    const Directory plain;
    const Directory sealed;
    const Directory again;
    const auto files = sample::files();
    for (const auto& [name, bytes] : files)
        plain.write(name, bytes);
    const std::array<timespec, 2> times{timespec{1000, 5}, timespec{2000, 123'456'789}};
    CHECK(::utimensat(plain.fd(), "pages-1.img", times.data(), 0) == 0);
    CHECK(::fchmodat(plain.fd(), "zz", 0751, 0) == 0);

    seal::FreshKey key;
    const auto sizes =
        seal::write_sealed(key, plain.fd(), sample::names_of(files), sealed.fd(), sample::kSmall);
    CHECK(sizes.files == files.size());
    CHECK(sealed.names() == std::vector<std::string>{seal::kSealedName});
    CHECK(sealed.read(seal::kSealedName).size() == sizes.file_size);

    const seal::SealedReader reader(sealed.fd(), seal::kSealedName, key.key());
    seal::compare_sealed(reader, plain.fd(), 2);
    seal::extract_sealed(reader, again.fd(), 2);
    CHECK(again.names() == sample::names_of(files));
    for (const auto& [name, bytes] : files) {
        CHECK(again.read(name) == bytes);
        struct stat was {};
        struct stat is {};
        CHECK(::fstatat(plain.fd(), name.c_str(), &was, 0) == 0);
        CHECK(::fstatat(again.fd(), name.c_str(), &is, 0) == 0);
        CHECK(was.st_mode == is.st_mode);
        CHECK(was.st_mtim.tv_sec == is.st_mtim.tv_sec && was.st_mtim.tv_nsec == is.st_mtim.tv_nsec);
    }
}

// Names, contents: nothing of them is in the sealed file.
void nothing_is_in_the_clear() {
    const Directory sealed;
    seal::FreshKey key;
    sample::seal_into(sealed, key);
    const Buffer bytes = sealed.read(seal::kSealedName);
    const auto holds = [&](Bytes piece) { return !std::ranges::search(bytes, piece).empty(); };
    CHECK(holds(key.key().sealed_id())); // search finds what is there
    for (const auto& [name, content] : sample::files()) {
        if (name.size() > 4)
            CHECK(!holds(std::as_bytes(std::span(name))));
        for (std::size_t at = 0; at + 16 <= content.size(); at += 16)
            CHECK(!holds(Bytes(content).subspan(at, 16)));
    }
    CHECK(!holds(key.key().record().bytes().last(32)));
}

void any_part_can_be_read() {
    const Directory sealed;
    seal::FreshKey key;
    sample::seal_into(sealed, key);
    const seal::SealedReader reader(sealed.fd(), seal::kSealedName, key.key());
    CHECK(!reader.find("absent"));
    const auto file = reader.find("pages-1.img");
    CHECK(file);
    const Buffer whole = sample::files().at("pages-1.img");
    for (const std::size_t offset : {0U, 1U, 3000U, 4096U, 8999U, 9000U}) {
        Buffer part(std::min<std::size_t>(whole.size() - offset, 5000));
        reader.read(*file, offset, part);
        CHECK(std::ranges::equal(part, Bytes(whole).subspan(offset, part.size())));
    }
    Buffer past(1);
    CHECK_THROWS(Errc::bad_argument, reader.read(*file, whole.size(), past));
    CHECK_THROWS(Errc::bad_argument, reader.read(99, 0, past));
}

// However many are open, as one for each task at a restore: what they keep is bounded once for all of them.
void readers_use_the_same_buffers() {
    const Directory sealed;
    seal::FreshKey key;
    sample::seal_into(sealed, key);
    const auto pool = BufferPool::of_process();
    CHECK(pool->kept() == 0);
    const seal::SealedReader first(sealed.fd(), seal::kSealedName, key.key());
    const seal::SealedReader second(sealed.fd(), seal::kSealedName, key.key());
    Buffer part(5000);
    first.read(*first.find("pages-1.img"), 0, part);
    const std::size_t kept = pool->kept();
    CHECK(kept > part.size());
    second.read(*second.find("pages-1.img"), 0, part);
    CHECK(pool->kept() == kept);
}

void no_files_at_all_is_a_sealed_file_too() {
    const Directory sealed;
    seal::FreshKey key;
    seal::write_sealed(key, sealed.fd(), {}, sealed.fd(), sample::kSmall);
    const seal::SealedReader reader(sealed.fd(), seal::kSealedName, key.key());
    CHECK(reader.entries().empty());
    sample::read_whole(sealed, key.key());
}

void what_cannot_be_sealed_is_refused_and_leaves_nothing() {
    const Directory plain;
    const Directory sealed;
    plain.write("a", sample::noise(10, 1));
    CHECK(::symlinkat("a", plain.fd(), "link") == 0);
    CHECK(::mkdirat(plain.fd(), "sub", 0700) == 0);
    CHECK(::mkfifoat(plain.fd(), "fifo", 0600) == 0);
    const auto refused = [&](Errc code, std::vector<std::string> names,
                             const seal::SealOptions& options = sample::kSmall) {
        seal::FreshKey key;
        CHECK_THROWS(code,
                     seal::write_sealed(key, plain.fd(), std::move(names), sealed.fd(), options));
        CHECK(sealed.names().empty());
    };
    refused(Errc::io, {"link"});
    refused(Errc::io, {"absent"});
    refused(Errc::bad_argument, {"sub"});
    refused(Errc::bad_argument, {"fifo"});
    refused(Errc::bad_argument, {"a", "a"});
    refused(Errc::bad_argument, {"../a"});
    refused(Errc::bad_argument, {""});
    refused(Errc::bad_argument, {seal::kSealedName});
    refused(Errc::bad_argument, {seal::kEnvelopeName});
    refused(Errc::bad_argument, {"a"}, {4095, 1});
    refused(Errc::bad_argument, {"a"}, {2048, 1});
    refused(Errc::bad_argument, {"a"}, {8U << 20, 1});
}

// A file that changes between two frames is not sealed as something that never was.
void a_file_that_changes_is_noticed() {
    const Directory plain;
    const Directory sealed;
    plain.write("a", sample::noise(64U << 20, 1));
    seal::FreshKey key;
    bool changed = false;
    const auto change = [&](std::uint64_t) {
        if (!changed)
            plain.write("a", sample::noise(1, 2)); // truncated: another time, the same inode
        plain.write("a", sample::noise((64U << 20) - 1, 2));
        changed = true;
    };
    CHECK_THROWS(Errc::corrupt_data,
                 seal::write_sealed(key, plain.fd(), {"a"}, sealed.fd(), {1U << 20, 1}, change));
    CHECK(changed && sealed.names().empty());
}

void a_difference_is_found() {
    const Directory plain;
    const Directory sealed;
    for (const auto& [name, bytes] : sample::files())
        plain.write(name, bytes);
    seal::FreshKey key;
    seal::write_sealed(key, plain.fd(), sample::names_of(sample::files()), sealed.fd(),
                       sample::kSmall);
    const seal::SealedReader reader(sealed.fd(), seal::kSealedName, key.key());
    Buffer other = sample::files().at("pages-1.img");
    other[8999] ^= std::byte{1};
    plain.write("pages-1.img", other);
    CHECK_THROWS(Errc::corrupt_data, seal::compare_sealed(reader, plain.fd()));
    other = sample::files().at("pages-1.img");
    other.push_back(std::byte{1});
    plain.write("pages-1.img", other);
    CHECK_THROWS(Errc::corrupt_data, seal::compare_sealed(reader, plain.fd()));
    plain.write("pages-1.img", Bytes(other).first(8999));
    CHECK_THROWS(Errc::corrupt_data, seal::compare_sealed(reader, plain.fd()));
}

void pieces_cover_the_content_once() {
    const std::vector<seal::SealedEntry> entries{
        {"a", 0600, 0, 0}, {"bb", 0600, 100, 0}, {"c", 0600, 7, 0}};
    const seal::ContentMap map(entries);
    CHECK(map.size() == 3 * 24 + 4 + 107);
    for (std::size_t step : {1U, 7U, 64U, 1000U}) {
        std::size_t entry_bytes = 0;
        std::array<std::uint64_t, 3> bytes{};
        for (std::uint64_t at = 0; at < map.size(); at += step) {
            const auto size =
                static_cast<std::size_t>(std::min<std::uint64_t>(step, map.size() - at));
            std::size_t next = 0;
            for (const auto& piece : map.pieces(at, size)) {
                CHECK(piece.at == next && piece.size > 0);
                next += piece.size;
                if (piece.is_entry)
                    entry_bytes += piece.size;
                else
                    CHECK(piece.offset ==
                          std::exchange(bytes[piece.file], bytes[piece.file] + piece.size));
            }
            CHECK(next == size);
        }
        CHECK(entry_bytes == 3 * 24 + 4);
        CHECK((bytes == std::array<std::uint64_t, 3>{0, 100, 7}));
    }
    CHECK_THROWS(Errc::bad_argument,
                 seal::ContentMap({{"a", 0, seal::kMaxContentSize, 0}, {"b", 0, 1, 0}}));
}

} // namespace

int main() {
    files_come_back_with_mode_and_time();
    nothing_is_in_the_clear();
    any_part_can_be_read();
    readers_use_the_same_buffers();
    no_files_at_all_is_a_sealed_file_too();
    what_cannot_be_sealed_is_refused_and_leaves_nothing();
    a_file_that_changes_is_noticed();
    a_difference_is_found();
    pieces_cover_the_content_once();
}
