// SPDX-License-Identifier: Apache-2.0
#include "bindings/bind.hpp"
#include "bindings/buffers.hpp"
#include "bindings/convert.hpp"
#include "core/chunk_codec.hpp"
#include "core/hash.hpp"

#include <algorithm>
#include <vector>

namespace py = pybind11;

namespace gpustasis::bindings {
namespace {

py::tuple encode(const py::buffer& plain, bool compress, int lz4_acceleration) {
    const BufferView in(plain);
    std::vector<std::byte> scratch(
        compress ? std::min<std::size_t>(in.bytes().size(), kMaxChunkSize) : 0);
    EncodedChunk chunk;
    {
        const py::gil_scoped_release unlocked;
        chunk = encode_chunk(in.bytes(), compress, lz4_acceleration, scratch);
    }
    return py::make_tuple(chunk.encoding, to_python(chunk.stored));
}

void decode(Encoding encoding, const py::buffer& stored, const py::buffer& plain) {
    const BufferView in(stored);
    const BufferView out(plain, PyBUF_WRITABLE);
    const py::gil_scoped_release unlocked;
    decode_chunk(encoding, in.bytes(), out.writable());
}

py::bytes hash128_of(const py::buffer& data) {
    const BufferView in(data);
    Id id;
    {
        const py::gil_scoped_release unlocked;
        id = hash128(in.bytes());
    }
    return to_python(id);
}

std::uint64_t hash64_of(const py::buffer& data) {
    const BufferView in(data);
    const py::gil_scoped_release unlocked;
    return hash64(in.bytes());
}

} // namespace

void bind_codec(py::module_& m) {
    py::enum_<Encoding>(m, "Encoding", "How a chunk is stored; see docs/format.md.")
        .value("ZERO", Encoding::zero)
        .value("LZ4", Encoding::lz4)
        .value("RAW", Encoding::raw);

    m.attr("MIN_CHUNK_SIZE") = kMinChunkSize;
    m.attr("MAX_CHUNK_SIZE") = kMaxChunkSize;
    m.attr("DEFAULT_CHUNK_SIZE") = kDefaultChunkSize;

    m.def("encode_chunk", &encode, py::arg("plain"), py::arg("compress") = true,
          py::arg("lz4_acceleration") = 1,
          "Encode 1..MAX_CHUNK_SIZE bytes. Returns (encoding chosen, stored bytes).\n"
          "Raises ValueError if a size or number is out of range. Releases the GIL.");
    m.def("decode_chunk", &decode, py::arg("encoding"), py::arg("stored"), py::arg("plain"),
          "Decode `stored` into the writable buffer `plain`, filling it exactly.\n"
          "Raises CorruptDataError if it does not decode to that size. Releases the GIL.");
    m.def("hash128", &hash128_of, py::arg("data"),
          "XXH3-128 of a buffer, canonical: 16 bytes. Releases the GIL.");
    m.def("hash64", &hash64_of, py::arg("data"), "XXH3-64 of a buffer. Releases the GIL.");
}

} // namespace gpustasis::bindings
