// SPDX-License-Identifier: Apache-2.0
#include "bindings/bind.hpp"
#include "bindings/convert.hpp"
#include "core/file_pack.hpp"

#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace gpustasis::bindings {
namespace {

// Of one file that is read whole; CRIU's small images stay far below.
constexpr std::uint64_t kMaxRead = 64U << 20;

py::bytes read_file(const PackReader& self, const std::string& name) {
    const PackedFile* file = self.find(name);
    if (file == nullptr)
        throw py::key_error(name);
    if (file->size > kMaxRead)
        throw Error(Errc::corrupt_data, name + " is too large to be read whole");
    std::vector<std::byte> bytes;
    {
        const py::gil_scoped_release unlocked;
        bytes = self.read(*file);
    }
    return to_python(Bytes(bytes));
}

} // namespace

void bind_pack(py::module_& m) {
    m.attr("PACK_NAME") = kPackName;
    py::class_<PackedFile>(m, "PackedFile", "A file in a pack.")
        .def_property_readonly("name", [](const PackedFile& self) { return to_python(self.name); })
        .def_readonly("mode", &PackedFile::mode, "permission bits")
        .def_readonly("size", &PackedFile::size, "bytes")
        .def_readonly("mtime_ns", &PackedFile::mtime_ns, "since 1970");
    py::class_<PackReader>(m, "PackReader",
                           "A pack of CRIU's images, opened and checked but for what is in them.\n"
                           "Safe on hostile files and from several threads.")
        .def_static(
            "open",
            [](const std::filesystem::path& dir) { return PackReader::open(open_dir(dir).get()); },
            py::arg("dir"), "Raises OSError, CorruptDataError, UnsupportedDataError.")
        .def_property_readonly(
            "checkpoint_id",
            [](const PackReader& self) { return to_python(self.image().info().checkpoint_id); })
        .def_property_readonly(
            "digest", [](const PackReader& self) { return to_python(self.image().digest()); })
        .def_property_readonly("size", &PackReader::size, "bytes of all files")
        .def_property_readonly("files", &PackReader::files, "ascending by name")
        .def("read", &read_file, py::arg("name"),
             "All of one file, checked. Raises KeyError; ValueError of one over 64 MiB;\n"
             "CorruptDataError, OSError. Releases the GIL.")
        .def(
            "extract",
            [](const PackReader& self, const std::filesystem::path& dir, unsigned threads,
               const std::string& without) {
                const py::gil_scoped_release unlocked;
                self.extract(open_dir(dir).get(), threads, without);
            },
            py::arg("dir"), py::arg("threads") = 0, py::arg("without") = "",
            "Make all files but `without` in `dir`, each checked. Raises as read. Releases the\n"
            "GIL.")
        .def(
            "verify",
            [](const PackReader& self, unsigned threads) {
                const py::gil_scoped_release unlocked;
                self.verify(threads);
            },
            py::arg("threads") = 0, "Check all of it. Raises as read. Releases the GIL.");
    m.def(
        "write_pack",
        [](const std::filesystem::path& source, std::vector<std::string> names,
           const std::filesystem::path& target, const py::bytes& checkpoint_id, unsigned threads) {
            const Id id = to_id(checkpoint_id);
            PackResult packed;
            {
                const py::gil_scoped_release unlocked;
                packed = write_pack(id, open_dir(source).get(), std::move(names),
                                    open_dir(target).get(), {.threads = threads});
            }
            return to_python(packed.digest);
        },
        py::arg("source"), py::arg("names"), py::arg("target"), py::kw_only(),
        py::arg("checkpoint_id"), py::arg("threads") = 0,
        "Pack files of one directory into PACK_NAME in another, complete and durable on return;\n"
        "its digest. Raises OSError, ValueError. Releases the GIL.");
}

} // namespace gpustasis::bindings
