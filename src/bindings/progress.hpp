// SPDX-License-Identifier: Apache-2.0
/// How long work tells a Python function how far it is.
#pragma once

#include "core/image_reader.hpp"

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>

namespace gpustasis::bindings {

using Tell = std::optional<pybind11::function>;

/// Calls `tell`, if there is one, with the GIL; lets Ctrl-C stop long work either way. Outlived by `tell`.
inline ImageReader::Progress progress_of(const Tell& tell) {
    return [&tell](std::uint64_t done) {
        const pybind11::gil_scoped_acquire locked;
        if (PyErr_CheckSignals() != 0)
            throw pybind11::error_already_set();
        if (tell)
            (*tell)(done);
    };
}

} // namespace gpustasis::bindings
