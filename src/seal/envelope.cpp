// SPDX-License-Identifier: Apache-2.0
#include "seal/envelope.hpp"

#include "seal/certificate.hpp"
#include "seal/envelope_algorithms.hpp"
#include "seal/openssl.hpp"

#include <openssl/crypto.h>
#include <openssl/ec.h>
#include <openssl/err.h>
#include <openssl/rsa.h>

#include <algorithm>
#include <array>
#include <ctime>
#include <utility>

namespace gpustasis::seal {
namespace {

constexpr std::size_t kCodeSize = 32;
constexpr std::string_view kEnvelopeLabel = "gpustasis envelope";
using Code = std::array<std::byte, kCodeSize>;

/// HMAC-SHA256: who sees another recipient's name changed, or one added, knows that it was not by somebody
/// with the data key.
Code code_of(const DataKey& key, Bytes cms) {
    const Secret subkey = key.subkey(kEnvelopeLabel, {});
    Code code{};
    std::size_t size = 0;
    if (EVP_Q_mac(nullptr, "HMAC", nullptr, "SHA256", nullptr, subkey.bytes().data(), subkey.size(),
                  raw(cms), cms.size(), raw(MutBytes(code)), code.size(), &size) == nullptr ||
        size != code.size())
        throw crypto_error(Errc::io, "cannot make the code of an envelope");
    return code;
}

/// How the key is wrapped for a recipient: RSA with OAEP, EC with a key derivation, both by SHA-256.
void choose_algorithms(CMS_RecipientInfo* info) {
    EVP_PKEY_CTX* const context = CMS_RecipientInfo_get0_pkey_ctx(info);
    if (context == nullptr)
        throw crypto_error(Errc::io, "cannot choose how to wrap a key");
    if (CMS_RecipientInfo_type(info) == CMS_RECIPINFO_TRANS) {
        require(EVP_PKEY_CTX_set_rsa_padding(context, RSA_PKCS1_OAEP_PADDING), "cannot use OAEP");
        require(EVP_PKEY_CTX_set_rsa_oaep_md(context, EVP_sha256()), "cannot use OAEP");
        require(EVP_PKEY_CTX_set_rsa_mgf1_md(context, EVP_sha256()), "cannot use OAEP");
    } else {
        require(EVP_PKEY_CTX_set_ecdh_kdf_md(context, EVP_sha256()), "cannot use ECDH");
    }
}

std::vector<std::byte> encoded(const Cms& cms) {
    const int size = i2d_CMS_ContentInfo(cms.get(), nullptr);
    if (size <= 0)
        throw crypto_error(Errc::io, "cannot encode an envelope");
    std::vector<std::byte> bytes(static_cast<std::size_t>(size));
    unsigned char* at = raw(MutBytes(bytes));
    if (i2d_CMS_ContentInfo(cms.get(), &at) != size)
        throw crypto_error(Errc::io, "cannot encode an envelope");
    return bytes;
}

Bytes before_code(Bytes envelope) {
    if (envelope.size() <= kCodeSize || envelope.size() > kMaxEnvelopeSize)
        throw Error(Errc::corrupt_data,
                    "envelope has " + std::to_string(envelope.size()) + " bytes, and is none");
    return envelope.first(envelope.size() - kCodeSize);
}

/// Only what docs/format.md lets an envelope be. content_size: of what is encrypted in it.
struct Decoded {
    Cms cms;
    std::size_t content_size;
};

Decoded decoded(Bytes bytes) {
    const unsigned char* at = raw(bytes);
    Cms cms(d2i_CMS_ContentInfo(nullptr, &at, static_cast<long>(bytes.size())));
    if (!cms || at != raw(bytes) + bytes.size())
        throw crypto_error(Errc::corrupt_data, "envelope is damaged: no CMS");
    if (OBJ_obj2nid(CMS_get0_type(cms.get())) != NID_id_smime_ct_authEnvelopedData)
        throw crypto_error(Errc::corrupt_data, "envelope is damaged: no CMS AuthEnvelopedData");
    // What is checked is what OpenSSL has understood, and another program would.
    const std::vector<std::byte> der = encoded(cms);
    if (!std::ranges::equal(der, bytes))
        throw Error(Errc::corrupt_data, "envelope is damaged: no DER");
    const std::size_t content_size = require_known_algorithms(cms.get(), der);
    return {std::move(cms), content_size};
}

bool open_transported(CMS_ContentInfo* cms, CMS_RecipientInfo* info, EVP_PKEY* key) {
    require(EVP_PKEY_up_ref(key), "cannot use the private key");
    require(CMS_RecipientInfo_set0_pkey(info, key), "cannot use the private key"); // takes that one
    return CMS_RecipientInfo_decrypt(cms, info) == 1;
}

bool open_agreed(CMS_ContentInfo* cms, CMS_RecipientInfo* info, EVP_PKEY* key) {
    STACK_OF(CMS_RecipientEncryptedKey)* const keys = CMS_RecipientInfo_kari_get0_reks(info);
    const int count = sk_CMS_RecipientEncryptedKey_num(keys);
    if (count > static_cast<int>(kMaxRecipients))
        throw Error(Errc::corrupt_data, "envelope is damaged: too many keys");
    bool done = false;
    for (int number = 0; number < count && !done; ++number) {
        if (CMS_RecipientInfo_kari_set0_pkey(info, key) != 1)
            continue; // another curve
        done = CMS_RecipientInfo_kari_decrypt(
                   cms, info, sk_CMS_RecipientEncryptedKey_value(keys, number)) == 1;
        CMS_RecipientInfo_kari_set0_pkey(info, nullptr);
    }
    return done;
}

bool open_any(CMS_ContentInfo* cms, EVP_PKEY* key) {
    STACK_OF(CMS_RecipientInfo)* const infos = CMS_get0_RecipientInfos(cms);
    const int count = sk_CMS_RecipientInfo_num(infos);
    const bool rsa = EVP_PKEY_get_base_id(key) == EVP_PKEY_RSA;
    for (int number = 0; number < count; ++number) {
        CMS_RecipientInfo* const info = sk_CMS_RecipientInfo_value(infos, number);
        const int type = CMS_RecipientInfo_type(info);
        if ((rsa && type == CMS_RECIPINFO_TRANS && open_transported(cms, info, key)) ||
            (!rsa && type == CMS_RECIPINFO_AGREE && open_agreed(cms, info, key)))
            return true;
        ERR_clear_error();
    }
    return false;
}

/// What goes through `cms`. CMS_final() and CMS_decrypt() would copy it through buffers on the stack and
/// the heap that nobody wipes.
Bio content_of(CMS_ContentInfo* cms) {
    Bio content(CMS_dataInit(cms, nullptr));
    if (!content)
        throw crypto_error(Errc::corrupt_data, "envelope is damaged: no content");
    return content;
}

void encrypt_record(CMS_ContentInfo* cms, Bytes record) {
    const Bio content = content_of(cms);
    const int size = static_cast<int>(record.size());
    if (BIO_write(content.get(), record.data(), size) != size || BIO_flush(content.get()) != 1)
        throw crypto_error(Errc::io, "cannot wrap the data key");
    require(CMS_dataFinal(cms, content.get()), "cannot wrap the data key");
}

DataKey decrypt_record(CMS_ContentInfo* cms, Bytes envelope) {
    const Bio content = content_of(cms);
    Secret record(room_for_record(envelope));
    std::size_t size = 0;
    int got = 1;
    while (size < record.size() && got > 0) {
        got = BIO_read(content.get(), record.bytes().data() + size,
                       static_cast<int>(record.size() - size));
        size += static_cast<std::size_t>(std::max(got, 0));
    }
    // At the end only, the tag was checked.
    if (got != 0 || BIO_get_cipher_status(content.get()) != 1)
        throw crypto_error(Errc::corrupt_data, "envelope is damaged, or for another key");
    if (size < DataKey::kRecordSize)
        throw Error(Errc::corrupt_data, "envelope holds no key record");
    return open_record(envelope, record.bytes().first(size));
}

} // namespace

Recipient check_recipient(Bytes pem) {
    const Certificate certificate = read_certificate(pem);
    require_recipient(certificate.get());
    CertificateFacts facts = facts_of(certificate.get(), std::time(nullptr));
    return {std::move(facts.subject), std::move(facts.key), std::move(facts.warning)};
}

std::vector<std::byte> wrap(const DataKey& key, const std::vector<Bytes>& pems) {
    start_openssl();
    if (pems.empty() || pems.size() > kMaxRecipients)
        throw Error(Errc::bad_argument, std::to_string(pems.size()) + " recipients; 1 to " +
                                            std::to_string(kMaxRecipients) + " can be named");
    const Secret record = key.record();
    constexpr unsigned flags = CMS_BINARY | CMS_PARTIAL;
    const Cms cms(CMS_encrypt(nullptr, nullptr, EVP_aes_256_gcm(), flags));
    if (!cms)
        throw crypto_error(Errc::io, "cannot begin an envelope");
    for (const Bytes pem : pems) {
        const Certificate certificate = read_certificate(pem);
        require_recipient(certificate.get());
        CMS_RecipientInfo* const info =
            CMS_add1_recipient_cert(cms.get(), certificate.get(), CMS_KEY_PARAM);
        if (info == nullptr)
            throw crypto_error(Errc::io, "cannot add a recipient");
        choose_algorithms(info);
    }
    encrypt_record(cms.get(), record.bytes());
    std::vector<std::byte> bytes = encoded(cms);
    const Code code = code_of(key, bytes);
    bytes.insert(bytes.end(), code.begin(), code.end());
    if (bytes.size() > kMaxEnvelopeSize)
        throw Error(Errc::bad_argument, "an envelope for these recipients is too long");
    return bytes;
}

Bytes cms_part(Bytes envelope) {
    start_openssl();
    const Bytes cms = before_code(envelope);
    static_cast<void>(decoded(cms)); // the program that opens it may not look so closely
    return cms;
}

std::size_t ancestors_of(Bytes envelope) {
    start_openssl();
    const std::size_t size = decoded(before_code(envelope)).content_size;
    if (size < DataKey::kRecordSize || size > DataKey::kMaxRecordSize ||
        (size - DataKey::kRecordSize) % DataKey::kAncestorSize != 0)
        throw Error(Errc::corrupt_data,
                    "envelope holds " + std::to_string(size) + " bytes, which are no key record");
    return (size - DataKey::kRecordSize) / DataKey::kAncestorSize;
}

std::string openssl_version() {
    return OpenSSL_version(OPENSSL_VERSION);
}

std::size_t room_for_record(Bytes envelope) noexcept {
    return std::clamp(envelope.size(), DataKey::kRecordSize, DataKey::kMaxRecordSize) + 1;
}

DataKey open_record(Bytes envelope, Bytes record) {
    DataKey key = DataKey::from_record(record);
    const Code code = code_of(key, before_code(envelope));
    if (CRYPTO_memcmp(code.data(), envelope.last(kCodeSize).data(), kCodeSize) != 0)
        throw Error(Errc::corrupt_data, "envelope was changed, or belongs to another data key");
    return key;
}

DataKey unwrap(Bytes envelope, const PrivateKey& key) {
    start_openssl();
    const int kind = EVP_PKEY_get_base_id(key.get());
    if (kind != EVP_PKEY_RSA && kind != EVP_PKEY_EC)
        throw Error(Errc::bad_argument, "a key of " + key.kind() + " opens no envelopes");
    const Cms cms = decoded(before_code(envelope)).cms;
    if (!open_any(cms.get(), key.get()))
        throw crypto_error(Errc::corrupt_data,
                           "envelope is for another key than this of " + key.kind());
    return decrypt_record(cms.get(), envelope);
}

void check_envelope(const DataKey& key, Bytes envelope) {
    start_openssl();
    static_cast<void>(decoded(before_code(envelope)));
    const Secret record = key.record();
    if (open_record(envelope, record.bytes()).sealed_id() != key.sealed_id())
        throw Error(Errc::corrupt_data, "envelope is for another sealed checkpoint");
}

} // namespace gpustasis::seal
