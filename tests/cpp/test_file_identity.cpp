// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"
#include "sample.hpp"

#include "core/file_identity.hpp"
#include "core/hash.hpp"

#include <elf.h>
#include <sys/stat.h>

#include <cstring>
#include <string>

using namespace gpustasis;
using sample::Buffer;

namespace {

template <class T>
void put(Buffer& bytes, std::size_t offset, const T& value) {
    if (bytes.size() < offset + sizeof value)
        bytes.resize(offset + sizeof value);
    std::memcpy(&bytes[offset], &value, sizeof value);
}

constexpr std::size_t kNotes = 256;

/// An ELF file that is nothing but a note with this build id, behind another note.
template <class Header, class Segment>
Buffer elf(unsigned char elf_class, const Buffer& id) {
    Buffer bytes;
    Header header{};
    std::memcpy(header.e_ident, ELFMAG, SELFMAG);
    header.e_ident[EI_CLASS] = elf_class;
    header.e_ident[EI_DATA] = ELFDATA2LSB;
    header.e_phoff = sizeof header;
    header.e_phentsize = sizeof(Segment);
    header.e_phnum = 2;
    put(bytes, 0, header);
    Segment load{};
    load.p_type = PT_LOAD;
    put(bytes, sizeof header, load);
    Segment notes{};
    notes.p_type = PT_NOTE;
    notes.p_offset = kNotes;
    const Elf64_Nhdr other{.n_namesz = 5, .n_descsz = 3, .n_type = NT_GNU_BUILD_ID};
    put(bytes, kNotes, other);
    const std::size_t second = kNotes + sizeof other + 8 + 4;
    const Elf64_Nhdr note{
        .n_namesz = 4, .n_descsz = static_cast<Elf64_Word>(id.size()), .n_type = NT_GNU_BUILD_ID};
    put(bytes, second, note);
    put(bytes, second + sizeof note, std::array{'G', 'N', 'U', '\0'});
    bytes.resize(second + sizeof note + 4);
    bytes.insert(bytes.end(), id.begin(), id.end());
    notes.p_filesz = static_cast<decltype(notes.p_filesz)>(bytes.size() - kNotes);
    put(bytes, sizeof header + sizeof load, notes);
    return bytes;
}

Buffer elf64(const Buffer& id) {
    return elf<Elf64_Ehdr, Elf64_Phdr>(ELFCLASS64, id);
}

Buffer found_in(const Buffer& bytes) {
    const sample::TempDir dir;
    sample::write_file(dir.fd(), "file", bytes);
    const auto fd = open_in_root(dir.fd(), "/file");
    CHECK(fd);
    return find_build_id(fd->get());
}

void build_ids_are_found() {
    for (const std::size_t size : {1U, 8U, 16U, 20U, 32U}) {
        const Buffer id = sample::random_bytes(size, size);
        CHECK(found_in(elf64(id)) == id);
        CHECK((found_in(elf<Elf32_Ehdr, Elf32_Phdr>(ELFCLASS32, id)) == id));
    }
    CHECK(found_in(elf64(sample::random_bytes(33, 1))).empty());
    CHECK(found_in(elf64({})).empty());
    CHECK(found_in({}).empty());
    CHECK(found_in(Buffer(4096)).empty());
    Buffer other_order = elf64(sample::random_bytes(20, 1));
    other_order[EI_DATA] = std::byte{ELFDATA2MSB};
    CHECK(found_in(other_order).empty());
}

// What linkers make, and what the loader has mapped here.
void a_real_program_has_one() {
    const auto fd = open_if_regular(AT_FDCWD, "/proc/self/exe");
    CHECK(fd);
    CHECK(find_build_id(fd->get()).size() == 20);
}

// A cut or changed file has that build id, or none, or another; nothing is read beyond it.
void hostile_files_are_harmless() {
    const Buffer id = sample::random_bytes(20, 7);
    const Buffer whole = elf64(id);
    for (std::size_t keep = 0; keep < whole.size(); ++keep)
        CHECK(found_in(Buffer(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(keep)))
                  .empty());
    const sample::TempDir dir;
    for (std::size_t offset = 0; offset < whole.size(); ++offset)
        for (const unsigned value : {0U, 1U, 0x80U, 0xffU}) {
            Buffer bytes = whole;
            bytes[offset] = static_cast<std::byte>(value);
            sample::write_file(dir.fd(), "file", bytes);
            const auto fd = open_in_root(dir.fd(), "file");
            CHECK(find_build_id(fd->get()).size() <= format::kMaxBuildId);
        }
    Buffer many = whole;
    put(many, offsetof(Elf64_Ehdr, e_phnum), std::uint16_t{0xffff});
    many.resize(0xffff * sizeof(Elf64_Phdr) + 4096);
    CHECK(found_in(many).empty());
}

void differences_are_told() {
    const sample::TempDir dir;
    const Buffer id = sample::random_bytes(20, 3);
    const Buffer bytes = elf64(id);
    sample::write_file(dir.fd(), "lib", bytes);
    const RequiredFile lib{
        .path = "/lib", .size = bytes.size(), .identity = FileIdentity::build_id, .id = id};
    CHECK(!difference(dir.fd(), "/lib", lib));
    const Id hash = hash128(bytes);
    RequiredFile content = lib;
    content.identity = FileIdentity::content;
    content.id = {hash.begin(), hash.end()};
    CHECK(!difference(dir.fd(), "/lib", content));
    const auto fd = open_in_root(dir.fd(), "/lib");
    CHECK(hash_file(fd->get(), bytes.size()) == content.id);
    CHECK(hash_file(fd->get(), bytes.size(), std::chrono::steady_clock::now()).empty());
    const RequiredFile data{.path = "/lib", .size = bytes.size()};
    CHECK(!difference(dir.fd(), "/lib", data));

    Buffer changed = elf64(sample::random_bytes(20, 4));
    sample::write_file(dir.fd(), "lib", changed);
    CHECK(difference(dir.fd(), "/lib", lib)->starts_with("has build id "));
    CHECK(difference(dir.fd(), "/lib", content)->starts_with("has hash "));
    CHECK(!difference(dir.fd(), "/lib", data));
    sample::write_file(dir.fd(), "lib", Buffer(bytes.size()));
    CHECK(difference(dir.fd(), "/lib", lib)->starts_with("has no build id"));
    sample::write_file(dir.fd(), "lib", Buffer(bytes.size() + 1));
    CHECK(*difference(dir.fd(), "/lib", data) ==
          "has " + std::to_string(bytes.size() + 1) + " bytes");
    CHECK(*difference(dir.fd(), "/lib", content) ==
          "has " + std::to_string(bytes.size() + 1) + " bytes");
    CHECK(*difference(dir.fd(), "/none", lib) == "is missing");
    CHECK(*difference(dir.fd(), "/lib/below", lib) == "is missing");
}

// A device, a FIFO and a directory are never opened, and no link leads out of the root.
void what_is_no_file_is_told() {
    const sample::TempDir dir;
    const RequiredFile file{.path = "/it", .size = 0};
    CHECK(::mkfifoat(dir.fd(), "fifo", 0600) == 0);
    CHECK(*difference(dir.fd(), "/fifo", file) == "is no regular file");
    CHECK(*difference(dir.fd(), "/", file) == "is no regular file");
    CHECK(::symlinkat("/etc/passwd", dir.fd(), "out") == 0);
    CHECK(*difference(dir.fd(), "/out", file) == "is missing");
    CHECK(::symlinkat("../../../../../etc/passwd", dir.fd(), "up") == 0);
    CHECK(*difference(dir.fd(), "/up", file) == "is missing");
    CHECK(::symlinkat("loop", dir.fd(), "loop") == 0);
    CHECK(difference(dir.fd(), "/loop", file)->starts_with("cannot be read: "));
    sample::write_file(dir.fd(), "real", {});
    CHECK(::symlinkat("/real", dir.fd(), "in") == 0);
    CHECK(!difference(dir.fd(), "/in", file));
}

} // namespace

int main() {
    build_ids_are_found();
    a_real_program_has_one();
    hostile_files_are_harmless();
    differences_are_told();
    what_is_no_file_is_told();
}
