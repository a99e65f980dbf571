// SPDX-License-Identifier: Apache-2.0
#include "bindings/bind.hpp"
#include "core/error.hpp"
#include "seal/errors.hpp"

#include <cerrno>
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

/// Raise this kind of OSError. str() of it is the message and no more, as that names the errno in
/// words: so only `errno` is set.
void set_os_error(const py::object& type, const Error& error) {
    const auto text = py::reinterpret_steal<py::object>(PyUnicode_DecodeFSDefault(error.what()));
    const auto number = py::reinterpret_steal<py::object>(
        error.error_number() == 0 ? Py_NewRef(Py_None) : PyLong_FromLong(error.error_number()));
    if (!text || !number)
        return;
    const auto exception =
        py::reinterpret_steal<py::object>(PyObject_CallOneArg(type.ptr(), text.ptr()));
    if (exception && PyObject_SetAttrString(exception.ptr(), "errno", number.ptr()) == 0)
        PyErr_SetObject(type.ptr(), exception.ptr());
}

/// The OSError of an errno, by its class (FileNotFoundError, PermissionError, …). str() of it is
/// `message` and no more, as that names the errno in words: so only `errno` is set.
void set_os_error(const Error& error) {
    if (error.error_number() == 0)
        return set_message(PyExc_OSError, error.what());
    const auto like = py::reinterpret_steal<py::object>(
        PyObject_CallFunction(PyExc_OSError, "is", error.error_number(), ""));
    if (like)
        set_os_error(py::type::of(like), error);
}

/// What the kernel calls a process that is gone.
Error gone_error(const Error& error) {
    return {error.code(), error.what(), ESRCH};
}

} // namespace

/// The single place where a core error becomes a Python exception.
void bind_errors(py::module_& m) {
    struct Types {
        py::object corrupt;
        py::object unsupported;
        py::object key_memory;
        py::object output;
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
        return Types{
            make("CorruptDataError", PyExc_ValueError,
                 "Stored bytes fail a checksum, a bound or a decoder."),
            make("UnsupportedDataError", PyExc_NotImplementedError,
                 "Well formed, but needs a feature that this build does not have."),
            make("KeyMemoryError", PyExc_OSError, "Memory for keys cannot be had or locked."),
            make("OutputError", PyExc_OSError,
                 "What is made cannot be written; what it is made of is not to blame.")};
    });

    // NOLINTNEXTLINE(performance-unnecessary-value-param): pybind11's signature
    py::register_exception_translator([](std::exception_ptr p) {
        try {
            if (p)
                std::rethrow_exception(p);
        } catch (const seal::KeyMemoryError& e) {
            return set_os_error(types.get_stored().key_memory, e);
        } catch (const seal::OutputError& e) {
            return set_os_error(types.get_stored().output, e);
        } catch (const Error& e) {
            switch (e.code()) {
            case Errc::bad_argument: return set_message(PyExc_ValueError, e.what());
            case Errc::corrupt_data: return set_message(types.get_stored().corrupt, e.what());
            case Errc::unsupported: return set_message(types.get_stored().unsupported, e.what());
            case Errc::io: return set_os_error(e);
            case Errc::gone: return set_os_error(gone_error(e));
            }
        }
    });
}

} // namespace gpustasis::bindings
