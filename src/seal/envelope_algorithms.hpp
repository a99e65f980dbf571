// SPDX-License-Identifier: Apache-2.0
/// Which algorithms an envelope may use: those of docs/format.md, and no others that OpenSSL knows.
#pragma once

#include "core/bytes.hpp"
#include "seal/openssl.hpp"

#include <cstddef>

namespace gpustasis::seal {

/// To be called before anything of an envelope is decrypted. `der`: `cms`, as OpenSSL encodes it. Returns how many
/// bytes are encrypted in it. Throws Error:
/// unsupported if the key is not wrapped with RSAES-OAEP (SHA-256, MGF1 with it) or ECDH (X9.63 with SHA-256,
/// AES-256 key wrap) for each recipient, or the content is not under AES-256-GCM with a nonce of 12 bytes and a tag
/// of 16; corrupt_data if there are more recipients than there can be, or `der` is no AuthEnvelopedData.
std::size_t require_known_algorithms(CMS_ContentInfo* cms, Bytes der);

} // namespace gpustasis::seal
