// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/other_ways.hpp"

#include "core/error.hpp"
#include "core/fields.hpp"
#include "core/file.hpp"
#include "tracee/proc.hpp"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <system_error>

namespace gpustasis {
namespace {

constexpr const char* kCriuParent = "parent";
// Sockets of the programs that send images on, or bring pages: criu/img-streamer.c and criu/uffd.c.
constexpr const char* kStreamOut = "streamer-capture.sock";
constexpr const char* kStreamIn = "streamer-serve.sock";
constexpr const char* kLazyPages = "lazy-pages.socket"; // in the working directory

[[noreturn]] void refuse(const std::string& wanted, const std::string& what) {
    throw Error(Errc::unsupported, wanted + " cannot be used with criu's " + what);
}

bool has(int dir, const char* name) {
    struct stat status {};
    if (::fstatat(dir, name, &status, AT_SYMLINK_NOFOLLOW) == 0)
        return true;
    if (errno != ENOENT)
        throw io_error(std::string("cannot look for ") + name, errno);
    return false;
}

void refuse_options(const std::string& wanted, std::initializer_list<std::string_view> options) {
    const std::string words = proc::read_file("/proc/self/cmdline");
    for (const std::string_view option : options)
        if (asks_for(words, option))
            refuse(wanted, std::string(option));
}

std::uint64_t take_varint(FieldReader& fields) {
    std::uint64_t value = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
        const auto byte = fields.number<std::uint8_t>();
        value |= static_cast<std::uint64_t>(byte & 0x7fU) << shift;
        if ((byte & 0x80U) == 0)
            return value;
    }
    throw Error(Errc::corrupt_data, "a number in it does not end");
}

/// Of an entry of a pagemap (criu's images/pagemap.proto).
struct PageRun {
    bool in_parent = false;
    std::optional<std::uint64_t> flags{};
};

PageRun take_run(Bytes message) {
    constexpr std::uint64_t kInParent = 3;
    constexpr std::uint64_t kFlags = 4;
    constexpr std::uint64_t kNumber = 0; // the only kind of field that there is
    PageRun run;
    FieldReader fields(message);
    while (fields.size() != 0) {
        const std::uint64_t key = take_varint(fields);
        if (key % 8 != kNumber)
            throw Error(Errc::corrupt_data, "it has a field that is not known");
        const std::uint64_t value = take_varint(fields);
        if (key / 8 == kInParent)
            run.in_parent = value != 0;
        if (key / 8 == kFlags)
            run.flags = value;
    }
    return run;
}

void require_pages(Bytes image, InParent in_parent) {
    constexpr std::uint32_t kImageMagic = 0x54564319;
    constexpr std::uint32_t kPagemapMagic = 0x56084025;
    constexpr std::uint64_t kParent = 1;
    constexpr std::uint64_t kPresent = 4;
    const std::uint64_t wanted = in_parent == InParent::there ? kPresent | kParent : kPresent;
    FieldReader fields(image);
    if (fields.number<std::uint32_t>() != kImageMagic ||
        fields.number<std::uint32_t>() != kPagemapMagic)
        throw Error(Errc::corrupt_data, "it is no pagemap as CRIU 4 writes them");
    fields.take(fields.number<std::uint32_t>()); // the head
    while (fields.size() != 0) {
        const PageRun run = take_run(fields.take(fields.number<std::uint32_t>()));
        const bool lies_in_parent = run.in_parent && in_parent == InParent::refused;
        if (run.flags ? (*run.flags & wanted) == 0 : lies_in_parent)
            throw Error(Errc::unsupported, "criu has left pages out of its images: was it told "
                                           "--lazy-pages, or to build on parent images?");
    }
}

} // namespace

bool asks_for(std::string_view words, std::string_view option) {
    for (bool is_program = true; !words.empty(); is_program = false) {
        const std::size_t end = std::min(words.find('\0'), words.size());
        const std::string_view word = words.substr(0, end);
        words.remove_prefix(std::min(end + 1, words.size()));
        if (is_program)
            continue;
        if (word == "--") // no options behind it
            return false;
        if (word.starts_with("--") && option.starts_with(word))
            return true; // one that is too short for a single option criu has not taken
    }
    return false;
}

void refuse_pages_elsewhere(int image_dir, const std::string& wanted) {
    if (has(image_dir, kCriuParent))
        refuse(
            wanted,
            "own parent images (--prev-images-dir): the image directory has the link \"parent\"");
    refuse_options(wanted, {"--page-server", "--lazy-pages", "--stream"});
    if (has(image_dir, kStreamOut))
        refuse(wanted, std::string("--stream: the image directory has the socket ") + kStreamOut);
    if (sends_pages())
        refuse(wanted, "--page-server: it has a connection to one");
}

/// criu corks the socket that it sends pages through, and no other, before it asks a plugin.
bool sends_pages() {
    try {
        for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
            int corked = 0;
            socklen_t size = sizeof corked;
            const int fd = std::stoi(entry.path().filename().string());
            if (::getsockopt(fd, IPPROTO_TCP, TCP_CORK, &corked, &size) == 0 && corked != 0)
                return true;
        }
    } catch (const std::system_error& e) {
        throw Error(Errc::io, e.what());
    }
    return false;
}

void require_all_pages(int directory, const std::vector<std::string>& names, InParent in_parent) {
    if (in_parent == InParent::there && !has(directory, kCriuParent))
        in_parent = InParent::refused;
    bool any = false;
    for (const std::string& name : names) {
        if (!name.starts_with("pagemap-"))
            continue;
        any = true;
        try {
            const UniqueFd fd = open_regular(directory, name);
            require_pages(read_part(fd.get(), 0, file_size(fd.get())), in_parent);
        } catch (const Error& e) {
            throw Error(e, name + ": " + e.what());
        }
    }
    if (!any) // each task has one, however little of its memory is left to CRIU
        throw Error(Errc::unsupported, "criu has written no memory into its image directory: was "
                                       "it told to send it elsewhere?");
}

void refuse_pages_from_elsewhere(int image_dir, const std::string& wanted) {
    refuse_options(wanted, {"--lazy-pages", "--stream"});
    if (has(AT_FDCWD, kLazyPages))
        refuse(wanted, std::string("--lazy-pages: its working directory has the socket ") +
                           kLazyPages + "; remove it if nothing is restored with that here");
    if (has(image_dir, kStreamIn))
        refuse(wanted, std::string("--stream: the image directory has the socket ") + kStreamIn);
}

} // namespace gpustasis
