// SPDX-License-Identifier: Apache-2.0
/// X.509 certificates of those who may open a sealed checkpoint.
#pragma once

#include "seal/openssl.hpp"

#include <ctime>
#include <string>

namespace gpustasis::seal {

inline constexpr std::size_t kMaxPemSize = 64U
                                           << 10; ///< bytes of a file with a certificate or a key

/// What there is to say of a certificate, for people.
struct CertificateFacts {
    std::string subject; ///< as RFC 2253 writes it
    std::string key;     ///< "RSA 3072", "EC P-256"
    std::string
        warning; ///< that it has expired or is not valid yet, with the date; "": it is valid
};

/// The one certificate in PEM text. Throws Error: corrupt_data if there is none, or anything else in PEM with it
/// (another certificate would be left out without a word).
Certificate read_certificate(Bytes pem);

/// "2026-01-31 12:00:00 UTC"; for people.
std::string date_text(const ASN1_TIME* time);

CertificateFacts facts_of(X509* certificate, std::time_t now);

/// "RSA 3072", "EC P-256", "Ed25519". Throws Error: bad_argument for other kinds, RSA below 2048 or above
/// 16384 bits, and other curves.
std::string key_kind(EVP_PKEY* key);

/// Throws Error: bad_argument unless data keys can be wrapped for it: RSA with key encipherment or EC with
/// key agreement, where the certificate names its uses.
void require_recipient(X509* certificate);

} // namespace gpustasis::seal
