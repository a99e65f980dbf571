// SPDX-License-Identifier: Apache-2.0
#include "seal/signature.hpp"

#include "core/error.hpp"
#include "core/file.hpp"
#include "seal/certificate.hpp"
#include "seal/openssl.hpp"
#include "seal/private_key.hpp"

#include <fcntl.h>
#include <openssl/err.h>
#include <openssl/rsa.h>
#include <openssl/x509_vfy.h>
#include <openssl/x509v3.h>

#include <algorithm>
#include <ctime>
#include <utility>

namespace gpustasis::seal {
namespace {

struct FreeStack {
    void operator()(STACK_OF(X509) * stack) const noexcept { sk_X509_free(stack); }
};
struct FreeOwned {
    void operator()(STACK_OF(X509) * stack) const noexcept { sk_X509_pop_free(stack, X509_free); }
};
using Stack = std::unique_ptr<STACK_OF(X509), FreeStack>;      // of certificates of others
using OwnedStack = std::unique_ptr<STACK_OF(X509), FreeOwned>; // with the certificates
using Store = std::unique_ptr<X509_STORE, Freed<&X509_STORE_free>>;
using StoreContext = std::unique_ptr<X509_STORE_CTX, Freed<&X509_STORE_CTX_free>>;

constexpr int kLeastStrength =
    2; // of OpenSSL's levels: 112 bits, so no SHA-1 and no RSA below 2048

/// Throws Error: bad_argument unless its owner may sign a checkpoint.
void require_signer(X509* certificate) {
    EVP_PKEY* const key = X509_get0_pubkey(certificate);
    static_cast<void>(key_kind(key)); // of the kinds that are used
    if (EVP_PKEY_get_base_id(key) == EVP_PKEY_ED25519)
        throw Error(Errc::bad_argument, "an Ed25519 key signs no CMS here; take one of RSA or EC");
    if ((X509_get_key_usage(certificate) & KU_DIGITAL_SIGNATURE) == 0) // all bits: it names none
        throw Error(Errc::bad_argument, "its key usage lacks digitalSignature");
    constexpr std::uint32_t fit = XKU_SMIME | XKU_CODE_SIGN | XKU_ANYEKU;
    if ((X509_get_extended_key_usage(certificate) & fit) == 0)
        throw Error(Errc::bad_argument,
                    "its extended key usage has neither emailProtection nor codeSigning");
}

SignedBy signed_by(X509* certificate) {
    CertificateFacts facts = facts_of(certificate, std::time(nullptr));
    return {std::move(facts.subject), std::move(facts.key), "", std::move(facts.warning)};
}

const EVP_MD* digest_for(EVP_PKEY* key) {
    constexpr int p256 = 256;
    constexpr int p384 = 384;
    if (EVP_PKEY_get_base_id(key) == EVP_PKEY_RSA || EVP_PKEY_get_bits(key) <= p256)
        return EVP_sha256();
    return EVP_PKEY_get_bits(key) <= p384 ? EVP_sha384() : EVP_sha512();
}

bool is_strong(int digest) noexcept {
    return digest == NID_sha256 || digest == NID_sha384 || digest == NID_sha512;
}

Certificate certificate_in(const std::string& path) {
    try {
        const UniqueFd fd = open_regular(AT_FDCWD, path);
        const std::uint64_t size = file_size(fd.get());
        if (size > kMaxPemSize)
            throw Error(Errc::corrupt_data, "has " + std::to_string(size) + " bytes");
        return read_certificate(read_part(fd.get(), 0, size));
    } catch (const Error& e) {
        throw Error(e, "certificate " + path + ": " + e.what());
    }
}

std::vector<std::byte> encoded(const Cms& cms) {
    const int size = i2d_CMS_ContentInfo(cms.get(), nullptr);
    if (size <= 0)
        throw crypto_error(Errc::io, "cannot encode a signature");
    std::vector<std::byte> bytes(static_cast<std::size_t>(size));
    unsigned char* at = raw(MutBytes(bytes));
    if (i2d_CMS_ContentInfo(cms.get(), &at) != size)
        throw crypto_error(Errc::io, "cannot encode a signature");
    return bytes;
}

Cms decoded(Bytes bytes) {
    if (bytes.size() > kMaxSignatureSize)
        throw Error(Errc::corrupt_data,
                    "signature is longer than " + std::to_string(kMaxSignatureSize) + " bytes");
    const unsigned char* at = raw(bytes);
    Cms cms(d2i_CMS_ContentInfo(nullptr, &at, static_cast<long>(bytes.size())));
    if (!cms || at != raw(bytes) + bytes.size())
        throw crypto_error(Errc::corrupt_data, "signature is damaged: no CMS");
    if (OBJ_obj2nid(CMS_get0_type(cms.get())) != NID_pkcs7_signed ||
        CMS_is_detached(cms.get()) != 1)
        throw crypto_error(Errc::corrupt_data, "signature is damaged: no detached SignedData");
    return cms;
}

/// The one signer. His certificate comes with the signature, or is a trusted one.
CMS_SignerInfo* signer_of(CMS_ContentInfo* cms) {
    STACK_OF(CMS_SignerInfo)* const infos = CMS_get0_SignerInfos(cms);
    if (sk_CMS_SignerInfo_num(infos) != 1)
        throw Error(Errc::corrupt_data, "signature has not just one signer");
    CMS_SignerInfo* const info = sk_CMS_SignerInfo_value(infos, 0);
    X509_ALGOR* digest = nullptr;
    CMS_SignerInfo_get0_algs(info, nullptr, nullptr, &digest, nullptr);
    const ASN1_OBJECT* id = nullptr;
    X509_ALGOR_get0(&id, nullptr, nullptr, digest);
    if (!is_strong(OBJ_obj2nid(id)))
        throw Error(Errc::corrupt_data, "signature is made with a hash other than SHA-256, "
                                        "SHA-384 and SHA-512");
    return info;
}

std::string date_of(CMS_SignerInfo* info) {
    const auto find = [&](int type) {
        return static_cast<const ASN1_TIME*>(CMS_signed_get0_data_by_OBJ(
            info, OBJ_nid2obj(NID_pkcs9_signingTime), -3, type)); // -3: there is just one
    };
    const ASN1_TIME* time = find(V_ASN1_UTCTIME);
    if (time == nullptr)
        time = find(V_ASN1_GENERALIZEDTIME);
    ERR_clear_error();
    return time == nullptr ? "" : date_text(time);
}

void require_chain(X509* signer, STACK_OF(X509) * others, X509_STORE* store) {
    const StoreContext context(X509_STORE_CTX_new());
    if (!context || X509_STORE_CTX_init(context.get(), store, signer, others) != 1)
        throw crypto_error(Errc::io, "cannot check a certificate");
    X509_VERIFY_PARAM* const options = X509_STORE_CTX_get0_param(context.get());
    X509_VERIFY_PARAM_set_auth_level(options, kLeastStrength);
    // A trusted certificate need not be its own issuer's. Dates are told, and do not count.
    require(
        X509_VERIFY_PARAM_set_flags(options, X509_V_FLAG_PARTIAL_CHAIN | X509_V_FLAG_NO_CHECK_TIME),
        "cannot check a certificate");
    if (X509_verify_cert(context.get()) == 1)
        return;
    const int why = X509_STORE_CTX_get_error(context.get());
    ERR_clear_error();
    throw Error(Errc::corrupt_data, "signature is by " + signed_by(signer).subject +
                                        ", who is not trusted (" +
                                        X509_verify_cert_error_string(why) + ")");
}

} // namespace

struct Signer::Parts {
    PrivateKey key;
    Certificate certificate;
    SignedBy facts;
};

Signer::Signer(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}
Signer::Signer(Signer&& other) noexcept = default;
Signer& Signer::operator=(Signer&& other) noexcept = default;
Signer::~Signer() = default;

Signer Signer::from_files(const std::string& key, const std::string& certificate) {
    start_openssl();
    PrivateKey opened = PrivateKey::from_file(key);
    Certificate found = certificate.empty() ? read_certificate(PrivateKey::certificate_beside(key))
                                            : certificate_in(certificate);
    const std::string where = certificate.empty() ? key : certificate;
    try {
        require_signer(found.get());
        if (EVP_PKEY_eq(X509_get0_pubkey(found.get()), opened.get()) != 1)
            throw crypto_error(Errc::bad_argument,
                               "is not the certificate of the private key " + key);
    } catch (const Error& e) {
        throw Error(e, "certificate " + where + ": " + e.what());
    }
    SignedBy facts = signed_by(found.get());
    return Signer(
        std::make_unique<Parts>(Parts{std::move(opened), std::move(found), std::move(facts)}));
}

SignedBy Signer::check_certificate(Bytes pem) {
    const Certificate certificate = read_certificate(pem);
    require_signer(certificate.get());
    return signed_by(certificate.get());
}

const SignedBy& Signer::facts() const noexcept {
    return parts_->facts;
}

std::vector<std::byte> Signer::sign(Bytes statement) const {
    constexpr unsigned flags = CMS_DETACHED | CMS_BINARY | CMS_PARTIAL | CMS_NOSMIMECAP;
    const Bio content = reader_of(statement);
    const Cms cms(CMS_sign(nullptr, nullptr, nullptr, nullptr, flags));
    if (!cms)
        throw crypto_error(Errc::io, "cannot begin a signature");
    EVP_PKEY* const key = parts_->key.get();
    CMS_SignerInfo* const info = CMS_add1_signer(cms.get(), parts_->certificate.get(), key,
                                                 digest_for(key), flags | CMS_KEY_PARAM);
    if (info == nullptr)
        throw crypto_error(Errc::io, "cannot sign");
    if (EVP_PKEY_get_base_id(key) == EVP_PKEY_RSA) {
        EVP_PKEY_CTX* const context = CMS_SignerInfo_get0_pkey_ctx(info);
        require(EVP_PKEY_CTX_set_rsa_padding(context, RSA_PKCS1_PSS_PADDING), "cannot use PSS");
        require(EVP_PKEY_CTX_set_rsa_pss_saltlen(context, RSA_PSS_SALTLEN_DIGEST),
                "cannot use PSS");
    }
    require(CMS_final(cms.get(), content.get(), nullptr, flags), "cannot sign");
    return encoded(cms);
}

void Trusted::Free::operator()(x509_st* certificate) const noexcept {
    X509_free(certificate);
}

void Trusted::add(Bytes pem) {
    if (certificates_.size() == kMaxTrusted)
        throw Error(Errc::bad_argument,
                    "more than " + std::to_string(kMaxTrusted) + " trusted certificates");
    Certificate certificate = read_certificate(pem);
    static_cast<void>(key_kind(X509_get0_pubkey(certificate.get())));
    certificates_.emplace_back(certificate.release());
}

SignedBy Trusted::verify(Bytes statement, Bytes signature) const {
    start_openssl();
    const Cms cms = decoded(signature);
    CMS_SignerInfo* const info = signer_of(cms.get());
    const Stack trusted(sk_X509_new_null());
    const Store store(X509_STORE_new());
    if (!trusted || !store)
        throw crypto_error(Errc::io, "cannot check a signature");
    for (const auto& certificate : certificates_) {
        require(X509_STORE_add_cert(store.get(), certificate.get()), "cannot check a signature");
        require(sk_X509_push(trusted.get(), certificate.get()) > 0 ? 1 : 0,
                "cannot check a signature");
    }
    const Bio content = reader_of(statement);
    constexpr unsigned flags = CMS_BINARY | CMS_DETACHED | CMS_NO_SIGNER_CERT_VERIFY;
    if (CMS_verify(cms.get(), trusted.get(), nullptr, content.get(), nullptr, flags) != 1)
        throw crypto_error(Errc::corrupt_data, "signature is not that of this statement");
    X509* signer = nullptr;
    CMS_SignerInfo_get0_algs(info, nullptr, &signer, nullptr, nullptr);
    if (signer == nullptr)
        throw Error(Errc::corrupt_data, "signature has no certificate of its signer");
    const OwnedStack others(CMS_get1_certs(cms.get()));
    require_chain(signer, others.get(), store.get());
    SignedBy found = signed_by(signer);
    try {
        require_signer(signer);
    } catch (const Error& e) {
        throw Error(Errc::corrupt_data, "signature is by " + found.subject +
                                            ", whose certificate is for other uses: " + e.what());
    }
    found.date = date_of(info);
    return found;
}

} // namespace gpustasis::seal
