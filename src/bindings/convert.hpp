// SPDX-License-Identifier: Apache-2.0
/// What Python passes to the core, as the core takes it, and back.
#pragma once

#include "core/bytes.hpp"
#include "core/error.hpp"
#include "core/image_info.hpp"
#include "core/image_reader.hpp"
#include "core/unique_fd.hpp"

#include <fcntl.h>
#include <pybind11/pybind11.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <optional>
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

/// Throws Error: io.
inline UniqueFd open_dir(const std::filesystem::path& path) {
    UniqueFd dir(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!dir)
        throw io_error(path.string(), errno);
    return dir;
}

/// The directory that the file `path` is in.
inline UniqueFd open_dir_of(const std::filesystem::path& path) {
    return open_dir(path.has_parent_path() ? path.parent_path() : ".");
}

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

/// As progress_of(), of what must not be left half done: Ctrl-C is not looked at, and what `tell` raises is dropped.
inline ImageReader::Progress progress_alone(const Tell& tell) {
    return [&tell](std::uint64_t done) {
        if (!tell)
            return;
        const pybind11::gil_scoped_acquire locked;
        try {
            (*tell)(done);
        } catch (pybind11::error_already_set& e) {
            e.discard_as_unraisable("progress of a restore");
        }
    };
}

} // namespace gpustasis::bindings
