// SPDX-License-Identifier: Apache-2.0
#include "bindings/bind.hpp"
#include "core/error.hpp"

#include <exception>
#include <string>

namespace py = pybind11;

namespace gpustasis::bindings {

namespace {

/// As py::set_error, of a message that may name a path which is no UTF-8: as Python keeps one.
void set_message(py::handle type, const char* message) {
    const auto text = py::reinterpret_steal<py::object>(PyUnicode_DecodeFSDefault(message));
    if (text)
        PyErr_SetObject(type.ptr(), text.ptr());
}

} // namespace

/// The single place where a core error becomes a Python exception.
void bind_errors(py::module_& m) {
    struct Types {
        py::object corrupt;
        py::object unsupported;
    };
    PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<Types> types;
    types.call_once_and_store_result([&] {
        const auto make = [&](const char* name, PyObject* base, const char* doc) {
            const auto full = "gpustasis._core." + std::string(name);
            auto type = py::reinterpret_steal<py::object>(
                PyErr_NewExceptionWithDoc(full.c_str(), doc, base, nullptr));
            if (!type)
                throw py::error_already_set();
            m.attr(name) = type;
            return type;
        };
        return Types{make("CorruptDataError", PyExc_ValueError,
                          "Stored bytes fail a checksum, a bound or a decoder."),
                     make("UnsupportedDataError", PyExc_NotImplementedError,
                          "Well formed, but needs a feature that this build does not have.")};
    });

    // NOLINTNEXTLINE(performance-unnecessary-value-param): pybind11's signature
    py::register_exception_translator([](std::exception_ptr p) {
        try {
            if (p)
                std::rethrow_exception(p);
        } catch (const Error& e) {
            switch (e.code()) {
            case Errc::bad_argument: return set_message(PyExc_ValueError, e.what());
            case Errc::corrupt_data: return set_message(types.get_stored().corrupt, e.what());
            case Errc::unsupported: return set_message(types.get_stored().unsupported, e.what());
            case Errc::io: return set_message(PyExc_OSError, e.what());
            case Errc::gone: return set_message(PyExc_ProcessLookupError, e.what());
            }
        }
    });
}

} // namespace gpustasis::bindings
