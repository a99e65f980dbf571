// SPDX-License-Identifier: Apache-2.0
// Initialisation, version, errors.
#include "driver_emulator/driver/api.hpp"
#include "driver_emulator/driver/driver.hpp"
#include "driver_emulator/driver/error_text.hpp"
#include "driver_emulator/driver/proc_address.hpp"

#include <cstdint>

using namespace gpustasis::emulator;

namespace {

constexpr int kDefaultVersion = 13000;

/// As without a driver's kernel part: the library still has a version.
int library_version() {
    DaemonInfo info{};
    if (ask_info(info)) {
        return info.api_version;
    }
    return driver().info.api_version != 0 ? driver().info.api_version : kDefaultVersion;
}

Result find(const char* name, void** function, int version, QueryResult& status) {
    const int driver_version = library_version();
    if (name == nullptr || function == nullptr || version > driver_version) {
        return Result::invalid_value;
    }
    status = find_entry_point(name, version, driver_version, function);
    return Result::success;
}

} // namespace

GPUSTASIS_API(cuInit)(unsigned int flags) {
    return code(flags != 0 ? Result::invalid_value : initialise(driver()));
}

GPUSTASIS_API(cuDriverGetVersion)(int* version) {
    if (version == nullptr) {
        return code(Result::invalid_value);
    }
    *version = library_version();
    return code(Result::success);
}

GPUSTASIS_API(cuGetErrorName)(int error, const char** text) {
    if (text == nullptr) {
        return code(Result::invalid_value);
    }
    const ErrorText* found = find_error_text(error);
    *text = found == nullptr ? nullptr : found->name;
    return code(found == nullptr ? Result::invalid_value : Result::success);
}

GPUSTASIS_API(cuGetErrorString)(int error, const char** text) {
    if (text == nullptr) {
        return code(Result::invalid_value);
    }
    const ErrorText* found = find_error_text(error);
    *text = found == nullptr ? nullptr : found->description;
    return code(found == nullptr ? Result::invalid_value : Result::success);
}

GPUSTASIS_API(cuGetExportTable)(const void** table, const void*) {
    if (table != nullptr) {
        *table = nullptr;
    }
    return code(Result::not_found); // private interfaces of the real driver
}

GPUSTASIS_API(cuGetProcAddress)(const char* name, void** function, int version, std::uint64_t) {
    QueryResult status{};
    const Result result = find(name, function, version, status);
    const bool missing = result == Result::success && status != QueryResult::success;
    return code(missing ? Result::not_found : result);
}

GPUSTASIS_API(cuGetProcAddress_v2)
(const char* name, void** function, int version, std::uint64_t, QueryResult* status) {
    QueryResult found{};
    const Result result = find(name, function, version, found);
    if (result == Result::success && status != nullptr) {
        *status = found;
    }
    return code(result);
}
