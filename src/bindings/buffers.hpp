// SPDX-License-Identifier: Apache-2.0
/// Borrow the bytes of any Python buffer without copying them.
#pragma once

#include "core/bytes.hpp"
#include "core/memory_port.hpp"

#include <pybind11/pybind11.h>

#include <cstdint>
#include <map>
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

/// Reads from buffers that stand for memory at given addresses.
class MemoryBuffers : public MemorySource {
public:
    /// With the GIL held. Throws Error: bad_argument if two begin at the same address.
    void add(std::uint64_t address, BufferView view);

    /// Throws Error: bad_argument where there is no buffer.
    void read(std::uint64_t address, MutBytes out) override;

private:
    std::map<std::uint64_t, BufferView> runs_;
};

} // namespace gpustasis::bindings
