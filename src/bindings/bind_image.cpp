#include "bindings/bind.hpp"
#include "bindings/buffer_view.hpp"
#include "bindings/convert.hpp"
#include "bindings/memory_buffers.hpp"
#include "core/file.hpp"
#include "core/image_reader.hpp"
#include "core/image_writer.hpp"
#include "core/process_memory.hpp"

#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <fcntl.h>

#include <cerrno>
#include <filesystem>
#include <optional>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace cudackpt::bindings {
namespace {

using Tell = std::optional<py::function>;

// Calls `tell` with the GIL, and lets Ctrl-C stop long work either way. Outlived by `tell`.
ImageReader::Progress progress_of(const Tell& tell) {
    return [&tell](std::uint64_t done) {
        const py::gil_scoped_acquire locked;
        if (PyErr_CheckSignals() != 0)
            throw py::error_already_set();
        if (tell)
            (*tell)(done);
    };
}

ImageReader open_image(const std::filesystem::path& path) {
    const py::gil_scoped_release unlocked;
    return ImageReader::open(AT_FDCWD, path.string());
}

py::bytes read_chunk(const ImageReader& self, std::uint64_t index) {
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

void read_chunk_into(const ImageReader& self, std::uint64_t index, const py::buffer& plain) {
    const BufferView out(plain, PyBUF_WRITABLE);
    const py::gil_scoped_release unlocked;
    self.read_chunk(index, out.writable());
}

void verify(const ImageReader& self, unsigned threads, const Tell& progress) {
    const py::gil_scoped_release unlocked;
    self.verify(threads, progress_of(progress));
}

void restore_to_process(const ImageReader& self, pid_t pid, unsigned threads, bool fresh,
                        const Tell& progress) {
    const py::gil_scoped_release unlocked;
    ProcessMemory memory(pid);
    self.restore(memory, threads, fresh, progress_of(progress));
}

WriteResult write(const std::filesystem::path& path, const ImageInfo& info,
                  const std::vector<std::pair<std::uint64_t, py::buffer>>& memory, unsigned threads,
                  bool compress, int lz4_acceleration, std::uint32_t alignment) {
    MemoryBuffers source;
    for (const auto& [address, buffer] : memory)
        source.add(address, BufferView(buffer));
    const py::gil_scoped_release unlocked;
    const std::string dir_name = path.has_parent_path() ? path.parent_path().string() : ".";
    const UniqueFd dir(::open(dir_name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (dir.get() < 0)
        throw io_error(dir_name, errno);
    return write_image(dir.get(), path.filename().string(), info, source,
                       {.threads = threads,
                        .compress = compress,
                        .lz4_acceleration = lz4_acceleration,
                        .alignment = alignment});
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
        .def_readonly("ref", &EncodingTotals::ref)
        .def("__eq__", &equal<EncodingTotals>, py::is_operator());
}

void bind_writer(py::module_& m) {
    py::class_<WriteResult>(m, "WriteResult", "What write_image() wrote.")
        .def_readonly("totals", &WriteResult::totals)
        .def_readonly("file_size", &WriteResult::file_size)
        .def_property_readonly("digest",
                               [](const WriteResult& self) { return to_python(self.digest); });

    m.def("write_image", &write, py::arg("path"), py::arg("info"), py::arg("memory"), py::kw_only(),
          py::arg("threads") = 0, py::arg("compress") = true, py::arg("lz4_acceleration") = 1,
          py::arg("alignment") = WriteOptions{}.alignment,
          "Write the regions of `info` from `memory`, a list of (address, buffer) that covers\n"
          "them. Complete and durable on return; nothing is left of it on an exception.\n"
          "Raises ValueError if info or an option breaks a limit of docs/format.md or memory is\n"
          "missing, OSError if the file cannot be written. Releases the GIL.");
}

void bind_reader(py::module_& m) {
    py::class_<ChunkInfo>(m, "ChunkInfo", "One chunk of an image.")
        .def_readonly("address", &ChunkInfo::address, "in the task")
        .def_readonly("plain_size", &ChunkInfo::plain_size, "bytes of memory")
        .def_readonly("stored_size", &ChunkInfo::stored_size, "bytes of the file")
        .def_readonly("offset", &ChunkInfo::offset, "in the file; 0 if zero")
        .def_readonly("encoding", &ChunkInfo::encoding)
        .def_property_readonly("hash", [](const ChunkInfo& self) { return to_python(self.hash); });

    py::class_<ImageReader>(m, "ImageReader",
                            "An image, opened and checked but for its chunks.\n"
                            "Safe on hostile files and from several threads.")
        .def_static("open", &open_image, py::arg("path"),
                    "Raises OSError, CorruptDataError, UnsupportedDataError; each names the file.")
        .def_property_readonly("info", &ImageReader::info)
        .def_property_readonly("totals", &ImageReader::totals)
        .def_property_readonly("file_size", &ImageReader::file_size)
        .def_property_readonly("digest",
                               [](const ImageReader& self) { return to_python(self.digest()); })
        .def("__len__", &ImageReader::chunk_count)
        .def("chunk", &ImageReader::chunk, py::arg("index"),
             "Raises ValueError past the last chunk.")
        .def("read_chunk", &read_chunk, py::arg("index"),
             "The plain bytes of a chunk, checked. Releases the GIL.")
        .def("read_chunk_into", &read_chunk_into, py::arg("index"), py::arg("plain"),
             "The same into a writable buffer of exactly its plain_size.")
        .def("verify", &verify, py::arg("threads") = 0, py::arg("progress") = py::none(),
             "Check every chunk and all padding. progress(plain bytes done) is called now and\n"
             "then, from one thread at a time; what it raises stops the work and is raised here.\n"
             "Raises CorruptDataError that names file, chunk and address. Releases the GIL.")
        .def("restore_to_process", &restore_to_process, py::arg("pid"), py::arg("threads") = 0,
             py::arg("fresh") = false, py::arg("progress") = py::none(),
             "Write every chunk, each checked first, into the memory of process `pid`, which\n"
             "needs ptrace access to it. fresh: its pages are untouched zero pages.\n"
             "Raises CorruptDataError as verify, OSError if memory cannot be written; what was\n"
             "written before stays written. Releases the GIL.");
}

} // namespace

void bind_image(py::module_& m) {
    bind_totals(m);
    bind_writer(m);
    bind_reader(m);
}

} // namespace cudackpt::bindings
