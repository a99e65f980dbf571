// SPDX-License-Identifier: Apache-2.0
/// The data key of a sealed checkpoint in a directory, as the configuration opens it.
#pragma once

#include "seal/data_key.hpp"

#include <string>

namespace gpustasis {

/// Whether a sealed checkpoint is in `dir`, or a part of one. Throws Error: io.
bool holds_sealed(int dir);

/// By `source`, the key `private_key`; `what`, for a message, is that checkpoint. Throws Error: bad_argument if
/// `source` is empty; io; as seal::open_envelope().
seal::DataKey open_sealed_key(int dir, const std::string& source, const std::string& what);

} // namespace gpustasis
