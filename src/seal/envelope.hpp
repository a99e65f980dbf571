// SPDX-License-Identifier: Apache-2.0
/// The data key of a sealed checkpoint, wrapped for those who may open it.
#pragma once

#include "core/bytes.hpp"
#include "seal/data_key.hpp"
#include "seal/private_key.hpp"

#include <cstddef>
#include <string>
#include <vector>

namespace gpustasis::seal {

inline constexpr std::size_t kMaxEnvelopeSize = 1U << 20;
inline constexpr std::size_t kMaxRecipients = 256;

/// Whom a data key is wrapped for, for people.
struct Recipient {
    std::string subject;
    std::string key;     ///< "RSA 3072"
    std::string warning; ///< "": none
};

/// What a certificate in PEM says, once it is found to be fit for a recipient. Throws Error: corrupt_data,
/// bad_argument.
Recipient check_recipient(Bytes pem);

/// The envelope file of docs/format.md: CMS AuthEnvelopedData with the key record in it, and a code over
/// that. `pems`: a certificate each. Throws Error: bad_argument without any or for one that is not fit;
/// corrupt_data, io.
std::vector<std::byte> wrap(const DataKey& key, const std::vector<Bytes>& pems);

/// The key in an envelope file. Throws Error: corrupt_data for what is damaged or changed, with the words "for
/// another key" where no recipient fits; bad_argument for a key that opens no envelopes; unsupported.
DataKey unwrap(Bytes envelope, const PrivateKey& key);

/// The CMS part of an envelope file, which another program can open. Throws Error: corrupt_data; unsupported for
/// algorithms that docs/format.md does not have.
Bytes cms_part(Bytes envelope);

/// How many checkpoints the one of this envelope is built on, for who has no key: as the size of what is encrypted
/// tells. It is not known to be true before unwrap(). Throws Error as cms_part().
std::size_t ancestors_of(Bytes envelope);

/// Of the libcrypto that is linked in: "OpenSSL 3.0.19 27 Jan 2026".
std::string openssl_version();

/// Bytes to read a key record of `envelope` into, so that a longer one is none: an envelope is longer than what it
/// holds.
std::size_t room_for_record(Bytes envelope) noexcept;

/// The key in a key record that another program took out of `envelope`. Throws Error as unwrap().
DataKey open_record(Bytes envelope, Bytes record);

/// Throws Error: corrupt_data unless `envelope` is whole, and was made with `key`. Whether a recipient's
/// private key opens it is not known without that.
void check_envelope(const DataKey& key, Bytes envelope);

} // namespace gpustasis::seal
