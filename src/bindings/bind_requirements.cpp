// SPDX-License-Identifier: Apache-2.0
#include "bindings/bind.hpp"
#include "bindings/convert.hpp"
#include "core/file_identity.hpp"
#include "core/requirements.hpp"

#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <cstring>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace gpustasis::bindings {
namespace {

std::vector<std::byte> to_vector(const py::bytes& bytes) {
    const auto view = static_cast<std::string_view>(bytes);
    std::vector<std::byte> out(view.size());
    std::memcpy(out.data(), view.data(), view.size());
    return out;
}

} // namespace

void bind_requirements(py::module_& m) {
    py::enum_<FilePlace>(m, "FilePlace", "Whose paths the paths of mapped files are.")
        .value("HOST", FilePlace::host)
        .value("CONTAINER", FilePlace::container)
        .value("INNER", FilePlace::inner);
    py::enum_<FileIdentity>(m, "FileIdentity", "What is known of the content of a mapped file.")
        .value("SIZE", FileIdentity::size)
        .value("BUILD_ID", FileIdentity::build_id)
        .value("CONTENT", FileIdentity::content);
    py::class_<RequiredFile>(m, "RequiredFile", "A file that a task had mapped.")
        .def(py::init([](FilePlace place, const py::str& path, std::uint64_t size,
                         FileIdentity identity, const py::bytes& id) {
                 return RequiredFile{place, to_text(path), size, identity, to_vector(id)};
             }),
             py::kw_only(), py::arg("place") = FilePlace::host, py::arg("path"), py::arg("size"),
             py::arg("identity") = FileIdentity::size, py::arg("id") = py::bytes())
        .def_readonly("place", &RequiredFile::place)
        .def_property_readonly("path",
                               [](const RequiredFile& self) { return to_python(self.path); })
        .def_readonly("size", &RequiredFile::size, "bytes")
        .def_readonly("identity", &RequiredFile::identity)
        .def_property_readonly("id",
                               [](const RequiredFile& self) { return to_python(Bytes(self.id)); })
        .def("__repr__",
             [](const RequiredFile& self) {
                 return py::str("RequiredFile({!r}: {})")
                     .format(to_python(self.path), identity_text(self));
             })
        .def("__eq__", &equal<RequiredFile>, py::is_operator());
    py::class_<Requirements>(m, "Requirements", "The files that the tasks of a checkpoint mapped.")
        .def(py::init([](std::vector<RequiredFile> files, std::uint32_t unrecorded) {
                 return Requirements{std::move(files), unrecorded};
             }),
             py::kw_only(), py::arg("files") = std::vector<RequiredFile>{},
             py::arg("unrecorded") = 0)
        .def_readonly("files", &Requirements::files, "ascending by place, then path")
        .def_readonly("unrecorded", &Requirements::unrecorded,
                      "mapped files that are not among them")
        .def("__eq__", &equal<Requirements>, py::is_operator());
    m.def("identity_text", &identity_text, py::arg("file"),
          "What tells the file from others: \"build id 1b2c…, 2030336 bytes\".");
    m.def(
        "file_difference",
        [](const std::filesystem::path& root, const py::str& path, const RequiredFile& expected) {
            const UniqueFd directory = open_dir(root);
            const std::string name = to_text(path);
            const py::gil_scoped_release unlocked;
            return difference(directory.get(), name, expected);
        },
        py::arg("root"), py::arg("path"), py::arg("expected"),
        "What is at `path` below the directory `root`, which no link leads out of, in place of\n"
        "`expected`: \"is missing\", \"has build id …\"; None: nothing tells it from that.\n"
        "A file of which a hash is known is read whole. Raises OSError if `root` is no directory.");
}

} // namespace gpustasis::bindings
