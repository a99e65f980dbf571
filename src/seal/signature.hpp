// SPDX-License-Identifier: Apache-2.0
/// Signatures of byte strings, such as a manifest.
#pragma once

#include "core/bytes.hpp"
#include "seal/private_key.hpp"

#include <cstddef>
#include <vector>

namespace gpustasis::seal {

inline constexpr std::size_t kMaxSignatureSize = 4096; ///< of the record

/// The signature record of docs/format.md over `message`: Ed25519, ECDSA, or RSA-PSS, as the key is.
/// Throws Error: io.
std::vector<std::byte> sign(Bytes message, const PrivateKey& key);

/// Which of `trusted`, PEM with a certificate or a public key each, has signed `message`. Dates of certificates
/// are not looked at: what was signed stays signed. Throws Error: corrupt_data if none has, or `record` is no
/// signature of just these bytes; bad_argument for a trusted one that may not sign; unsupported.
std::size_t verify_signature(Bytes message, Bytes record, const std::vector<Bytes>& trusted);

} // namespace gpustasis::seal
