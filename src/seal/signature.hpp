// SPDX-License-Identifier: Apache-2.0
/// Signatures of statements: CMS SignedData, detached.
#pragma once

#include "core/bytes.hpp"

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

struct x509_st;

namespace gpustasis::seal {

inline constexpr std::size_t kMaxSignatureSize = 256U << 10; ///< of the file
inline constexpr std::size_t kMaxTrusted = 256;

/// Who has signed, for people.
struct SignedBy {
    std::string subject; ///< as RFC 2253 writes it
    std::string key;     ///< "EC P-256"
    std::string date;    ///< by the signer's own clock; "": it does not say
    std::string warning; ///< that the certificate has expired or is not valid yet; "": it is valid
};

/// A private key and its certificate.
class Signer {
public:
    /// `key`: as PrivateKey::from_file(). `certificate`: the path of one certificate in PEM; empty: it stands in
    /// the file of the key. Throws Error as that does; bad_argument for a certificate of another key, or one
    /// that may not sign.
    static Signer from_files(const std::string& key, const std::string& certificate);
    /// Checks a certificate (PEM) without its key. Throws Error: corrupt_data, bad_argument.
    static SignedBy check_certificate(Bytes pem);

    Signer(Signer&& other) noexcept;
    Signer& operator=(Signer&& other) noexcept;
    ~Signer();

    const SignedBy& facts() const noexcept; ///< without a date
    /// The signature file of docs/format.md. Throws Error: io.
    std::vector<std::byte> sign(Bytes statement) const;

private:
    struct Parts;
    explicit Signer(std::unique_ptr<Parts> parts);
    std::unique_ptr<Parts> parts_;
};

/// Those whose signatures are believed: certificates of signers, or of those who have issued theirs.
class Trusted {
public:
    /// One certificate in PEM. Throws Error: corrupt_data; bad_argument for a key of another kind, or the 257th.
    void add(Bytes pem);
    bool empty() const noexcept { return certificates_.empty(); }

    /// Throws Error: corrupt_data unless `signature` is one of just these bytes, by one who is trusted, with a
    /// certificate that may sign. Dates do not count: what was signed stays signed.
    SignedBy verify(Bytes statement, Bytes signature) const;

private:
    struct Free {
        void operator()(x509_st* certificate) const noexcept;
    };
    std::vector<std::unique_ptr<x509_st, Free>> certificates_;
};

} // namespace gpustasis::seal
