// SPDX-License-Identifier: Apache-2.0
/// Entry points by name and by the CUDA version that a program was built for.
#pragma once

namespace gpustasis::emulator {

/// CUdriverProcAddressQueryResult.
enum class QueryResult : int { success = 0, symbol_not_found = 1, version_not_sufficient = 2 };

/// Finds what `name` (without a suffix, "cuMemAlloc") means for a program of CUDA `version`, among
/// what a driver of `driver_version` has; both as 13000 for 13.0. *function is null if nothing.
[[nodiscard]] QueryResult find_entry_point(const char* name, int version, int driver_version,
                                           void** function);

} // namespace gpustasis::emulator
