// SPDX-License-Identifier: Apache-2.0
/// Where a reader finds the bytes of an image: a file, or what looks like one.
#pragma once

#include "core/bytes.hpp"

#include <cstddef>
#include <cstdint>

namespace gpustasis {

/// Read by several threads at once.
class ImageInput {
public:
    ImageInput() = default;
    ImageInput(const ImageInput&) = delete;
    ImageInput& operator=(const ImageInput&) = delete;
    virtual ~ImageInput() = default;

    /// Bytes of the whole image.
    virtual std::uint64_t size() const noexcept = 0;

    /// The `size` bytes at `offset` of the image, in the front of `buffer`, which holds that many at
    /// least. If it is aligned, more of it may be written, up to a multiple of kDirectAlignment.
    /// Throws Error: io, corrupt_data if the image ends before; unsupported if direct I/O was asked for
    /// by name and these bytes cannot be read so.
    virtual Bytes read(std::uint64_t offset, std::size_t size, MutBytes buffer) const = 0;

    /// Whether a read waits for a device, and not for a processor.
    virtual bool is_direct() const noexcept = 0;
};

} // namespace gpustasis
