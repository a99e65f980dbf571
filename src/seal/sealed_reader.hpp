// SPDX-License-Identifier: Apache-2.0
/// Reads the sealed file, from its end: nothing of it is given that is not authentic.
#pragma once

#include "core/chunk_io.hpp"
#include "core/direct_io.hpp"
#include "core/unique_fd.hpp"
#include "seal/content_map.hpp"
#include "seal/frame_cipher.hpp"
#include "seal/sealed_writer.hpp"

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace gpustasis::seal {

/// Opened: header, end and index are authentic, and the file is as long as they say. Used by any number of
/// threads.
class SealedReader {
public:
    /// `io`: of the frames that read() reads. Throws Error: io; corrupt_data, also if `key` is that of another
    /// checkpoint; unsupported.
    SealedReader(int dir, const std::string& name, const DataKey& key,
                 std::uint32_t file_id = kSealedFile, IoMode io = IoMode::automatic);

    const std::vector<SealedEntry>& entries() const noexcept { return map_.entries(); }
    std::uint64_t file_size() const noexcept { return end_.file_size; }
    std::uint32_t frame_size() const noexcept { return header_.frame_size; }
    std::uint32_t file_id() const noexcept { return header_.file_id; }
    /// The other sealed files of the checkpoint, as kSealedFile lists them.
    const std::vector<OtherFile>& others() const noexcept { return others_; }
    const Tag& end_tag() const noexcept { return end_tag_; }
    /// Whether read() waits for a device, and not for a processor.
    bool is_direct() const noexcept { return frames_->is_direct(); }

    /// Which entry has this name; none: nullopt.
    std::optional<std::size_t> find(const std::string& name) const;

    /// Fill `out` with the bytes of a file from `offset`. Throws Error: bad_argument past its end; io,
    /// corrupt_data: then `out` holds authentic bytes up to the frame at fault, and no other of the file.
    void read(std::size_t file, std::uint64_t offset, MutBytes out) const;

    /// What is done with authentic bytes of a file; by several threads at once, in any order.
    using Sink = std::function<void(std::size_t file, std::uint64_t offset, Bytes bytes)>;

    /// Give all bytes of all files to `sink`. Throws Error: io, corrupt_data, and what `sink` throws: it
    /// may have got some then.
    void read_all(const Sink& sink, unsigned threads = 0, const SealProgress& tell = {}) const;

private:
    void open_frame(std::uint64_t number, FrameKind kind, std::uint64_t at, MutBytes plain) const;
    void read_run(std::uint64_t at, MutBytes out) const;
    Bytes read_stored(std::uint64_t at, std::size_t size, AlignedBuffer& buffer) const;
    void open_stored(std::uint64_t number, FrameKind kind, Bytes stored, MutBytes plain) const;
    /// Content frame `number`, into the front of `plain`; what of that it fills.
    MutBytes open_content(std::uint64_t number, MutBytes plain) const;

    std::shared_ptr<const UniqueFd> file_;
    std::shared_ptr<const ChunkInput> frames_; ///< the same file
    std::shared_ptr<BufferPool> buffers_;      ///< for frames as they are stored
    std::vector<std::byte> header_bytes_;
    SealedHeader header_;
    FrameOpener opener_;
    SealedEnd end_;
    Tag end_tag_{};
    std::vector<OtherFile> others_;
    ContentMap map_{{}};
};

} // namespace gpustasis::seal
