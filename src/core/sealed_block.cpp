// SPDX-License-Identifier: Apache-2.0
#include "core/sealed_block.hpp"

#include "core/error.hpp"
#include "core/hash.hpp"

#include <algorithm>
#include <span>
#include <string>
#include <utility>

namespace gpustasis::format {
namespace {

Bytes bytes_of(std::string_view magic) noexcept {
    return std::as_bytes(std::span(magic));
}

// Throws Error: unsupported unless this build can read a file with these bits; `known` are such.
void check_required_features(std::uint64_t bits, std::uint64_t known) {
    if ((bits & kEncryption) != 0)
        throw Error(Errc::unsupported, "is encrypted, which this version cannot read");
    if ((bits & ~known) != 0)
        throw Error(Errc::unsupported, "needs features this version does not know (bits " +
                                           std::to_string(bits) + ")");
}

} // namespace

FieldWriter begin_block(const BlockKind& kind, std::uint64_t required_features, std::size_t size) {
    FieldWriter out(size);
    out.append(bytes_of(kind.magic));
    out.number(kVersion);
    out.number(kind.header_size);
    out.number(required_features);
    out.number(std::uint64_t{0}); // optional_features
    return out;
}

std::vector<std::byte> seal(FieldWriter out) {
    out.append(hash128(out.bytes()));
    return out.take();
}

OpenBlock open_block(Bytes bytes, const BlockKind& kind) {
    OpenBlock block{.fields = FieldReader(bytes)};
    if (!std::ranges::equal(block.fields.take(kind.magic.size()), bytes_of(kind.magic)))
        throw Error(Errc::corrupt_data, kind.wrong_magic);
    // Before the version, so that a damaged version is called damaged.
    block.hash = check_seal(bytes, kind.wrong_hash);
    const auto version = block.fields.number<std::uint32_t>();
    if (version != kVersion)
        throw Error(Errc::unsupported, "has format version " + std::to_string(version) +
                                           ", this build reads " + std::to_string(kVersion));
    if (block.fields.number<std::uint32_t>() != kind.header_size)
        throw Error(Errc::corrupt_data, "header has the wrong size");
    block.required_features = block.fields.number<std::uint64_t>();
    check_required_features(block.required_features, kind.features);
    block.fields.number<std::uint64_t>(); // optional_features
    return block;
}

Id hash_at_end(Bytes sealed) {
    return FieldReader(sealed.last(kHashSize)).id();
}

Id check_seal(Bytes sealed, const char* wrong_hash) {
    if (sealed.size() < kHashSize)
        throw Error(Errc::corrupt_data, wrong_hash);
    const Id hash = hash_at_end(sealed);
    if (hash != hash128(sealed.first(sealed.size() - kHashSize)))
        throw Error(Errc::corrupt_data, wrong_hash);
    return hash;
}

} // namespace gpustasis::format
