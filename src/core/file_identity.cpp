// SPDX-License-Identifier: Apache-2.0
#include "core/file_identity.hpp"

#include "core/bytes.hpp"
#include "core/file.hpp"
#include "core/hash.hpp"

#include <elf.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <span>
#include <type_traits>

namespace gpustasis {
namespace {

// An ELF file of a linker has about a dozen program headers, and its notes are some hundred bytes.
constexpr std::size_t kMaxHeaders = 512;
constexpr std::uint64_t kMaxNotes = 64U << 10;
constexpr std::size_t kMaxNoteSegments = 15; // so 1 MiB at most is read
constexpr std::size_t kHashStep = 1U << 20;
constexpr std::uint64_t kNoteAlignment = 4;
constexpr int kMaxTries = 64; // openat2(2): EAGAIN where something was renamed meanwhile

template <class T>
T take(Bytes bytes, std::size_t offset) {
    static_assert(std::is_trivially_copyable_v<T>);
    T value;
    std::memcpy(&value, bytes.subspan(offset, sizeof value).data(), sizeof value);
    return value;
}

std::uint64_t aligned(std::uint64_t size) noexcept {
    return (size + kNoteAlignment - 1) / kNoteAlignment * kNoteAlignment;
}

/// The build id among `notes`; empty: none of them is one. Notes have one layout in both classes.
std::vector<std::byte> build_id_in(Bytes notes) {
    static_assert(sizeof(Elf32_Nhdr) == sizeof(Elf64_Nhdr));
    while (notes.size() >= sizeof(Elf64_Nhdr)) {
        const auto note = take<Elf64_Nhdr>(notes, 0);
        const std::uint64_t id_begin = sizeof note + aligned(note.n_namesz);
        const std::uint64_t end = id_begin + note.n_descsz;
        if (end > notes.size())
            return {};
        const Bytes name = notes.subspan(sizeof note, note.n_namesz);
        if (note.n_type == NT_GNU_BUILD_ID &&
            std::ranges::equal(name, std::as_bytes(std::span(ELF_NOTE_GNU)))) {
            const Bytes id = notes.subspan(id_begin, note.n_descsz);
            if (id.size() > format::kMaxBuildId)
                return {};
            return {id.begin(), id.end()};
        }
        notes = notes.subspan(std::min<std::uint64_t>(aligned(end), notes.size()));
    }
    return {};
}

template <class Header, class Segment>
std::vector<std::byte> find_build_id_of(int fd, std::uint64_t size) {
    if (size < sizeof(Header))
        return {};
    const auto header = take<Header>(read_part(fd, 0, sizeof(Header)), 0);
    const std::uint64_t table_size = std::uint64_t{header.e_phnum} * sizeof(Segment);
    if (header.e_phentsize != sizeof(Segment) || header.e_phnum > kMaxHeaders ||
        header.e_phoff > size || table_size > size - header.e_phoff)
        return {};
    const std::vector<std::byte> table = read_part(fd, header.e_phoff, table_size);
    std::size_t looked_at = 0;
    for (std::size_t i = 0; i < header.e_phnum; ++i) {
        const auto segment = take<Segment>(table, i * sizeof(Segment));
        if (segment.p_type != PT_NOTE || segment.p_filesz > kMaxNotes || segment.p_offset > size ||
            segment.p_filesz > size - segment.p_offset || ++looked_at > kMaxNoteSegments)
            continue;
        auto id = build_id_in(read_part(fd, segment.p_offset, segment.p_filesz));
        if (!id.empty())
            return id;
    }
    return {};
}

std::string hex(Bytes bytes) {
    constexpr const char* kDigits = "0123456789abcdef";
    std::string text;
    for (const std::byte byte : bytes) {
        text += kDigits[std::to_integer<unsigned>(byte) >> 4U];
        text += kDigits[std::to_integer<unsigned>(byte) & 15U];
    }
    return text;
}

/// The size of what `place` (O_PATH) refers to; nullopt: it is no regular file.
std::optional<std::uint64_t> regular_size(const UniqueFd& place) {
    struct stat status {};
    if (::fstat(place.get(), &status) != 0)
        throw io_error("fstat", errno);
    if (!S_ISREG(status.st_mode))
        return std::nullopt;
    return static_cast<std::uint64_t>(status.st_size);
}

/// A descriptor of what `place` (O_PATH) refers to, opened for reading.
std::optional<UniqueFd> reopen(const UniqueFd& place) {
    if (!regular_size(place))
        return std::nullopt;
    const std::string link = "/proc/self/fd/" + std::to_string(place.get());
    // O_NONBLOCK: nobody who holds a lease on the file is waited for.
    UniqueFd fd(::open(link.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
    if (!fd)
        throw io_error("open", errno);
    return fd;
}

/// The place of `path` (O_PATH) in the tree below `root_fd`.
UniqueFd find_in_root(int root_fd, const std::string& path) {
    open_how how{};
    how.flags = O_PATH | O_CLOEXEC;
    how.resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS;
    for (int tries = 1;; ++tries) {
        UniqueFd place(
            static_cast<int>(::syscall(SYS_openat2, root_fd, path.c_str(), &how, sizeof how)));
        if (place)
            return place;
        if (errno != EAGAIN || tries == kMaxTries)
            throw io_error("open", errno);
    }
}

} // namespace

std::optional<UniqueFd> open_if_regular(int dir_fd, const std::string& path) {
    const UniqueFd place(::openat(dir_fd, path.c_str(), O_PATH | O_CLOEXEC));
    if (!place)
        throw io_error("open", errno);
    return reopen(place);
}

std::optional<UniqueFd> open_in_root(int root_fd, const std::string& path) {
    return reopen(find_in_root(root_fd, path));
}

std::vector<std::byte> find_build_id(int fd) {
    const std::uint64_t size = file_size(fd);
    if (size < EI_NIDENT)
        return {};
    const std::vector<std::byte> ident = read_part(fd, 0, EI_NIDENT);
    if (std::memcmp(ident.data(), ELFMAG, SELFMAG) != 0 ||
        std::to_integer<unsigned>(ident[EI_DATA]) != ELFDATA2LSB)
        return {};
    switch (std::to_integer<unsigned>(ident[EI_CLASS])) {
    case ELFCLASS32: return find_build_id_of<Elf32_Ehdr, Elf32_Phdr>(fd, size);
    case ELFCLASS64: return find_build_id_of<Elf64_Ehdr, Elf64_Phdr>(fd, size);
    default: return {};
    }
}

std::vector<std::byte> hash_file(int fd, std::uint64_t size,
                                 std::chrono::steady_clock::time_point deadline) {
    StreamHash128 hash;
    std::vector<std::byte> buffer(std::min<std::uint64_t>(size, kHashStep));
    for (std::uint64_t offset = 0; offset < size; offset += buffer.size()) {
        if (std::chrono::steady_clock::now() >= deadline)
            return {};
        const auto part =
            MutBytes(buffer).first(std::min<std::uint64_t>(size - offset, buffer.size()));
        read_at(fd, offset, part);
        hash.add(part);
    }
    const Id value = hash.value();
    return {value.begin(), value.end()};
}

std::optional<std::string> difference(const RequiredFile& found, const RequiredFile& expected) {
    if (found.size == expected.size && found.id == expected.id)
        return std::nullopt;
    if (expected.identity == FileIdentity::build_id && found.id.empty())
        return "has no build id, and " + std::to_string(found.size) + " bytes";
    return "has " + identity_text(found);
}

std::optional<std::string> difference(int root_fd, const std::string& path,
                                      const RequiredFile& expected) {
    try {
        // A file is opened only if its size leaves the question open.
        const UniqueFd place = find_in_root(root_fd, path);
        const std::optional<std::uint64_t> size = regular_size(place);
        if (!size)
            return "is no regular file";
        if (*size != expected.size)
            return "has " + std::to_string(*size) + " bytes";
        if (expected.identity == FileIdentity::size)
            return std::nullopt;
        const std::optional<UniqueFd> fd = reopen(place);
        if (!fd)
            return "is no regular file";
        RequiredFile found = expected;
        found.id = expected.identity == FileIdentity::build_id ? find_build_id(fd->get())
                                                               : hash_file(fd->get(), *size);
        return difference(found, expected);
    } catch (const Error& e) {
        if (e.error_number() == ENOENT || e.error_number() == ENOTDIR)
            return "is missing";
        if (e.error_number() == EACCES || e.error_number() == EPERM)
            return std::string(kMayNotRead) + ": " + e.what();
        return std::string("cannot be read: ") + e.what();
    }
}

std::string identity_text(const RequiredFile& file) {
    std::string bytes = std::to_string(file.size) + " bytes";
    switch (file.identity) {
    case FileIdentity::build_id: return "build id " + hex(file.id) + ", " + bytes;
    case FileIdentity::content: return "hash " + hex(file.id) + ", " + bytes;
    case FileIdentity::size: break;
    }
    return bytes;
}

} // namespace gpustasis
