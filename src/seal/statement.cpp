// SPDX-License-Identifier: Apache-2.0
#include "seal/statement.hpp"

#include "core/error.hpp"
#include "seal/openssl.hpp"

#include <algorithm>
#include <charconv>
#include <limits>
#include <string_view>

namespace gpustasis::seal {
namespace {

constexpr std::string_view kTitle = "gpustasis statement ";
constexpr std::string_view kVersion = "1";
constexpr std::string_view kParent = "parent ";
constexpr std::string_view kNoParent = "none";
constexpr std::string_view kFiles = "files ";
constexpr std::string_view kDigits = "0123456789abcdef";
constexpr std::string_view kSigns = "._-+@:,=";
constexpr std::size_t kMaxName = 255;
constexpr std::size_t kHexSize = 2 * kSha256Size;

[[noreturn]] void damaged(const std::string& what) {
    throw Error(Errc::corrupt_data, "statement is damaged: " + what);
}

bool is_letter_or_digit(char c) noexcept {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
}

/// Lines, each with an end; without it.
class Lines {
public:
    explicit Lines(std::string_view text) : text_(text) {}

    bool at_end() const noexcept { return text_.empty(); }
    std::string_view next() {
        const std::size_t end = text_.find('\n');
        if (end == std::string_view::npos)
            damaged("its last line has no end");
        const std::string_view line = text_.substr(0, end);
        text_.remove_prefix(end + 1);
        return line;
    }
    /// What follows `word` on the next line, which begins with it.
    std::string_view next_after(std::string_view word) {
        std::string_view line = next();
        if (!line.starts_with(word))
            damaged("a line that begins with '" + std::string(word) + "' is missing");
        line.remove_prefix(word.size());
        return line;
    }

private:
    std::string_view text_;
};

/// As it is written: digits, the first of several not 0.
std::uint64_t number_of(std::string_view text, std::uint64_t most) {
    std::uint64_t value = 0;
    const char* const end = text.data() + text.size();
    const auto [at, error] = std::from_chars(text.data(), end, value);
    if (error != std::errc{} || at != end || value > most || std::to_string(value) != text)
        damaged("a number is none, or too large");
    return value;
}

Sha256 digest_of(std::string_view text) {
    if (text.size() != kHexSize)
        damaged("a digest has not " + std::to_string(kHexSize) + " digits");
    Sha256 digest{};
    for (std::size_t at = 0; at < kHexSize; ++at) {
        const std::size_t digit = kDigits.find(text[at]);
        if (digit == std::string_view::npos)
            damaged("a digest has a character that is no digit");
        constexpr unsigned bits = 4;
        digest[at / 2] = digest[at / 2] << bits | static_cast<std::byte>(digit);
    }
    return digest;
}

StatedFile file_of(std::string_view line) {
    const std::size_t size = line.find(' ');
    const std::size_t name = size == std::string_view::npos ? size : line.find(' ', size + 1);
    if (name == std::string_view::npos)
        damaged("the line of a file has not three words");
    StatedFile file;
    file.digest = digest_of(line.substr(0, size));
    file.size = number_of(line.substr(size + 1, name - size - 1), kMaxStatedSize);
    file.name = line.substr(name + 1);
    if (!can_be_stated(file.name))
        damaged("it names a file that no checkpoint has");
    return file;
}

void append(std::string& out, const StatedFile& file) {
    out += hex_text(file.digest) + ' ' + std::to_string(file.size) + ' ' + file.name + '\n';
}

bool are_in_order(const std::vector<StatedFile>& files) {
    return std::ranges::adjacent_find(files, std::greater_equal{}, &StatedFile::name) ==
           files.end();
}

} // namespace

const StatedFile* Statement::find(const std::string& name) const noexcept {
    const auto at = std::ranges::lower_bound(files, name, {}, &StatedFile::name);
    return at == files.end() || at->name != name ? nullptr : &*at;
}

bool can_be_stated(const std::string& name) noexcept {
    return !name.empty() && name.size() <= kMaxName && name.front() != '.' && name.front() != '-' &&
           std::ranges::all_of(name, [](char c) {
               return is_letter_or_digit(c) || kSigns.find(c) != std::string_view::npos;
           });
}

std::vector<std::byte> encode_statement(const Statement& statement) {
    if (statement.files.size() > kMaxStatedFiles || !are_in_order(statement.files))
        throw Error(Errc::bad_argument, "a statement of these files cannot be made");
    std::string text;
    text.append(kTitle).append(kVersion).append("\n").append(kParent);
    text += statement.parent ? hex_text(*statement.parent) : std::string(kNoParent);
    text.append("\n").append(kFiles).append(std::to_string(statement.files.size())).append("\n");
    for (const StatedFile& file : statement.files) {
        if (!can_be_stated(file.name) || file.size > kMaxStatedSize)
            throw Error(Errc::bad_argument, "a file '" + file.name + "' cannot be signed");
        append(text, file);
    }
    const Bytes bytes = std::as_bytes(std::span(text));
    return {bytes.begin(), bytes.end()};
}

Statement decode_statement(Bytes text) {
    if (text.size() > kMaxStatementSize)
        damaged("it is longer than " + std::to_string(kMaxStatementSize) + " bytes");
    Lines lines({reinterpret_cast<const char*>(text.data()), text.size()});
    if (const std::string_view version = lines.next_after(kTitle); version != kVersion)
        throw Error(Errc::unsupported, "statement of version '" +
                                           std::string(version.substr(0, kMaxName)) +
                                           "'; this build reads 1");
    Statement statement;
    if (const std::string_view parent = lines.next_after(kParent); parent != kNoParent)
        statement.parent = digest_of(parent);
    const std::uint64_t count = number_of(lines.next_after(kFiles), kMaxStatedFiles);
    while (!lines.at_end() && statement.files.size() < count)
        statement.files.push_back(file_of(lines.next()));
    if (!lines.at_end() || statement.files.size() != count)
        damaged("it has not the " + std::to_string(count) + " files that it says");
    if (!are_in_order(statement.files))
        damaged("its files are not in order, or one comes twice");
    return statement;
}

Sha256 sha256(Bytes bytes) {
    Sha256 digest{};
    require(EVP_Digest(bytes.data(), bytes.size(), raw(MutBytes(digest)), nullptr, EVP_sha256(),
                       nullptr),
            "cannot hash");
    return digest;
}

Sha256 digest_of_pieces(const std::vector<Sha256>& pieces) {
    return pieces.size() == 1 ? pieces.front() : sha256(std::as_bytes(std::span(pieces)));
}

std::string hex_text(const Sha256& digest) {
    constexpr unsigned bits = 4;
    constexpr std::byte low{0xf};
    std::string text;
    for (const std::byte byte : digest) {
        text += kDigits[std::to_integer<std::size_t>(byte >> bits)];
        text += kDigits[std::to_integer<std::size_t>(byte & low)];
    }
    return text;
}

} // namespace gpustasis::seal
