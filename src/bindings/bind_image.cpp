// SPDX-License-Identifier: Apache-2.0
#include "bindings/bind.hpp"
#include "bindings/buffers.hpp"
#include "bindings/convert.hpp"
#include "core/error.hpp"
#include "core/image_check.hpp"
#include "core/image_flatten.hpp"
#include "core/image_format.hpp"
#include "core/image_reader.hpp"
#include "core/image_writer.hpp"
#include "core/process_memory.hpp"
#include "seal/sealed_chain.hpp"
#include "seal/sealed_checkpoint.hpp"

#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace gpustasis::bindings {
namespace {

ImageReader open_image(const std::filesystem::path& path) {
    const py::gil_scoped_release unlocked;
    return ImageReader::open(AT_FDCWD, path.string());
}

// A reader and what its sources are found by: the locks are held as long as it lives.
struct OpenImage {
    ImageReader reader;
    std::filesystem::path path; ///< empty: in no directory of a checkpoint
    std::optional<Lineage> lineage = std::nullopt;
    std::shared_ptr<seal::SealedChain> chain = nullptr;                     ///< of a sealed one
    std::unique_ptr<std::mutex> attaching = std::make_unique<std::mutex>(); ///< of `lineage`
};

OpenImage open_with_path(const std::filesystem::path& path) {
    return {open_image(path), path};
}

OpenImage open_part(int fd, std::uint64_t offset, std::uint64_t length, const std::string& name) {
    const py::gil_scoped_release unlocked;
    return {ImageReader::open_part(fd, offset, length, name), {}};
}

OpenImage find_sealed(const std::filesystem::path& dir, const std::string& name,
                      const seal::DataKey& key) {
    const py::gil_scoped_release unlocked;
    const auto input = seal::find_sealed_image(open_dir(dir).get(), name, key);
    return {.reader = ImageReader::from_input(input, name),
            .path = dir / name,
            .chain = std::make_shared<seal::SealedChain>(key)};
}

OpenImage from_ends(const py::buffer& header, const py::buffer& tail, std::uint64_t size,
                    const std::string& name) {
    const BufferView front(header);
    const BufferView back(tail);
    const py::gil_scoped_release unlocked;
    return {ImageReader::from_ends(front.bytes(), back.bytes(), size, name), {}};
}

std::uint64_t tail_size(const py::buffer& trailer, std::uint64_t size) {
    const BufferView view(trailer);
    if (view.bytes().size() != format::kTrailerSize)
        throw Error(Errc::bad_argument, "a trailer has " + std::to_string(format::kTrailerSize) +
                                            " bytes, not " + std::to_string(view.bytes().size()));
    return ImageReader::tail_size(view.bytes(), size);
}

void check_stored(const OpenImage& self, std::uint64_t index, const py::buffer& stored) {
    const BufferView view(stored);
    const py::gil_scoped_release unlocked;
    self.reader.check_stored(index, view.bytes());
}

void attach_sources(OpenImage& self) {
    if (self.path.empty())
        throw Error(Errc::bad_argument, "an image of an archive has no directory to search from");
    const py::gil_scoped_release unlocked;
    const std::scoped_lock turn(*self.attaching);
    if (self.lineage)
        return;
    Lineage lineage(open_dir_of(self.path).get());
    lineage.open_by(self.chain);
    self.reader.attach_sources(lineage);
    self.lineage.emplace(std::move(lineage));
}

py::bytes read_chunk(const OpenImage& image, std::uint64_t index) {
    const ImageReader& self = image.reader;
    const Py_ssize_t size = self.chunk(index).plain_size;
    auto plain = py::reinterpret_steal<py::bytes>(PyBytes_FromStringAndSize(nullptr, size));
    if (!plain)
        throw py::error_already_set();
    // Nobody else has the new bytes object yet: its content may still be set.
    const MutBytes out(reinterpret_cast<std::byte*>(PyBytes_AS_STRING(plain.ptr())),
                       static_cast<std::size_t>(size));
    const py::gil_scoped_release unlocked;
    self.read_chunk(index, out);
    return plain;
}

void read_chunk_into(const OpenImage& self, std::uint64_t index, const py::buffer& plain) {
    const BufferView out(plain, PyBUF_WRITABLE);
    const py::gil_scoped_release unlocked;
    self.reader.read_chunk(index, out.writable());
}

void verify(const OpenImage& self, unsigned threads, const Tell& progress) {
    const py::gil_scoped_release unlocked;
    self.reader.verify(threads, progress_of(progress));
}

std::vector<std::pair<std::uint64_t, py::str>> damage_list(const std::vector<ChunkDamage>& found) {
    std::vector<std::pair<std::uint64_t, py::str>> list;
    list.reserve(found.size());
    for (const ChunkDamage& damage : found)
        list.emplace_back(damage.number, to_python(damage.what));
    return list;
}

std::vector<std::pair<std::uint64_t, py::str>> damage_in(const OpenImage& self, std::uint64_t begin,
                                                         std::uint64_t end,
                                                         const std::vector<std::uint16_t>& sources,
                                                         unsigned threads) {
    std::vector<ChunkDamage> found;
    {
        const py::gil_scoped_release unlocked;
        found = find_damage(self.reader, begin, end, sources, threads);
    }
    return damage_list(found);
}

std::vector<std::pair<std::uint64_t, py::str>>
damaged_references(const OpenImage& self, std::uint16_t source, const OpenImage& owner,
                   const std::vector<std::uint64_t>& damaged) {
    std::vector<ChunkDamage> found;
    {
        const py::gil_scoped_release unlocked;
        found = find_damaged_references(self.reader, source, owner.reader, damaged);
    }
    return damage_list(found);
}

void restore_to_process(const OpenImage& self, pid_t pid, unsigned threads, bool fresh,
                        const Tell& progress) {
    const py::gil_scoped_release unlocked;
    ProcessMemory memory(pid);
    self.reader.restore(memory, threads, fresh, progress_of(progress));
}

WriteResult write(const std::filesystem::path& path, const ImageInfo& info,
                  const std::vector<std::pair<std::uint64_t, py::buffer>>& memory, unsigned threads,
                  bool compress, int lz4_acceleration, std::uint32_t alignment,
                  const ParentIndex* parent, bool check_parent) {
    MemoryBuffers source;
    for (const auto& [address, buffer] : memory)
        source.add(address, BufferView(buffer));
    const py::gil_scoped_release unlocked;
    return write_image(open_dir_of(path).get(), path.filename().string(), info, source,
                       {.threads = threads,
                        .compress = compress,
                        .lz4_acceleration = lz4_acceleration,
                        .alignment = alignment,
                        .parent = parent,
                        .check_parent = check_parent});
}

void bind_totals(py::module_& m) {
    py::class_<EncodingTotals::Count>(m, "EncodingCount", "Chunks of one encoding, and bytes.")
        .def_readonly("chunks", &EncodingTotals::Count::chunks)
        .def_readonly("plain", &EncodingTotals::Count::plain, "bytes of memory")
        .def_readonly("stored", &EncodingTotals::Count::stored, "bytes of the file")
        .def("__eq__", &equal<EncodingTotals::Count>, py::is_operator());
    py::class_<EncodingTotals>(m, "EncodingTotals", "Chunks and bytes by encoding.")
        .def_readonly("zero", &EncodingTotals::zero)
        .def_readonly("lz4", &EncodingTotals::lz4)
        .def_readonly("raw", &EncodingTotals::raw)
        .def_readonly("ref", &EncodingTotals::ref, "in images of earlier checkpoints")
        .def_readonly("alike", &EncodingTotals::alike, "in other images of the checkpoint")
        .def("__eq__", &equal<EncodingTotals>, py::is_operator());
}

void bind_writer(py::module_& m) {
    py::class_<WriteResult>(m, "WriteResult", "What write_image() wrote.")
        .def_readonly("totals", &WriteResult::totals)
        .def_readonly("file_size", &WriteResult::file_size)
        .def_readonly("damaged_in_parent", &WriteResult::damaged_in_parent,
                      "chunks stored anew because the parent's are damaged")
        .def_property_readonly(
            "first_damage", [](const WriteResult& self) { return to_python(self.first_damage); },
            "which file of the parent, where, and what is wrong; \"\": nothing")
        .def_property_readonly("digest",
                               [](const WriteResult& self) { return to_python(self.digest); });

    m.def("write_image", &write, py::arg("path"), py::arg("info"), py::arg("memory"), py::kw_only(),
          py::arg("threads") = 0, py::arg("compress") = true, py::arg("lz4_acceleration") = 1,
          py::arg("alignment") = WriteOptions{}.alignment, py::arg("parent") = py::none(),
          py::arg("check_parent") = false,
          "Write the regions of `info` from `memory`, a list of (address, buffer) that covers\n"
          "them. Complete and durable on return; nothing is left of it on an exception.\n"
          "Raises ValueError if info or an option breaks a limit of docs/format.md or memory is\n"
          "missing, OSError if the file cannot be written. Releases the GIL.\n"
          "parent: chunks that it has become references to it. check_parent: each such chunk is\n"
          "read there and compared first; what is damaged is stored anew, and counted.");
}

void bind_reader(py::module_& m) {
    py::class_<ChunkInfo>(m, "ChunkInfo", "One chunk of an image.")
        .def_readonly("address", &ChunkInfo::address, "in the task")
        .def_readonly("plain_size", &ChunkInfo::plain_size, "bytes of memory")
        .def_readonly("stored_size", &ChunkInfo::stored_size, "bytes of the file")
        .def_readonly("offset", &ChunkInfo::offset, "in the file; 0 if zero")
        .def_readonly("encoding", &ChunkInfo::encoding)
        .def_readonly("source", &ChunkInfo::source,
                      "0: in the image file; n: in that of info.sources[n - 1]")
        .def_property_readonly("hash", [](const ChunkInfo& self) { return to_python(self.hash); });

    py::class_<OpenImage>(m, "ImageReader",
                          "An image, opened and checked but for its chunks.\n"
                          "Safe on hostile files and from several threads.")
        .def_static("open", &open_with_path, py::arg("path"),
                    "Raises OSError, CorruptDataError, UnsupportedDataError; each names the file.")
        .def_static("find_sealed", &find_sealed, py::arg("directory"), py::arg("name"),
                    py::arg("key"))
        .def_static("open_part", &open_part, py::arg("fd"), py::arg("offset"), py::arg("length"),
                    py::arg("name"),
                    "The image that is the `length` bytes of a file from `offset`, for example a\n"
                    "member of a tar archive. The descriptor is copied. name: for messages.\n"
                    "Raises as open.")
        .def_static(
            "from_ends", &from_ends, py::arg("header"), py::arg("tail"), py::arg("size"),
            py::arg("name"),
            "An image of `size` bytes of which only the ends are at hand: its first\n"
            "IMAGE_HEADER_SIZE bytes, and its last tail_size(). It is checked as open does.\n"
            "Its chunks cannot be read through it: check_stored() checks bytes read\n"
            "elsewhere. Raises as open, ValueError if the ends are longer than `size`.")
        .def_static(
            "tail_size", &tail_size, py::arg("trailer"), py::arg("size"),
            "How many bytes from_ends needs of the end of an image of `size` bytes, as its\n"
            "last IMAGE_TRAILER_SIZE bytes say; of a damaged trailer only that many: from_ends\n"
            "says what is wrong.")
        .def("check_stored", &check_stored, py::arg("index"), py::arg("stored"),
             "Check that `stored` are the stored bytes of a chunk, by all its hashes, wherever\n"
             "they were read. Raises CorruptDataError that names image, chunk and address.\n"
             "Releases the GIL.")
        .def_property_readonly(
            "info", [](const OpenImage& self) -> const ImageInfo& { return self.reader.info(); })
        .def_property_readonly(
            "totals",
            [](const OpenImage& self) -> const EncodingTotals& { return self.reader.totals(); })
        .def_property_readonly("file_size",
                               [](const OpenImage& self) { return self.reader.file_size(); })
        .def_property_readonly(
            "digest", [](const OpenImage& self) { return to_python(self.reader.digest()); })
        .def(
            "attach_sources", &attach_sources,
            "Find every source of earlier checkpoints by the links from this image's directory, "
            "and lock the directories\n"
            "(shared) as long as this object lives. Needed before chunks that lie there are read;\n"
            "not from several threads. Raises OSError, CorruptDataError: they name the checkpoint\n"
            "that is missing or another. Releases the GIL.")
        .def("__len__", [](const OpenImage& self) { return self.reader.chunk_count(); })
        .def(
            "chunk",
            [](const OpenImage& self, std::uint64_t index) { return self.reader.chunk(index); },
            py::arg("index"), "Raises ValueError past the last chunk.")
        .def("read_chunk", &read_chunk, py::arg("index"),
             "The plain bytes of a chunk, checked. Releases the GIL.")
        .def("read_chunk_into", &read_chunk_into, py::arg("index"), py::arg("plain"),
             "The same into a writable buffer of exactly its plain_size.")
        .def("verify", &verify, py::arg("threads") = 0, py::arg("progress") = py::none(),
             "Check every chunk and all padding. progress(plain bytes done) is called now and\n"
             "then, from one thread at a time; what it raises stops the work and is raised here.\n"
             "Raises CorruptDataError that names file, chunk and address. Releases the GIL.")
        .def(
            "find_damage", &damage_in, py::arg("begin"), py::arg("end"), py::arg("sources"),
            py::arg("threads") = 0,
            "Check the chunks from `begin` to before `end` that lie in one of `sources` (0: the\n"
            "image file), and go on after damage. Returns (number, what is wrong) of each that is\n"
            "damaged or cannot be read. Raises ValueError past the last chunk. Releases the GIL.")
        .def(
            "find_damaged_references", &damaged_references, py::arg("source"), py::arg("owner"),
            py::arg("damaged"),
            "The same of chunks that lie in source `source`, told without reading any: `owner` is\n"
            "that image, `damaged` the numbers of all of its own chunks that are damaged,\n"
            "ascending. Releases the GIL.")
        .def("restore_to_process", &restore_to_process, py::arg("pid"), py::arg("threads") = 0,
             py::arg("fresh") = false, py::arg("progress") = py::none(),
             "Write every chunk, each checked first, into the memory of process `pid`, which\n"
             "needs ptrace access to it. fresh: its pages are untouched zero pages.\n"
             "Raises CorruptDataError as verify, OSError if memory cannot be written; what was\n"
             "written before stays written. Releases the GIL.");
}

WriteResult flatten(const OpenImage& image, const std::filesystem::path& path, unsigned threads,
                    const Tell& progress) {
    const py::gil_scoped_release unlocked;
    return flatten_image(image.reader, open_dir_of(path).get(), path.filename().string(), threads,
                         progress_of(progress));
}

// A writer and the directory it writes to; no writer once it is finished or given up.
struct OpenFlatImage {
    UniqueFd dir;
    std::optional<FlatImageWriter> writer;
};

OpenFlatImage open_flat(const OpenImage& image, const std::filesystem::path& path) {
    const py::gil_scoped_release unlocked;
    OpenFlatImage flat{open_dir_of(path), std::nullopt};
    flat.writer.emplace(image.reader, flat.dir.get(), path.filename().string());
    return flat;
}

FlatImageWriter& writer_of(OpenFlatImage& self) {
    if (!self.writer)
        throw Error(Errc::bad_argument, "the image is finished or given up");
    return *self.writer;
}

void put(OpenFlatImage& self, std::uint64_t index, const py::buffer& stored) {
    const BufferView view(stored);
    FlatImageWriter& writer = writer_of(self);
    const py::gil_scoped_release unlocked;
    writer.put(index, view.bytes());
}

WriteResult finish(OpenFlatImage& self) {
    const py::gil_scoped_release unlocked;
    const WriteResult result = writer_of(self).finish();
    self.writer.reset();
    return result;
}

void bind_flat_image(py::module_& m) {
    py::class_<OpenFlatImage>(
        m, "FlatImageWriter",
        "A copy of an image that needs no other one, written from stored chunks that come in any\n"
        "order. A context manager: left without finish(), nothing of the file stays.")
        .def(py::init(&open_flat), py::arg("image"), py::arg("path"),
             "image: any ImageReader; only its index is used. Raises OSError.")
        .def("put", &put, py::arg("index"), py::arg("stored"),
             "Write the stored bytes of a chunk, which were checked; by several threads at once,\n"
             "each chunk once, but for those of zeros. Raises ValueError if it was put before or\n"
             "has another size, OSError. Releases the GIL.")
        .def("finish", &finish,
             "Complete and durable on return; call it when no thread puts any more. Raises\n"
             "ValueError if a chunk was not put, OSError. Releases the GIL.")
        .def("__enter__", [](py::object self) { return self; })
        .def("__exit__", [](OpenFlatImage& self, const py::args&) { self.writer.reset(); });
}

} // namespace

void bind_image(py::module_& m) {
    bind_totals(m);
    bind_writer(m);
    bind_reader(m);
    bind_flat_image(m);
    m.attr("IMAGE_HEADER_SIZE") = format::kHeaderSize;
    m.attr("IMAGE_TRAILER_SIZE") = format::kTrailerSize;
    m.def(
        "flatten_image", &flatten, py::arg("image"), py::arg("path"), py::arg("threads") = 0,
        py::arg("progress") = py::none(),
        "Write a copy of `image`, whose sources are attached, that has none. Complete and durable\n"
        "on return. Raises CorruptDataError, OSError. Releases the GIL.");
}

} // namespace gpustasis::bindings
