// SPDX-License-Identifier: Apache-2.0
/// The statement of docs/format.md: which files a checkpoint has, as text that is signed.
#pragma once

#include "core/bytes.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace gpustasis::seal {

inline constexpr const char* kStatementName = "gpustasis-statement.txt";
inline constexpr const char* kSignatureName = "gpustasis-signature.cms";

inline constexpr std::size_t kMaxStatementSize = 64U << 20;
inline constexpr std::size_t kMaxStatedFiles = 1U << 18;
inline constexpr std::uint64_t kMaxStatedSize = std::uint64_t{1} << 52; ///< of one file

inline constexpr std::size_t kSha256Size = 32;
using Sha256 = std::array<std::byte, kSha256Size>;

struct StatedFile {
    std::string name;
    std::uint64_t size = 0;
    Sha256 digest{}; ///< as digest_of_pieces() makes it

    friend bool operator==(const StatedFile&, const StatedFile&) = default;
};

struct Statement {
    std::optional<Sha256> parent;  ///< SHA-256 of the parent's statement; nullopt: it has no parent
    std::vector<StatedFile> files; ///< ascending by name, compared as bytes; each name once

    /// nullptr: it names no such file.
    const StatedFile* find(const std::string& name) const noexcept;
};

/// False for what could lead out of a directory or be read in two ways in a line of text: a name has
/// letters, digits, and `.`, `_`, `-`, `+`, `@`, `:`, `,`, `=`, and begins with none of `.` and `-`.
bool can_be_stated(const std::string& name) noexcept;

/// Throws Error: bad_argument for a name that cannot be stated, more than a limit, or files out of order.
std::vector<std::byte> encode_statement(const Statement& statement);

/// Throws Error: corrupt_data unless `text` is what encode_statement() writes; unsupported for another version.
Statement decode_statement(Bytes text);

/// Throws Error: io.
Sha256 sha256(Bytes bytes);

/// Of a file, whose pieces have these: of one, that; of several, SHA-256 of all of them, one after the other.
Sha256 digest_of_pieces(const std::vector<Sha256>& pieces);

/// "3f2a…"
std::string hex_text(const Sha256& digest);

} // namespace gpustasis::seal
