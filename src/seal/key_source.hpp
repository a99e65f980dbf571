// SPDX-License-Identifier: Apache-2.0
/// What opens an envelope, by one name: a private key in a file, or a key record on a descriptor.
#pragma once

#include "core/bytes.hpp"
#include "seal/data_key.hpp"

#include <string>
#include <string_view>

namespace gpustasis::seal {

/// The data key in the key record that another program took out of `envelope`, read from `fd` to its end, or to
/// where it would have to wait. Throws Error: io; as open_record().
DataKey read_record(Bytes envelope, int fd);

/// By `source`: "fd:<number>", a descriptor of this process with the key record, which is
/// closed and holds it already; kToken: unsupported; else the path
/// of a private key in PEM. Throws Error: bad_argument; as read_record(), PrivateKey::from_file() and unwrap().
DataKey open_envelope(Bytes envelope, const std::string& source);

/// What a PKCS #11 URI begins with. No module of a token is loaded here: another program has to use it.
inline constexpr std::string_view kToken = "pkcs11:";

/// The number in "fd:<number>"; -1: it is a path.
int key_descriptor(const std::string& source) noexcept;

} // namespace gpustasis::seal
