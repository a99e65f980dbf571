// SPDX-License-Identifier: Apache-2.0
/// Find all that is damaged in an image, not only the first.
#pragma once

#include "core/image_reader.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace gpustasis {

/// A chunk that cannot be used, by number, and why: a sentence that names image, number and address.
struct ChunkDamage {
    std::uint64_t number = 0;
    std::string what;
};

/// Read and check the chunks [begin, end) of `image` as ImageReader::verify() does, but only those
/// that lie in one of `sources` (0: the image file itself); go on after damage, failed reads among it.
/// Ascending by number. `threads` as in WriteOptions. Throws Error: bad_argument past the last chunk
/// or if a source is not attached.
std::vector<ChunkDamage> find_damage(const ImageReader& image, std::uint64_t begin,
                                     std::uint64_t end, const std::vector<std::uint16_t>& sources,
                                     unsigned threads);

/// Which chunks of `image` that lie in source `source` cannot be used, told without reading any:
/// `owner` is that source, opened, and `damaged` are all numbers of its own chunks that are damaged,
/// ascending. A chunk can be used if the owner has a sound one at that place with the same hashes.
std::vector<ChunkDamage> find_damaged_references(const ImageReader& image, std::uint16_t source,
                                                 const ImageReader& owner,
                                                 const std::vector<std::uint64_t>& damaged);

} // namespace gpustasis
