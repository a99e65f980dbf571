// SPDX-License-Identifier: Apache-2.0
/// Names for runs of bytes that somebody else owns.
#pragma once

#include <cstddef>
#include <span>

namespace gpustasis {

using Bytes = std::span<const std::byte>;
using MutBytes = std::span<std::byte>;

} // namespace gpustasis
