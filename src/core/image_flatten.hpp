// SPDX-License-Identifier: Apache-2.0
/// Make an image that needs no other one of an image that does.
#pragma once

#include "core/bytes.hpp"
#include "core/image_reader.hpp"
#include "core/image_writer.hpp"

#include <cstdint>
#include <memory>
#include <string>

namespace gpustasis {

/// The flat copy of an image: the same but for parent and sources, which it has none of. Stored bytes
/// are copied as they are; where each one goes follows from the index of the image, so they may come
/// in any order.
class FlatImageWriter {
public:
    /// Writes the file `name` in `dir_fd`. `image`: only its index is used, and not after this.
    /// Throws Error: io.
    FlatImageWriter(const ImageReader& image, int dir_fd, const std::string& name);
    FlatImageWriter(FlatImageWriter&&) noexcept;
    ~FlatImageWriter(); ///< without finish(), nothing is left

    /// Put the stored bytes of chunk `number`, which the caller has checked. By several threads at
    /// once, each chunk once, but for those of zeros. Throws Error: bad_argument if it was put
    /// before or has another size, io.
    void put(std::uint64_t number, Bytes stored);

    /// Complete and durable on return, as write_image(). Once all threads are done.
    /// Throws Error: bad_argument if a chunk was not put, io.
    WriteResult finish();

private:
    struct State;
    std::unique_ptr<State> state_;
};

/// Write the flat copy of `image`, whose sources are attached, to the file `name` in `dir_fd`, each chunk
/// checked before. Complete and durable on return, as write_image(); holds two chunks of memory
/// per thread, as many threads as there are processors if `threads` is 0.
/// Throws Error: corrupt_data if a chunk is damaged, io.
WriteResult flatten_image(const ImageReader& image, int dir_fd, const std::string& name,
                          unsigned threads, const ImageReader::Progress& progress = {});

} // namespace gpustasis
