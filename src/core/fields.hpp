// SPDX-License-Identifier: Apache-2.0
/// Lay out and take apart the fields of docs/format.md.
#pragma once

#include "core/bytes.hpp"
#include "core/error.hpp"
#include "core/image_info.hpp"

#include <algorithm>
#include <bit>
#include <concepts>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace gpustasis {

static_assert(std::endian::native == std::endian::little, "numbers are stored as they lie");

/// Appends fields to a buffer.
class FieldWriter {
public:
    /// Makes room for `size` bytes in advance.
    explicit FieldWriter(std::size_t size) { bytes_.reserve(size); }

    template <std::unsigned_integral T>
    void number(T value) {
        std::byte raw[sizeof value];
        std::memcpy(raw, &value, sizeof value);
        append(raw);
    }
    void append(Bytes bytes) { bytes_.insert(bytes_.end(), bytes.begin(), bytes.end()); }
    void reserved(std::size_t size) { bytes_.resize(bytes_.size() + size); }

    /// A textN field. The caller has checked that `text` fits (text_fits()).
    void text(std::string_view text, std::size_t width) {
        append(std::as_bytes(std::span(text)));
        reserved(width - text.size());
    }

    std::size_t size() const noexcept { return bytes_.size(); }
    Bytes bytes() const noexcept { return bytes_; }
    std::vector<std::byte> take() noexcept { return std::move(bytes_); }

private:
    std::vector<std::byte> bytes_;
};

/// True if `text` can be stored as a textN field of `width` bytes.
inline bool text_fits(std::string_view text, std::size_t width) noexcept {
    return text.size() < width && text.find('\0') == std::string_view::npos;
}

/// Takes fields off the front of a buffer. Throws Error: corrupt_data where the buffer is too
/// short, a reserved byte is set, or a text is not one.
class FieldReader {
public:
    explicit FieldReader(Bytes bytes) noexcept : rest_(bytes) {}

    std::size_t size() const noexcept { return rest_.size(); } ///< of what is left

    Bytes take(std::size_t size) {
        if (rest_.size() < size)
            throw Error(Errc::corrupt_data, "a field lies beyond the end");
        const Bytes front = rest_.first(size);
        rest_ = rest_.subspan(size);
        return front;
    }
    template <std::unsigned_integral T>
    T number() {
        T value;
        std::memcpy(&value, take(sizeof value).data(), sizeof value);
        return value;
    }
    Id id() {
        Id id;
        std::ranges::copy(take(id.size()), id.begin());
        return id;
    }
    void reserved(std::size_t size) {
        if (std::ranges::any_of(take(size), [](std::byte byte) { return byte != std::byte{0}; }))
            throw Error(Errc::corrupt_data, "a reserved byte is not zero");
    }
    std::string text(std::size_t width) {
        const Bytes field = take(width);
        const std::string_view whole(reinterpret_cast<const char*>(field.data()), width);
        const std::size_t size = whole.find('\0');
        if (size == std::string_view::npos ||
            whole.find_first_not_of('\0', size) != std::string_view::npos)
            throw Error(Errc::corrupt_data, "a text is not padded with zero bytes");
        return std::string(whole.substr(0, size));
    }

private:
    Bytes rest_;
};

} // namespace gpustasis
