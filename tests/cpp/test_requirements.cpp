// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"
#include "sample.hpp"

#include "core/hash.hpp"
#include "core/manifest.hpp"
#include "core/requirements.hpp"

#include <cstring>
#include <string>

using namespace gpustasis;
using sample::Buffer;

namespace {

Buffer id(std::size_t size) {
    return Buffer(size, std::byte{0x5a});
}

Requirements example() {
    return {.files = {{.path = "/usr/lib/libcuda.so.580.95.05",
                       .size = 100,
                       .identity = FileIdentity::build_id,
                       .id = id(20)},
                      {.path = "/usr/share/locale", .size = 7},
                      {.place = FilePlace::container,
                       .path = "/opt/jit",
                       .size = 9,
                       .identity = FileIdentity::content,
                       .id = id(16)}},
            .unrecorded = 2};
}

Manifest manifest_of(Requirements requirements, bool with_parent = false) {
    Manifest manifest;
    manifest.checkpoint_id = sample::id_of(0x11);
    manifest.requirements = std::move(requirements);
    if (with_parent) {
        manifest.parent_id = sample::id_of(0x22);
        manifest.chain_length = 1;
    }
    return manifest;
}

void what_was_written_is_read() {
    const sample::TempDir dir;
    for (const bool with_parent : {false, true})
        for (const Requirements& requirements : {example(), Requirements{}}) {
            write_manifest(dir.fd(), manifest_of(requirements, with_parent));
            CHECK(read_manifest(dir.fd()) == manifest_of(requirements, with_parent));
        }
    write_manifest(dir.fd(), Manifest{});
    CHECK(!read_manifest(dir.fd()).requirements);
}

void damage_is_found() {
    const sample::TempDir dir;
    write_manifest(dir.fd(), manifest_of(example()));
    Buffer bytes = sample::read_file(dir.fd(), kManifestName);
    for (std::size_t keep = 0; keep < bytes.size(); ++keep)
        CHECK_THROWS(Errc::corrupt_data, parse_manifest(Bytes(bytes).first(keep), "cut"));
    for (std::size_t bit = 0; bit < bytes.size() * 8; ++bit) {
        const auto mask = static_cast<std::byte>(1U << (bit % 8));
        bytes[bit / 8] ^= mask;
        CHECK_THROWS(Errc::corrupt_data, parse_manifest(bytes, "flipped"));
        bytes[bit / 8] ^= mask;
    }
}

void set_hash(Buffer& bytes) {
    const std::size_t body = bytes.size() - 16;
    const Id hash = hash128(Bytes(bytes).first(body));
    std::ranges::copy(hash, bytes.begin() + static_cast<std::ptrdiff_t>(body));
}

template <class T>
void forged(std::size_t offset, T value, Errc code = Errc::corrupt_data) {
    const sample::TempDir dir;
    write_manifest(dir.fd(), manifest_of(example()));
    Buffer bytes = sample::read_file(dir.fd(), kManifestName);
    std::memcpy(&bytes[offset], &value, sizeof value);
    set_hash(bytes);
    CHECK_THROWS(code, parse_manifest(bytes, "forged"));
}

// Behind a right checksum: whoever forges a manifest makes that as well.
void forged_values_are_refused() {
    const std::size_t section = 96;
    const std::size_t files = section + 16;
    forged(16, std::uint64_t{0});      // a section that no feature bit announces
    forged(16, std::uint64_t{1} << 3); // CPU memory, and no task has any
    forged(16, std::uint64_t{1} << 5); // a pack, and no section of it
    forged(16, std::uint64_t{1} << 6, Errc::unsupported);
    for (const std::uint32_t count : {0U, 2U, 4U, 16384U, 16385U, 0xffffffffU})
        forged(section, count);
    for (const std::uint32_t size : {0U, 1U, 2U << 20, 0xffffffffU})
        forged(section + 4, size);
    forged(section + 12, 1U);
    forged(files + 8, 1U); // length of a path
    forged(files + 8, 0xffffffffU);
    forged(files + 12, std::uint8_t{3});  // identity
    forged(files + 12, std::uint8_t{0});  // none, and 20 bytes of one
    forged(files + 13, std::uint8_t{3});  // place
    forged(files + 13, std::uint8_t{2});  // out of order
    forged(files + 14, std::uint8_t{33}); // bytes of the identity
    forged(files + 14, std::uint8_t{19}); // so that its padding is not zero
    forged(files + 15, std::uint8_t{1});
    forged(files + 47, std::uint8_t{1});
    forged(files + 3 * 48, 'x'); // a path that is not absolute
    forged(files + 3 * 48 + 1, '\0');
    forged(files + 2 * 48, std::uint64_t{65} << 20); // too large to be hashed
}

// One byte more at the end, that no path has, or no section.
void what_belongs_to_nothing_is_refused() {
    const sample::TempDir dir;
    write_manifest(dir.fd(), manifest_of(example()));
    Buffer bytes = sample::read_file(dir.fd(), kManifestName);
    bytes.insert(bytes.end() - 16, std::byte{'x'});
    set_hash(bytes);
    CHECK_THROWS(Errc::corrupt_data, parse_manifest(bytes, "longer"));
    bytes[96 + 4] =
        static_cast<std::byte>(std::to_integer<unsigned>(bytes[96 + 4]) + 1); // paths_size
    set_hash(bytes);
    CHECK_THROWS(Errc::corrupt_data, parse_manifest(bytes, "longer paths"));
}

void every_byte_that_is_forged_is_harmless() {
    const sample::TempDir dir;
    write_manifest(dir.fd(), manifest_of(example()));
    const Buffer whole = sample::read_file(dir.fd(), kManifestName);
    for (std::size_t offset = 0; offset + 16 < whole.size(); ++offset)
        for (const unsigned value : {0U, 1U, 0x7fU, 0xffU}) {
            Buffer bytes = whole;
            bytes[offset] = static_cast<std::byte>(value);
            set_hash(bytes);
            try {
                const Manifest read = parse_manifest(bytes, "forged");
                if (read.requirements)
                    format::check_requirements(*read.requirements, Errc::corrupt_data);
            } catch (const Error&) {
                continue;
            }
        }
    for (std::size_t keep = 0; keep < whole.size() - 16; ++keep) {
        Buffer bytes(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(keep));
        bytes.resize(keep + 16);
        set_hash(bytes);
        CHECK_THROWS(Errc::corrupt_data, parse_manifest(bytes, "cut"));
    }
}

void limits_hold() {
    const auto refused = [](auto change) {
        Requirements requirements = example();
        change(requirements);
        const sample::TempDir dir;
        CHECK_THROWS(Errc::bad_argument, write_manifest(dir.fd(), manifest_of(requirements)));
        CHECK(dir.empty());
    };
    refused([](Requirements& r) { std::swap(r.files[0], r.files[1]); });
    refused([](Requirements& r) { r.files[1] = r.files[0]; });
    refused([](Requirements& r) { r.files[0].path = "relative"; });
    refused([](Requirements& r) { r.files[0].path = "/"; });
    refused([](Requirements& r) { r.files[0].path = std::string("/a\0b", 4); });
    refused([](Requirements& r) { r.files[0].path = "/" + std::string(4095, 'a'); });
    refused([](Requirements& r) { r.files[0].id.clear(); });
    refused([](Requirements& r) { r.files[0].id = id(33); });
    refused([](Requirements& r) { r.files[1].id = id(1); });
    refused([](Requirements& r) { r.files[2].id = id(15); });
    refused([](Requirements& r) { r.files[2].size = format::kMaxHashedFile + 1; });
    refused([](Requirements& r) {
        for (int i = 0; i < 5; ++i) {
            r.files.push_back(r.files.back());
            r.files.back().path += 'x';
            r.files.back().size = format::kMaxHashedFile;
        }
    });
    refused([](Requirements& r) {
        for (int i = 0; i < 600; ++i) { // 600 paths of 3,600 bytes: more than 2 MiB
            r.files.push_back({.place = FilePlace::inner,
                               .path = "/" + std::to_string(1000 + i) + std::string(3600, 'p')});
        }
    });
    refused([](Requirements& r) {
        for (std::uint32_t i = 0; i < format::kMaxRequiredFiles; ++i)
            r.files.push_back(
                {.place = FilePlace::inner, .path = "/" + std::to_string(100000 + i)});
    });
}

} // namespace

int main() {
    what_was_written_is_read();
    damage_is_found();
    forged_values_are_refused();
    what_belongs_to_nothing_is_refused();
    every_byte_that_is_forged_is_harmless();
    limits_hold();
}
