// SPDX-License-Identifier: Apache-2.0
#include "seal/content_hash.hpp"

#include "seal/openssl.hpp"

#include <algorithm>
#include <array>

namespace gpustasis::seal {
namespace {

constexpr std::size_t kDigestSize = 32;

} // namespace

ContentHash::ContentHash(const DataKey& key) : key_(key.subkey("gpustasis content hashes", {})) {}

Id ContentHash::operator()(Bytes content) const {
    std::array<std::byte, kDigestSize> digest{};
    std::size_t size = 0;
    if (EVP_Q_mac(nullptr, "HMAC", nullptr, "SHA256", nullptr, key_.bytes().data(), key_.size(),
                  raw(content), content.size(), raw(MutBytes(digest)), digest.size(),
                  &size) == nullptr ||
        size != digest.size())
        throw crypto_error(Errc::io, "cannot hash a content");
    Id id{};
    std::ranges::copy(Bytes(digest).first(id.size()), id.begin());
    return id;
}

} // namespace gpustasis::seal
