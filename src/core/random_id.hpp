// SPDX-License-Identifier: Apache-2.0
/// Names that nothing else has.
#pragma once

#include "core/image_info.hpp"

namespace gpustasis {

/// 128 random bits. Throws Error: io.
Id random_id();

} // namespace gpustasis
