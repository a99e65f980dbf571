// SPDX-License-Identifier: Apache-2.0
#include "seal/data_key.hpp"

#include "core/error.hpp"
#include "core/fields.hpp"
#include "seal/openssl.hpp"

#include <openssl/core_names.h>
#include <openssl/params.h>
#include <openssl/rand.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

namespace gpustasis::seal {
namespace {

constexpr std::string_view kRecordMagic = "GPUSKEY\n";
constexpr std::uint32_t kRecordVersion = 1;
constexpr std::string_view kFrames = "gpustasis frames";

void fill_random(MutBytes out) {
    if (RAND_priv_bytes(raw(out), static_cast<int>(out.size())) != 1)
        throw crypto_error(Errc::io, "cannot make a random key");
}

} // namespace

DataKey DataKey::from_record(Bytes record) {
    start_openssl();
    if (record.size() != kRecordSize)
        throw Error(Errc::corrupt_data, "a key record has " + std::to_string(kRecordSize) +
                                            " bytes, not " + std::to_string(record.size()));
    FieldReader fields(record);
    if (!std::ranges::equal(fields.take(kRecordMagic.size()),
                            std::as_bytes(std::span(kRecordMagic))))
        throw Error(Errc::corrupt_data, "is no key record of gpustasis");
    const auto version = fields.number<std::uint32_t>();
    if (version != kRecordVersion)
        throw Error(Errc::unsupported, "key record of version " + std::to_string(version) +
                                           "; this build reads " + std::to_string(kRecordVersion));
    fields.reserved(sizeof(std::uint32_t));
    const Id sealed_id = fields.id();
    Secret key(kSize);
    std::ranges::copy(fields.take(kSize), key.bytes().begin());
    return {sealed_id, std::move(key)};
}

DataKey DataKey::random() {
    start_openssl();
    Id sealed_id{};
    fill_random(sealed_id);
    Secret key(kSize);
    fill_random(key.bytes());
    return {sealed_id, std::move(key)};
}

Secret DataKey::record() const {
    FieldWriter head(kRecordSize - kSize); // what is secret goes into locked memory only
    head.append(std::as_bytes(std::span(kRecordMagic)));
    head.number(kRecordVersion);
    head.reserved(sizeof(std::uint32_t));
    head.append(sealed_id_);
    Secret out(kRecordSize);
    const auto rest = std::ranges::copy(head.bytes(), out.bytes().begin()).out;
    std::ranges::copy(key_.bytes(), rest);
    return out;
}

Secret DataKey::subkey(std::string_view label, Bytes context) const {
    const Kdf kdf(EVP_KDF_fetch(nullptr, "HKDF", nullptr));
    const KdfContext made(kdf ? EVP_KDF_CTX_new(kdf.get()) : nullptr);
    if (!made)
        throw crypto_error(Errc::io, "cannot use HKDF");
    FieldWriter info(label.size() + 1 + context.size());
    info.append(std::as_bytes(std::span(label)));
    info.reserved(1);
    info.append(context);
    std::vector<std::byte> info_bytes = info.take();
    std::string digest = "SHA256";
    // OSSL_PARAM takes what it only reads as if it wrote.
    const auto writable = [](Bytes bytes) { return const_cast<std::byte*>(bytes.data()); };
    const std::array<OSSL_PARAM, 5> params = {
        OSSL_PARAM_construct_utf8_string(OSSL_KDF_PARAM_DIGEST, digest.data(), 0),
        OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_KEY, writable(key_.bytes()), kSize),
        OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_SALT, writable(sealed_id_),
                                          sealed_id_.size()),
        OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_INFO, info_bytes.data(),
                                          info_bytes.size()),
        OSSL_PARAM_construct_end()};
    Secret out(kSize);
    require(EVP_KDF_derive(made.get(), raw(out.bytes()), out.size(), params.data()),
            "cannot derive a key");
    return out;
}

Secret frame_key(const DataKey& key, std::uint32_t file_id, Bytes header) {
    FieldWriter context(sizeof file_id + header.size());
    context.number(file_id);
    context.append(header);
    return key.subkey(kFrames, context.bytes());
}

} // namespace gpustasis::seal
