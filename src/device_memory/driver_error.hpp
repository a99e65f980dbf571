// SPDX-License-Identifier: Apache-2.0
/// CUresult in words, and as an exception.
#pragma once

#include "core/error.hpp"
#include "device_memory/driver_abi.hpp"

#include <string>

namespace gpustasis {

/// The driver refused a call. what(): call, pid, CUresult name and text.
class DriverError : public Error {
public:
    DriverError(driver::Result result, const std::string& what)
        : Error(Errc::io, what), result_(result) {}
    driver::Result result() const noexcept { return result_; }

private:
    driver::Result result_;
};

namespace driver {

/// "CUDA_ERROR_ILLEGAL_STATE (401)"; unknown values as "CUresult 999".
/// Source: enum cudaError_enum of cuda.h 13.0, those that the checkpoint calls return.
std::string result_name(Result result);

/// What `result` of `call` usually means here, as a sentence without full stop; may be empty.
std::string result_hint(Result result);

/// Throws DriverError unless `result` is success. `of`: behind the name of the call, as " for pid 7".
void require(Result result, const char* call, const std::string& of = "");

} // namespace driver
} // namespace gpustasis
