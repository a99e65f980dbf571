// SPDX-License-Identifier: Apache-2.0
/// CUresult in words.
#pragma once

#include "cuda_plugin/driver_abi.hpp"

#include <string>

namespace gpustasis::driver {

/// "CUDA_ERROR_ILLEGAL_STATE (401)"; unknown values as "CUresult 999".
/// Source: enum cudaError_enum of cuda.h 13.0, those that the checkpoint calls return.
std::string result_name(Result result);

/// What `result` of `call` usually means here, as a sentence without full stop; may be empty.
std::string result_hint(Result result);

} // namespace gpustasis::driver
