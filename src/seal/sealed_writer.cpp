// SPDX-License-Identifier: Apache-2.0
#include "seal/sealed_writer.hpp"

#include "core/error.hpp"
#include "core/file.hpp"
#include "core/workers.hpp"
#include "seal/content_map.hpp"
#include "seal/errors.hpp"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <memory>
#include <utility>

namespace gpustasis::seal {
namespace {

constexpr std::uint64_t kSecond = 1'000'000'000; // ns
constexpr std::uint32_t kGivenMode = 0600;

/// What tells a file from another that was put in its place, or from itself after a change.
struct Identity {
    dev_t device = 0;
    ino_t inode = 0;
    std::uint64_t size = 0;
    std::uint64_t mtime_ns = 0;

    friend bool operator==(const Identity&, const Identity&) = default;
};

struct OpenSource {
    UniqueFd fd;
    Identity identity;
    std::uint32_t mode = 0;
};

OpenSource open_source(int dir, const std::string& name) {
    OpenSource source;
    source.fd = UniqueFd(
        ::openat(dir, name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
    struct stat status {};
    if (!source.fd || ::fstat(source.fd.get(), &status) != 0)
        throw io_error("cannot open " + name, errno);
    if (!S_ISREG(status.st_mode))
        throw Error(Errc::bad_argument, name + " is no ordinary file");
    const auto seconds = std::max<time_t>(status.st_mtim.tv_sec, 0);
    source.identity = {status.st_dev, status.st_ino, static_cast<std::uint64_t>(status.st_size),
                       static_cast<std::uint64_t>(seconds) * kSecond +
                           static_cast<std::uint64_t>(status.st_mtim.tv_nsec)};
    source.mode = status.st_mode & kModeBits;
    return source;
}

class Writer {
public:
    Writer(FreshKey& key, int source, const std::vector<std::string>& names, int target,
           const SealOptions& options)
        : source_(source), options_(options),
          header_(encode_header({.sealed_id = key.key().sealed_id(),
                                 .frame_size = options.frame_size,
                                 .lists_others = !options.others.empty()})),
          sealer_(key.sealer(kSealedFile, header_)), map_(look_at(names)),
          part_(writing([&] { return std::make_unique<PartFile>(target, kSealedName); })) {}

    SealedSizes write(const SealProgress& tell) {
        writing([&] { write_at(part_->fd(), 0, header_); });
        write_content(tell);
        const std::vector<std::byte> index = encode_index({map_.entries(), options_.others});
        if (map_.entries().size() > kMaxSealedFiles || index.size() > kMaxIndexSize)
            throw Error(Errc::bad_argument, "more files than a sealed file can hold");
        const std::uint32_t step = options_.frame_size;
        std::uint64_t at = end_of_frames(kSealedHeaderSize, map_.size(), step);
        for (std::size_t done = 0; done < index.size(); done += step) {
            const Bytes piece = Bytes(index).subspan(done);
            at = put(sealer_.take(), FrameKind::index,
                     piece.first(std::min<std::size_t>(piece.size(), step)), at);
        }
        const SealedEnd end{map_.size(), index.size(), map_.entries().size(),
                            at + kFrameOverhead + kEndSize, options_.others.size()};
        put(sealer_.take(), FrameKind::end, encode_end(end), at);
        writing([&] { part_->commit(); });
        SealedSizes sizes{map_.entries().size(), 0, end.file_size};
        for (const SealedEntry& entry : map_.entries())
            sizes.plain_size += entry.size;
        return sizes;
    }

private:
    std::vector<SealedEntry> look_at(const std::vector<std::string>& names) {
        std::vector<SealedEntry> entries;
        for (const std::string& name : names) {
            if (!can_be_sealed(name) || (!entries.empty() && entries.back().name >= name))
                throw Error(Errc::bad_argument,
                            "not a name to seal, or one that comes twice: " + name);
            if (const GivenFile* given = given_of(name)) {
                entries.push_back({name, kGivenMode, given->content.size(), given->mtime_ns});
                identities_.emplace_back();
                continue;
            }
            const OpenSource found = open_source(source_, name);
            entries.push_back({name, found.mode, found.identity.size, found.identity.mtime_ns});
            identities_.push_back(found.identity);
        }
        return entries;
    }

    const GivenFile* given_of(const std::string& name) const {
        const auto found = options_.given.find(name);
        return found == options_.given.end() ? nullptr : &found->second;
    }

    void write_content(const SealProgress& tell) {
        const std::uint64_t frames = frames_for(map_.size(), options_.frame_size);
        std::atomic<std::uint64_t> asked = 0;
        FirstFailure failure;
        ProgressMeter meter(tell);
        run_workers(worker_count(options_.threads, frames), failure, [&] {
            std::vector<std::byte> plain(options_.frame_size);
            const Wiped wiped{plain};
            // As many numbers are taken as there are frames, so that the index goes on behind them.
            while (!failure.any() && asked.fetch_add(1) < frames) {
                FrameNumber number = sealer_.take();
                const std::uint64_t offset = number.value() * options_.frame_size;
                const auto size = static_cast<std::size_t>(
                    std::min<std::uint64_t>(options_.frame_size, map_.size() - offset));
                gather(offset, MutBytes(plain).first(size));
                const std::uint64_t at =
                    end_of_frames(kSealedHeaderSize, offset, options_.frame_size);
                put(std::move(number), FrameKind::content, Bytes(plain).first(size), at);
                meter.add(size);
            }
        });
        meter.finish();
    }

    /// Where the next frame goes.
    std::uint64_t put(FrameNumber&& number, FrameKind kind, Bytes plain, std::uint64_t at) const {
        const auto head =
            encode_frame_header({number.value(), static_cast<std::uint32_t>(plain.size()), kind});
        std::vector<std::byte> out(plain.size() + kFrameOverhead);
        std::ranges::copy(head, out.begin());
        sealer_.seal(std::move(number), head, plain, MutBytes(out).subspan(kFrameHeaderSize));
        writing([&] { write_at(part_->fd(), at, out); });
        return at + out.size();
    }

    void gather(std::uint64_t offset, MutBytes out) const {
        for (const ContentMap::Piece& piece : map_.pieces(offset, out.size())) {
            const SealedEntry& entry = map_.entries()[piece.file];
            const MutBytes to = out.subspan(piece.at, piece.size);
            if (piece.is_entry) {
                const std::vector<std::byte> bytes = encode_entry(entry);
                copy_bytes(Bytes(bytes).subspan(piece.offset, piece.size), to.data());
                continue;
            }
            if (const GivenFile* given = given_of(entry.name)) {
                copy_bytes(Bytes(given->content).subspan(piece.offset, piece.size), to.data());
                continue;
            }
            const OpenSource source = open_source(source_, entry.name);
            if (source.identity != identities_[piece.file])
                throw Error(Errc::corrupt_data, entry.name + " changed while it was sealed");
            try {
                read_at(source.fd.get(), piece.offset, to);
            } catch (const Error& error) {
                throw Error(error, "cannot read " + entry.name + ": " + error.what());
            }
        }
    }

    struct Wiped {
        std::vector<std::byte>& bytes;
        ~Wiped() { wipe(bytes); }
    };

    int source_;
    SealOptions options_;
    std::vector<std::byte> header_;
    FrameSealer sealer_;
    std::vector<Identity> identities_;
    ContentMap map_;
    std::unique_ptr<PartFile> part_;
};

} // namespace

SealedSizes write_sealed(FreshKey& key, int source, std::vector<std::string> names, int target,
                         const SealOptions& options, const SealProgress& tell) {
    if (options.frame_size < kMinSealedFrame || options.frame_size > kMaxSealedFrame ||
        !std::has_single_bit(options.frame_size))
        throw Error(Errc::bad_argument,
                    "frame size " + std::to_string(options.frame_size) + " is out of bounds");
    for (const auto& [name, file] : options.given)
        names.push_back(name);
    std::ranges::sort(names);
    return Writer(key, source, names, target, options).write(tell);
}

} // namespace gpustasis::seal
