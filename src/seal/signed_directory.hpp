// SPDX-License-Identifier: Apache-2.0
/// A checkpoint's directory with a statement and its signature in it.
#pragma once

#include "core/bytes.hpp"
#include "seal/signature.hpp"
#include "seal/statement.hpp"

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace gpustasis::seal {

using SignProgress = std::function<void(std::uint64_t bytes)>;

/// How many bytes of a file are hashed at once: pieces of one file on several threads.
inline constexpr std::uint64_t kStatedPiece = 64U << 20;

/// What lies in the directory and is in no statement: logs, reports and statistics, which are written later than it
/// and which no restore reads; the envelope, which can be made anew for others and opens nothing but what
/// is in the statement; statement and signature.
bool is_left_unsigned(const std::string& name) noexcept;

/// Of every file in `dir`. `parent`: SHA-256 of the statement of the checkpoint that it is built on. Throws
/// Error: bad_argument for what cannot be signed: no ordinary file, or one that is not finished; io.
Statement make_statement(int dir, const std::optional<Sha256>& parent, unsigned threads = 0,
                         const SignProgress& tell = {});

/// Puts both into `dir`, the signature last, durably. Throws Error: io.
void write_signed(int dir, Bytes statement, Bytes signature);
/// Removes both, if they are there. Throws Error: io.
void remove_signed(int dir);
/// Whether one of them is there.
bool has_signed(int dir) noexcept;

/// Whose files are believed.
enum class Owners : std::uint8_t {
    any,
    own, ///< root's or this user's, which nobody else may write: what was checked stays so
};

/// A statement that is signed.
struct SignedStatement {
    Statement statement;
    Sha256 digest{}; ///< of its text
    SignedBy by;
};

/// The statement in `dir`, with a signature of one of `trusted`. Throws Error: corrupt_data, also if there is
/// none; unsupported, io; bad_argument if `owners` forbids it.
SignedStatement read_signed(int dir, const Trusted& trusted, Owners owners);
/// Its digest, with no look at who has signed it. Throws as read_signed().
Sha256 read_statement_digest(int dir);

/// Which files of a checkpoint.
enum class Stated : std::uint8_t {
    all,
    for_others, ///< images and manifest of ours, which checkpoints that are built on it read
};

/// Throws Error: corrupt_data unless `dir` holds just these files with just these bytes; bad_argument if
/// `owners` forbids it; io.
void check_files(int dir, const Statement& statement, Stated which, Owners owners,
                 unsigned threads = 0, const SignProgress& tell = {});

} // namespace gpustasis::seal
