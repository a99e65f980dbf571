// SPDX-License-Identifier: Apache-2.0
#include "core/file_pack.hpp"

#include "core/chunk_codec.hpp"
#include "core/error.hpp"
#include "core/file.hpp"
#include "core/image_writer.hpp"
#include "core/memory_port.hpp"
#include "core/pack_index.hpp"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <functional>
#include <utility>

namespace gpustasis {
namespace {

constexpr std::uint64_t kSecond = 1'000'000'000; // ns
constexpr mode_t kOwnerOnly = 0600;
constexpr std::uint32_t kPackPid = 1; // of no task: an image has one

[[noreturn]] void corrupt(const std::string& what) {
    throw Error(Errc::corrupt_data, what);
}

UniqueFd open_file(int dir, const std::string& name, int flags) {
    UniqueFd fd(::openat(dir, name.c_str(), flags | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC,
                         kOwnerOnly));
    if (!fd)
        throw io_error("cannot open " + name, errno);
    return fd;
}

PackedFile look_at(int dir, const std::string& name) {
    const UniqueFd fd = open_file(dir, name, O_RDONLY);
    struct stat status {};
    if (::fstat(fd.get(), &status) != 0)
        throw io_error("cannot examine " + name, errno);
    if (!S_ISREG(status.st_mode))
        throw Error(Errc::bad_argument, name + " is no ordinary file");
    const auto seconds = std::max<time_t>(status.st_mtim.tv_sec, 0);
    return {.name = name,
            .mode = status.st_mode & format::kPackedModeBits,
            .size = static_cast<std::uint64_t>(status.st_size),
            .mtime_ns = static_cast<std::uint64_t>(seconds) * kSecond +
                        static_cast<std::uint64_t>(status.st_mtim.tv_nsec)};
}

/// A run of the content: of a file, or of what is behind it up to the next one.
struct Piece {
    std::size_t file = 0;
    bool is_padding = false;
    std::uint64_t offset = 0; ///< in the file
    std::size_t at = 0;       ///< from the beginning of what was asked for
    std::size_t size = 0;
};

/// Shows `use` the pieces of `size` bytes from `offset`, which lie behind the index.
void for_each_piece(const std::vector<PackedFile>& files, const std::vector<std::uint64_t>& starts,
                    std::uint64_t offset, std::size_t size,
                    const std::function<void(const Piece&)>& use) {
    const auto after = std::ranges::upper_bound(starts, offset);
    auto number = static_cast<std::size_t>(after - starts.begin()) - 1;
    for (std::size_t done = 0; done < size; ++number) {
        const std::uint64_t in_file = offset + done - starts[number];
        const std::uint64_t file_left = files[number].size - std::min(files[number].size, in_file);
        const auto of_file =
            static_cast<std::size_t>(std::min<std::uint64_t>(file_left, size - done));
        if (of_file != 0)
            use({number, false, in_file, done, of_file});
        done += of_file;
        const std::uint64_t left = starts[number + 1] - offset - done;
        const auto padding = static_cast<std::size_t>(std::min<std::uint64_t>(left, size - done));
        if (padding != 0)
            use({number, true, 0, done, padding});
        done += padding;
    }
}

class PackSource final : public MemorySource {
public:
    PackSource(int dir, std::vector<PackedFile> files)
        : dir_(dir), files_(std::move(files)), index_(format::encode_pack_index(files_)) {
        for (const PackedFile& file : files_)
            plain_size_ += file.size;
        const Bytes head = Bytes(index_).first(format::kPackHeadSize);
        starts_ = format::place_packed(files_, format::decode_pack_head(head).index_size);
    }

    std::uint64_t size() const noexcept { return starts_.back(); }
    std::uint64_t plain_size() const noexcept { return plain_size_; }

    void read(std::uint64_t address, MutBytes out) override {
        if (address < index_.size()) {
            const auto size = std::min<std::size_t>(index_.size() - address, out.size());
            copy_bytes(Bytes(index_).subspan(address, size), out.data());
            address += size;
            out = out.subspan(size);
        }
        for_each_piece(files_, starts_, address, out.size(), [&](const Piece& piece) {
            const MutBytes to = out.subspan(piece.at, piece.size);
            if (piece.is_padding)
                std::ranges::fill(to, std::byte{0});
            else
                read_file(files_[piece.file].name, piece.offset, to);
        });
    }

private:
    void read_file(const std::string& name, std::uint64_t offset, MutBytes out) const {
        try {
            read_at(open_file(dir_, name, O_RDONLY).get(), offset, out);
        } catch (const Error& e) {
            throw Error(e, "cannot read " + name + ": " + e.what());
        }
    }

    int dir_;
    std::vector<PackedFile> files_;
    std::vector<std::byte> index_;
    std::vector<std::uint64_t> starts_;
    std::uint64_t plain_size_ = 0;
};

/// Puts content into files that are there, or nowhere: then it only checks what has no hash of a file.
class PackSink final : public MemorySink {
public:
    PackSink(const std::vector<PackedFile>& files, const std::vector<std::uint64_t>& starts,
             int dir, std::uint64_t entries_end, const std::string& without)
        : files_(files), starts_(starts), dir_(dir), entries_end_(entries_end), without_(without) {}

    void write(std::uint64_t address, Bytes bytes) override {
        if (address < starts_.front()) { // the entries were read already; the rest is padding
            const auto size = std::min<std::uint64_t>(starts_.front() - address, bytes.size());
            const auto entries = std::min(size, entries_end_ - std::min(entries_end_, address));
            require_zero(bytes.subspan(entries, size - entries));
            address += size;
            bytes = bytes.subspan(size);
        }
        for_each_piece(files_, starts_, address, bytes.size(), [&](const Piece& piece) {
            const Bytes from = bytes.subspan(piece.at, piece.size);
            if (piece.is_padding)
                require_zero(from);
            else if (dir_ >= 0 && files_[piece.file].name != without_)
                write_file(files_[piece.file].name, piece.offset, from);
        });
    }
    void write_zeros(std::uint64_t /*address*/, std::uint64_t /*length*/) override {} // they are

private:
    static void require_zero(Bytes bytes) {
        if (!is_zero(bytes))
            corrupt("padding between files is not zero");
    }
    void write_file(const std::string& name, std::uint64_t offset, Bytes bytes) const {
        try {
            write_at(open_file(dir_, name, O_WRONLY).get(), offset, bytes);
        } catch (const Error& e) {
            throw Error(e, "cannot write " + name + ": " + e.what());
        }
    }

    const std::vector<PackedFile>& files_;
    const std::vector<std::uint64_t>& starts_;
    int dir_;
    std::uint64_t entries_end_;
    const std::string& without_;
};

void finish(int dir, const PackedFile& file) {
    const UniqueFd fd = open_file(dir, file.name, O_WRONLY);
    const timespec when{static_cast<time_t>(file.mtime_ns / kSecond),
                        static_cast<long>(file.mtime_ns % kSecond)};
    const std::array<timespec, 2> times{when, when};
    if (::fchmod(fd.get(), file.mode) != 0 || ::futimens(fd.get(), times.data()) != 0)
        throw io_error("cannot finish " + file.name, errno);
}

} // namespace

PackResult write_pack(const Id& checkpoint_id, int source, std::vector<std::string> names,
                      int target, const PackOptions& options) {
    std::ranges::sort(names);
    std::vector<PackedFile> files;
    for (const std::string& name : names) {
        if (!can_be_packed(name) || (!files.empty() && files.back().name == name))
            throw Error(Errc::bad_argument, "not a name to pack, or one that comes twice: " + name);
        files.push_back(look_at(source, name));
    }
    PackSource content(source, std::move(files));
    ImageInfo info;
    info.checkpoint_id = checkpoint_id;
    info.pid = kPackPid;
    info.kind = MemoryKind::files;
    info.chunk_size = options.chunk_size;
    info.regions = {{.address = 0, .length = content.size()}};
    const WriteResult written =
        write_image(target, kPackName, info, content,
                    {.threads = options.threads, .compress = options.compress, .io = options.io});
    return {.files = names.size(),
            .plain_size = content.plain_size(),
            .file_size = written.file_size,
            .digest = written.digest};
}

PackReader PackReader::open(int dir, IoMode io) {
    return {ImageReader::open(dir, kPackName, io), kPackName};
}

PackReader PackReader::open_part(int fd, std::uint64_t offset, std::uint64_t length,
                                 const std::string& name) {
    return {ImageReader::open_part(fd, offset, length, name), name};
}

PackReader::PackReader(ImageReader image, const std::string& name) : image_(std::move(image)) {
    try {
        const ImageInfo& info = image_.info();
        if (info.kind != MemoryKind::files || info.pid != kPackPid || info.parent_id != Id{} ||
            info.regions.size() != 1 || info.regions[0].address != 0)
            corrupt("is an image, and no pack");
        const std::uint64_t length = info.regions[0].length; // a page, at least
        std::array<std::byte, format::kPackHeadSize> bytes{};
        read_content(0, bytes);
        const format::PackHead head = format::decode_pack_head(bytes);
        entries_end_ = format::kPackHeadSize + head.index_size;
        if (entries_end_ > length)
            corrupt("its index lies beyond its end");
        std::vector<std::byte> entries(head.index_size);
        read_content(format::kPackHeadSize, entries);
        files_ = format::decode_pack_entries(entries, head);
        starts_ = format::place_packed(files_, head.index_size);
        if (starts_.back() != length)
            corrupt("its files do not fill it");
        for (const PackedFile& file : files_)
            size_ += file.size;
    } catch (const Error& e) {
        throw Error(e, name + ": " + e.what());
    }
}

void PackReader::read_content(std::uint64_t offset, MutBytes out) const {
    const std::uint32_t step = image_.info().chunk_size;
    std::vector<std::byte> plain;
    while (!out.empty()) {
        const std::uint64_t number = offset / step;
        plain.resize(image_.chunk(number).plain_size);
        image_.read_chunk(number, plain);
        const std::uint64_t skip = offset % step;
        const Bytes found = Bytes(plain).subspan(skip);
        const std::size_t size = std::min(found.size(), out.size());
        copy_bytes(found.first(size), out.data());
        out = out.subspan(size);
        offset += size;
    }
}

const PackedFile* PackReader::find(const std::string& name) const noexcept {
    const auto found = std::ranges::lower_bound(files_, name, {}, &PackedFile::name);
    return found == files_.end() || found->name != name ? nullptr : &*found;
}

std::vector<std::byte> PackReader::read(const PackedFile& file) const {
    std::vector<std::byte> bytes(file.size);
    read_content(starts_[static_cast<std::size_t>(&file - files_.data())], bytes);
    return bytes;
}

void PackReader::extract(int dir, unsigned threads, const std::string& without) const {
    for (const PackedFile& file : files_)
        if (file.name != without &&
            ::ftruncate(open_file(dir, file.name, O_WRONLY | O_CREAT | O_EXCL).get(),
                        static_cast<off_t>(file.size)) != 0)
            throw io_error("cannot make " + file.name, errno);
    PackSink sink(files_, starts_, dir, entries_end_, without);
    image_.restore(sink, threads, true);
    for (const PackedFile& file : files_)
        if (file.name != without)
            finish(dir, file);
}

void PackReader::verify(unsigned threads) const {
    const std::string none;
    PackSink sink(files_, starts_, -1, entries_end_, none);
    image_.restore(sink, threads, true);
}

} // namespace gpustasis
