/// Make an image that needs no other one of an image that does.
#pragma once

#include "core/image_reader.hpp"
#include "core/image_writer.hpp"

#include <string>

namespace gpustasis {

/// Write a copy of `image`, whose sources are attached, to the file `name` in `dir_fd`: the same
/// but for parent and sources, which it has none of. Stored bytes are copied as they are, each
/// chunk checked before. Complete and durable on return, as write_image(); holds two chunks of memory
/// per thread, as many threads as there are processors if `threads` is 0.
/// Throws Error: corrupt_data if a chunk is damaged, io.
WriteResult flatten_image(const ImageReader& image, int dir_fd, const std::string& name,
                          unsigned threads, const ImageReader::Progress& progress = {});

} // namespace gpustasis
