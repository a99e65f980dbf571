// SPDX-License-Identifier: Apache-2.0
#include "seal/certificate.hpp"

#include <openssl/core_names.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include <array>
#include <string_view>
#include <utility>

namespace gpustasis::seal {
namespace {

constexpr int kMinRsaBits = 2048;
constexpr int kMaxRsaBits = 16384;
constexpr std::size_t kDateSize = 32;

std::string text_of(const Bio& bio) {
    char* data = nullptr;
    const long size = BIO_get_mem_data(bio.get(), &data);
    return size > 0 ? std::string(data, static_cast<std::size_t>(size)) : std::string();
}

std::string subject_of(X509* certificate) {
    const Bio bio(BIO_new(BIO_s_mem()));
    if (!bio || X509_NAME_print_ex(bio.get(), X509_get_subject_name(certificate), 0,
                                   XN_FLAG_RFC2253 & ~ASN1_STRFLGS_ESC_MSB) < 0)
        throw crypto_error(Errc::io, "cannot read the subject of a certificate");
    return text_of(bio);
}

/// The next block of PEM text, which a certificate has to be; none: nullptr.
Certificate next_certificate(BIO* bio) {
    char* name = nullptr;
    char* header = nullptr;
    unsigned char* data = nullptr;
    long size = 0;
    if (PEM_read_bio(bio, &name, &header, &data, &size) != 1) {
        const unsigned long last = ERR_peek_last_error();
        if (ERR_GET_LIB(last) != ERR_LIB_PEM || ERR_GET_REASON(last) != PEM_R_NO_START_LINE)
            throw crypto_error(Errc::corrupt_data, "holds damaged PEM");
        ERR_clear_error();
        return nullptr;
    }
    const Allocated<char> owned_name(name);
    const Allocated<char> owned_header(header);
    const Allocated<unsigned char> owned_data(data);
    const std::string_view kind(name);
    if (kind != PEM_STRING_X509 && kind != PEM_STRING_X509_OLD)
        throw Error(Errc::corrupt_data,
                    "holds a block '" + std::string(kind) + "', which is no certificate for us");
    const unsigned char* at = data;
    Certificate found(d2i_X509(nullptr, &at, size));
    if (!found || at != data + size)
        throw crypto_error(Errc::corrupt_data, "holds a damaged certificate");
    return found;
}

} // namespace

Certificate read_certificate(Bytes pem) {
    start_openssl();
    if (pem.size() > kMaxPemSize)
        throw Error(Errc::corrupt_data, "is longer than " + std::to_string(kMaxPemSize) + " bytes");
    const Bio bio = reader_of(pem);
    Certificate found = next_certificate(bio.get());
    if (!found)
        throw Error(Errc::corrupt_data, "holds no certificate in PEM");
    if (next_certificate(bio.get()))
        throw Error(Errc::corrupt_data, "holds more than one certificate");
    return found;
}

std::string date_text(const ASN1_TIME* time) {
    std::tm parts{};
    std::array<char, kDateSize> text{};
    if (ASN1_TIME_to_tm(time, &parts) != 1 ||
        std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M:%S UTC", &parts) == 0)
        return "a date that cannot be read";
    return text.data();
}

CertificateFacts facts_of(X509* certificate, std::time_t now) {
    CertificateFacts facts{subject_of(certificate), key_kind(X509_get0_pubkey(certificate)), ""};
    const ASN1_TIME* const begin = X509_get0_notBefore(certificate);
    const ASN1_TIME* const end = X509_get0_notAfter(certificate);
    if (X509_cmp_time(end, &now) <= 0) // 0: a date that cannot be read
        facts.warning = "has expired: it was valid until " + date_text(end);
    else if (X509_cmp_time(begin, &now) >= 0)
        facts.warning = "is not valid yet: it is from " + date_text(begin);
    return facts;
}

std::string key_kind(EVP_PKEY* key) {
    if (key == nullptr)
        throw crypto_error(Errc::bad_argument, "a key of a kind that is not known");
    switch (EVP_PKEY_get_base_id(key)) {
    case EVP_PKEY_RSA: {
        const int bits = EVP_PKEY_get_bits(key);
        if (bits < kMinRsaBits || bits > kMaxRsaBits)
            throw Error(Errc::bad_argument,
                        "an RSA key of " + std::to_string(bits) + " bits; 2048 to 16384 are used");
        return "RSA " + std::to_string(bits);
    }
    case EVP_PKEY_EC: {
        std::array<char, kDateSize> group{};
        std::size_t size = 0;
        const int done = EVP_PKEY_get_utf8_string_param(key, OSSL_PKEY_PARAM_GROUP_NAME,
                                                        group.data(), group.size(), &size);
        const std::string name = done == 1 ? group.data() : "";
        for (const auto& [openssl, ours] :
             {std::pair{"prime256v1", "EC P-256"}, std::pair{"secp384r1", "EC P-384"},
              std::pair{"secp521r1", "EC P-521"}})
            if (name == openssl)
                return ours;
        throw Error(Errc::bad_argument,
                    "an EC key of the curve '" + name + "'; P-256, P-384 and P-521 are used");
    }
    case EVP_PKEY_ED25519: return "Ed25519";
    default: throw Error(Errc::bad_argument, "a key that is neither RSA, EC nor Ed25519");
    }
}

void require_recipient(X509* certificate) {
    EVP_PKEY* const key = X509_get0_pubkey(certificate);
    static_cast<void>(key_kind(key));                            // of the kinds that are used
    const std::uint32_t usage = X509_get_key_usage(certificate); // all bits: it names none
    const int id = EVP_PKEY_get_base_id(key);
    if (id == EVP_PKEY_ED25519)
        throw Error(Errc::bad_argument, "an Ed25519 key can sign only; take one of RSA or EC");
    if (id == EVP_PKEY_RSA && (usage & KU_KEY_ENCIPHERMENT) == 0)
        throw Error(Errc::bad_argument, "its key usage lacks keyEncipherment");
    if (id == EVP_PKEY_EC && (usage & KU_KEY_AGREEMENT) == 0)
        throw Error(Errc::bad_argument, "its key usage lacks keyAgreement");
}

} // namespace gpustasis::seal
