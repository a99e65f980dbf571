// SPDX-License-Identifier: Apache-2.0
/// Core values as plain Python ones and back.
#pragma once

#include "core/bytes.hpp"
#include "core/error.hpp"
#include "core/image_info.hpp"

#include <pybind11/pybind11.h>

#include <cstring>
#include <string>
#include <string_view>

namespace gpustasis::bindings {

inline pybind11::bytes to_python(Bytes bytes) {
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}
inline pybind11::bytes to_python(const Id& id) {
    return to_python(Bytes(id));
}

/// Throws Error: bad_argument unless `bytes` is 16 long.
inline Id to_id(const pybind11::bytes& bytes) {
    const auto view = static_cast<std::string_view>(bytes);
    Id id;
    if (view.size() != id.size())
        throw Error(Errc::bad_argument, "an id has 16 bytes, not " + std::to_string(view.size()));
    std::memcpy(id.data(), view.data(), id.size());
    return id;
}

/// For __eq__.
template <class T>
bool equal(const T& left, const T& right) {
    return left == right;
}

/// Text from the system need not be UTF-8: what is not becomes surrogates, as in file names.
inline pybind11::str to_python(const std::string& text) {
    PyObject* decoded =
        PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "surrogateescape");
    if (decoded == nullptr)
        throw pybind11::error_already_set();
    return pybind11::reinterpret_steal<pybind11::str>(decoded);
}
inline std::string to_text(const pybind11::str& text) {
    const auto encoded = pybind11::reinterpret_steal<pybind11::bytes>(
        PyUnicode_AsEncodedString(text.ptr(), "utf-8", "surrogateescape"));
    if (!encoded)
        throw pybind11::error_already_set();
    return std::string(static_cast<std::string_view>(encoded));
}

} // namespace gpustasis::bindings
