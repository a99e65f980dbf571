// SPDX-License-Identifier: Apache-2.0
/// Frames: plain bytes sealed with AES-256-GCM, known by number and place. A stage that knows no file
/// format: who uses it says what a number and the associated data mean.
///
/// No nonce is used twice under a key. The nonce is the number of the frame. The key of the
/// frames is made of the data key for one file of one checkpoint (frame_key()). A data key that can
/// seal is random and made by FreshKey alone, which gives a sealer for a file once, or leaves the file to
/// another process, once; a sealer gives each number once, and sealing uses it up, also where it fails. What was
/// read from an envelope (DataKey) only opens.
#pragma once

#include "core/bytes.hpp"
#include "seal/data_key.hpp"
#include "seal/secret.hpp"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <utility>

namespace gpustasis::seal {

inline constexpr std::size_t kTagSize =
    16; ///< bytes that a sealed frame is longer than its plain text

/// More frames under a key are refused. GCM allows 2^32 blocks to a frame and, with nonces that count,
/// far more frames than this.
inline constexpr std::uint64_t kMaxFrames = std::uint64_t{1} << 40;

/// A frame has at most so many bytes.
inline constexpr std::size_t kMaxFrameSize = std::size_t{16} << 20;

/// A number that no other frame under its key has. Used up by sealing.
class FrameNumber {
public:
    FrameNumber(FrameNumber&& other) noexcept
        : value_(other.value_), unused_(std::exchange(other.unused_, false)) {}
    FrameNumber(const FrameNumber&) = delete;
    FrameNumber& operator=(const FrameNumber&) = delete;
    FrameNumber& operator=(FrameNumber&&) = delete;
    ~FrameNumber() = default;

    std::uint64_t value() const noexcept { return value_; }

private:
    friend class FrameSealer;
    explicit FrameNumber(std::uint64_t value) noexcept : value_(value) {}
    std::uint64_t value_;
    bool unused_ = true;
};

/// Seals the frames of one file. Made by FreshKey; used by any number of threads.
class FrameSealer {
public:
    FrameSealer(const FrameSealer&) = delete;
    FrameSealer& operator=(const FrameSealer&) = delete;

    /// The next number, from 0. Throws Error: bad_argument after kMaxFrames.
    FrameNumber take();

    /// Fill `sealed`, kTagSize longer than `plain`. `associated` is not stored, and has to be the same when
    /// the frame is opened. Throws Error: bad_argument for a number that was used, or sizes that do not fit;
    /// io.
    void seal(FrameNumber&& number, Bytes associated, Bytes plain, MutBytes sealed) const;

private:
    friend class FreshKey;
    explicit FrameSealer(Secret key) : key_(std::move(key)) {}
    Secret key_;
    std::atomic<std::uint64_t> next_ = 0;
};

/// A data key that was made here, and so has sealed nothing yet; or one file's share of it, in another process.
class FreshKey {
public:
    /// Throws Error: io.
    FreshKey() : key_(DataKey::random()) {}

    /// For the process alone that the owner of the fresh key has handed `key` to, and for a file that the owner has left
    /// to it by leave(): this seals that file and no other. Once for a number, also where sealing fails: the number is
    /// used up, in memory that both processes share, before this is called, so that no second sealer of the file, whose
    /// nonces would be the same, is made in any process. Throws Error: io.
    static FreshKey of_left_file(const DataKey& key, std::uint32_t file_id) {
        return {key.at_depth(0), file_id};
    }

    const DataKey& key() const noexcept { return key_; }
    /// The checkpoint is built on that of `parent`, whose key only opens. Before the key is wrapped; seals as
    /// before. Throws Error: bad_argument, io.
    void build_on(const DataKey& parent) { key_ = key_.built_on(parent); }
    /// It is built on none after all.
    void build_on_nothing() noexcept { key_.forget_ancestors(); }
    /// For the file `file_id` with this header; once for each file. Throws Error: bad_argument, io.
    FrameSealer sealer(std::uint32_t file_id, Bytes header);
    /// The file `file_id` is another process's to seal (of_left_file()): this never does. Throws Error: bad_argument
    /// if it has its sealer, or was left before.
    void leave(std::uint32_t file_id);

private:
    FreshKey(DataKey key, std::uint32_t only) : key_(std::move(key)), only_(only) {}
    void use_up(std::uint32_t file_id);

    DataKey key_;
    std::optional<std::uint32_t> only_{}; ///< the one file that this seals; none: any
    std::set<std::uint32_t> given_;
};

/// Opens the frames of one file; used by any number of threads.
class FrameOpener {
public:
    /// Throws Error: io.
    FrameOpener(const DataKey& key, std::uint32_t file_id, Bytes header)
        : key_(frame_key(key, file_id, header)) {}

    /// Fill `plain`, kTagSize shorter than `sealed`, with what was sealed under this number and
    /// `associated`. Throws Error: corrupt_data if that is not what `sealed` is, `plain` holds zeros then;
    /// bad_argument for sizes that do not fit; io.
    void open(std::uint64_t number, Bytes associated, Bytes sealed, MutBytes plain) const;

private:
    Secret key_;
};

} // namespace gpustasis::seal
