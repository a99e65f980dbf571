// SPDX-License-Identifier: Apache-2.0
#include "seal/signature.hpp"

#include "core/fields.hpp"
#include "seal/certificate.hpp"
#include "seal/openssl.hpp"

#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/rsa.h>
#include <openssl/x509v3.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

namespace gpustasis::seal {
namespace {

constexpr std::string_view kMagic = "GPUSSIG\n";
constexpr std::uint32_t kVersion = 1;
// Before what is signed: a signature made for another purpose with the same key is none of ours.
constexpr std::string_view kPurpose{"gpustasis signature\0", 20};
constexpr std::size_t kKeyIdSize = 32;
using KeyId = std::array<std::byte, kKeyIdSize>;

enum class Algorithm : std::uint32_t { ed25519 = 1, ecdsa = 2, rsa_pss = 3 };

Algorithm algorithm_of(EVP_PKEY* key) {
    switch (EVP_PKEY_get_base_id(key)) {
    case EVP_PKEY_ED25519: return Algorithm::ed25519;
    case EVP_PKEY_EC: return Algorithm::ecdsa;
    default: return Algorithm::rsa_pss; // key_kind() lets no other pass
    }
}

/// nullptr: Ed25519 has its own.
const EVP_MD* digest_of(EVP_PKEY* key, Algorithm algorithm) {
    constexpr int p256 = 256;
    constexpr int p384 = 384;
    if (algorithm == Algorithm::ed25519)
        return nullptr;
    if (algorithm == Algorithm::rsa_pss || EVP_PKEY_get_bits(key) <= p256)
        return EVP_sha256();
    return EVP_PKEY_get_bits(key) <= p384 ? EVP_sha384() : EVP_sha512();
}

/// SHA-256 of the public key, as X.509 encodes it.
KeyId key_id(EVP_PKEY* key) {
    unsigned char* der = nullptr;
    const int size = i2d_PUBKEY(key, &der);
    if (size <= 0)
        throw crypto_error(Errc::io, "cannot encode a public key");
    KeyId id{};
    const int done = EVP_Digest(der, static_cast<std::size_t>(size), raw(MutBytes(id)), nullptr,
                                EVP_sha256(), nullptr);
    OPENSSL_free(der);
    require(done, "cannot hash a public key");
    return id;
}

std::vector<std::byte> with_purpose(Bytes message) {
    FieldWriter out(kPurpose.size() + message.size());
    out.append(std::as_bytes(std::span(kPurpose)));
    out.append(message);
    return out.take();
}

void use_pss(EVP_PKEY_CTX* context, Algorithm algorithm) {
    if (algorithm != Algorithm::rsa_pss)
        return;
    require(EVP_PKEY_CTX_set_rsa_padding(context, RSA_PKCS1_PSS_PADDING), "cannot use PSS");
    require(EVP_PKEY_CTX_set_rsa_pss_saltlen(context, RSA_PSS_SALTLEN_DIGEST), "cannot use PSS");
}

/// A public key in PEM, or that of a certificate that may sign.
Pkey trusted_key(Bytes pem) {
    if (pem.size() > kMaxPemSize)
        throw Error(Errc::bad_argument, "a trusted key is longer than a key");
    Pkey key;
    const std::string_view text(reinterpret_cast<const char*>(pem.data()), pem.size());
    if (text.find("-----BEGIN CERTIFICATE-----") != std::string_view::npos) {
        const Certificate certificate = read_certificate(pem);
        if ((X509_get_key_usage(certificate.get()) & KU_DIGITAL_SIGNATURE) == 0)
            throw Error(Errc::bad_argument,
                        "key usage of a trusted certificate lacks digitalSignature");
        key.reset(X509_get_pubkey(certificate.get()));
    } else {
        const Bio bio = reader_of(pem);
        key.reset(PEM_read_bio_PUBKEY(bio.get(), nullptr, nullptr, nullptr));
    }
    if (!key)
        throw crypto_error(Errc::bad_argument,
                           "a trusted key is neither certificate nor public key");
    key_kind(key.get()); // of the kinds that are used
    return key;
}

} // namespace

std::vector<std::byte> sign(Bytes message, const PrivateKey& key) {
    start_openssl();
    const Algorithm algorithm = algorithm_of(key.get());
    const DigestContext context(EVP_MD_CTX_new());
    EVP_PKEY_CTX* options = nullptr;
    if (!context || EVP_DigestSignInit(context.get(), &options, digest_of(key.get(), algorithm),
                                       nullptr, key.get()) != 1)
        throw crypto_error(Errc::io, "cannot sign with a key of " + key.kind());
    use_pss(options, algorithm);
    const std::vector<std::byte> signed_bytes = with_purpose(message);
    std::size_t size = 0;
    require(EVP_DigestSign(context.get(), nullptr, &size, raw(Bytes(signed_bytes)),
                           signed_bytes.size()),
            "cannot sign");
    std::vector<std::byte> signature(size);
    require(EVP_DigestSign(context.get(), raw(MutBytes(signature)), &size, raw(Bytes(signed_bytes)),
                           signed_bytes.size()),
            "cannot sign");
    FieldWriter out(kMaxSignatureSize);
    out.append(std::as_bytes(std::span(kMagic)));
    out.number(kVersion);
    out.number(static_cast<std::uint32_t>(algorithm));
    out.append(key_id(key.get()));
    out.append(Bytes(signature).first(size));
    return out.take();
}

std::size_t verify_signature(Bytes message, Bytes record, const std::vector<Bytes>& trusted) {
    start_openssl();
    if (record.size() > kMaxSignatureSize)
        throw Error(Errc::corrupt_data, "signature is longer than any");
    FieldReader fields(record);
    if (!std::ranges::equal(fields.take(kMagic.size()), std::as_bytes(std::span(kMagic))))
        throw Error(Errc::corrupt_data, "is no signature of gpustasis");
    if (const auto version = fields.number<std::uint32_t>(); version != kVersion)
        throw Error(Errc::unsupported, "signature of version " + std::to_string(version));
    const auto algorithm = fields.number<std::uint32_t>();
    const Bytes wanted = fields.take(kKeyIdSize);
    const Bytes signature = record.subspan(kMagic.size() + 2 * sizeof(std::uint32_t) + kKeyIdSize);
    const std::vector<std::byte> signed_bytes = with_purpose(message);
    for (std::size_t number = 0; number < trusted.size(); ++number) {
        const Pkey key = trusted_key(trusted[number]);
        if (!std::ranges::equal(key_id(key.get()), wanted))
            continue;
        const Algorithm expected = algorithm_of(key.get());
        const DigestContext context(EVP_MD_CTX_new());
        EVP_PKEY_CTX* options = nullptr;
        if (!context ||
            EVP_DigestVerifyInit(context.get(), &options, digest_of(key.get(), expected), nullptr,
                                 key.get()) != 1)
            throw crypto_error(Errc::io, "cannot verify a signature");
        use_pss(options, expected);
        const int same = EVP_DigestVerify(context.get(), raw(signature), signature.size(),
                                          raw(Bytes(signed_bytes)), signed_bytes.size());
        ERR_clear_error();
        if (same != 1 || algorithm != static_cast<std::uint32_t>(expected))
            throw Error(Errc::corrupt_data, "signature is not that of these bytes");
        return number;
    }
    throw Error(Errc::corrupt_data, "signature is by a key that is not trusted");
}

} // namespace gpustasis::seal
