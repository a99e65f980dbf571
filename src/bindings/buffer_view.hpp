// SPDX-License-Identifier: Apache-2.0
/// Borrow the bytes of any Python buffer without copying them.
#pragma once

#include "core/bytes.hpp"

#include <pybind11/pybind11.h>

#include <utility>

namespace gpustasis::bindings {

/// A C-contiguous view of `object`; holds the buffer until destroyed, so the bytes stay put while
/// the GIL is released. Make and destroy it with the GIL held. Raises BufferError in Python, also
/// if `flags` is PyBUF_WRITABLE and the buffer is read-only.
class BufferView {
public:
    explicit BufferView(const pybind11::buffer& object, int flags = PyBUF_SIMPLE) {
        if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0)
            throw pybind11::error_already_set();
    }
    BufferView(BufferView&& other) noexcept : view_(std::exchange(other.view_, {})) {}
    BufferView(const BufferView&) = delete;
    BufferView& operator=(const BufferView&) = delete;
    ~BufferView() { PyBuffer_Release(&view_); }

    Bytes bytes() const noexcept {
        return {static_cast<const std::byte*>(view_.buf), static_cast<std::size_t>(view_.len)};
    }
    /// Only of a view made with PyBUF_WRITABLE.
    MutBytes writable() const noexcept {
        return {static_cast<std::byte*>(view_.buf), static_cast<std::size_t>(view_.len)};
    }

private:
    Py_buffer view_{};
};

} // namespace gpustasis::bindings
