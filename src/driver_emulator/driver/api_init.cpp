// Initialisation, version, errors.
#include "driver_emulator/driver/api.hpp"
#include "driver_emulator/driver/driver.hpp"
#include "driver_emulator/driver/error_text.hpp"

using namespace cudackpt::emulator;

CUDACKPT_API(cuInit)(unsigned int flags) {
    return code(flags != 0 ? Result::invalid_value : initialise(driver()));
}

CUDACKPT_API(cuDriverGetVersion)(int* version) {
    if (version == nullptr) {
        return code(Result::invalid_value);
    }
    DaemonInfo info{};
    if (!ask_info(info)) { // as without a driver's kernel part: the library still has a version
        info.api_version = driver().info.api_version != 0 ? driver().info.api_version : 13000;
    }
    *version = info.api_version;
    return code(Result::success);
}

CUDACKPT_API(cuGetErrorName)(int error, const char** text) {
    if (text == nullptr) {
        return code(Result::invalid_value);
    }
    const ErrorText* found = find_error_text(error);
    *text = found == nullptr ? nullptr : found->name;
    return code(found == nullptr ? Result::invalid_value : Result::success);
}

CUDACKPT_API(cuGetErrorString)(int error, const char** text) {
    if (text == nullptr) {
        return code(Result::invalid_value);
    }
    const ErrorText* found = find_error_text(error);
    *text = found == nullptr ? nullptr : found->description;
    return code(found == nullptr ? Result::invalid_value : Result::success);
}

CUDACKPT_API(cuGetExportTable)(const void** table, const void*) {
    if (table != nullptr) {
        *table = nullptr;
    }
    return code(Result::not_found); // private interfaces of the real driver
}
