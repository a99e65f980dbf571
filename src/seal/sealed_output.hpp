// SPDX-License-Identifier: Apache-2.0
/// Writes one file sealed while it comes into being: nothing of it is ever on a disk in the clear.
#pragma once

#include "core/block_output.hpp"
#include "core/direct_io.hpp"
#include "core/file.hpp"
#include "core/image_output.hpp"
#include "seal/frame_cipher.hpp"
#include "seal/sealed_format.hpp"

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace gpustasis::seal {

/// Frames are sealed as soon as all their bytes are there. Holds the plain text of those that are not
/// full, and wipes it: with chunks that arrive nearly in order about one more than those chunks span, and
/// the first, as the image's header comes last. Holds besides what BlockOutput does, sealed.
class SealedOutput final : public ImageOutput {
public:
    struct Options {
        std::uint32_t file_id = kFirstOther;
        std::string name;            ///< of the file within
        std::uint32_t alignment = 1; ///< of chunks
        std::uint32_t frame_size = kDefaultSealedFrame;
        IoMode io = IoMode::buffered;
        std::vector<OtherFile> others{}; ///< what kSealedFile lists, ascending
    };
    /// Writes sealed_name(file_id) in `dir`, which stays the caller's, and open. Throws Error:
    /// bad_argument, also if `key` has sealed that file before; unsupported if direct I/O is asked for and not to
    /// be had; OutputError.
    SealedOutput(FreshKey& key, int dir, Options options);
    ~SealedOutput() override;

    /// As FileOutput::reserve(): room for all that is sealed of a file of `size` bytes. Throws Error: OutputError if
    /// there is none.
    bool reserve(std::uint64_t size);

    void write(std::uint64_t offset, MutBytes buffer, std::size_t size) override;
    void put(std::uint64_t offset, Bytes bytes) override;
    /// Throws Error: bad_argument also after a put that failed, or behind `size`.
    void commit(std::uint64_t size) override;
    /// The first part of commit(): all is on the medium, and has no name yet. Nothing more is put. Throws as that.
    void end(std::uint64_t size);
    /// The second part, after end(). Throws Error: OutputError.
    void publish();
    bool is_direct() const noexcept override { return blocks_.is_direct(); }

    /// What kSealedFile has to list. After end().
    OtherFile listed() const noexcept { return {options_.file_id, end_tag_}; }

private:
    struct OpenFrame {
        explicit OpenFrame(FrameNumber&& own_number) : number(std::move(own_number)) {}
        FrameNumber number;
        std::vector<std::byte> plain{}; ///< none: nothing was put yet
        std::size_t filled = 0;         ///< bytes, padding among them
    };
    using OpenFrames = std::map<std::uint64_t, OpenFrame>; ///< by number

    std::vector<std::byte> index_of(std::uint64_t size) const;
    void fill(std::uint64_t offset, Bytes bytes, std::uint64_t padded);
    void seal_whole(std::uint64_t offset, Bytes plain);
    void fill_frame(std::uint64_t offset, Bytes piece, std::uint64_t padded);
    OpenFrames::iterator open_frame(std::uint64_t number);
    void write_frame(FrameNumber&& number, FrameKind kind, Bytes plain, std::uint64_t at);

    Options options_;
    std::vector<std::byte> header_;
    FrameSealer sealer_;
    PartFile part_;
    BlockOutput blocks_;
    std::mutex mutex_;
    OpenFrames open_;
    std::uint64_t next_ = 0;       ///< frames before it are sealed, or open
    std::uint64_t end_ = 0;        ///< of what was put, padding among it
    std::uint64_t unfinished_ = 0; ///< puts that were begun and have not ended, or have failed
    Tag end_tag_{};
};

} // namespace gpustasis::seal
