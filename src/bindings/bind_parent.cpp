// SPDX-License-Identifier: Apache-2.0
#include "bindings/bind.hpp"
#include "bindings/buffers.hpp"
#include "bindings/convert.hpp"
#include "core/lineage.hpp"
#include "core/parent_index.hpp"

#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <cstdint>
#include <filesystem>

namespace py = pybind11;

namespace gpustasis::bindings {
namespace {

void add_to_index(ParentIndex& self, const std::filesystem::path& dir,
                  const py::bytes& checkpoint_id, const ManifestTask& task) {
    const Id id = to_id(checkpoint_id);
    const py::gil_scoped_release unlocked;
    Lineage lineage(open_dir(dir).get());
    self.add(lineage, id, task);
}

} // namespace

void bind_parent(py::module_& m) {
    m.attr("PARENT_LINK") = kParentLink;
    m.def(
        "link_parent",
        [](const std::filesystem::path& dir, const std::filesystem::path& parent) {
            link_parent(open_dir(dir).get(), open_dir(parent).get());
        },
        py::arg("dir"), py::arg("parent"),
        "Make the link of `dir` to its parent, or replace it. Raises OSError, ValueError.");
    py::class_<ParentIndex>(
        m, "ParentIndex",
        "What a new image may refer to, by content: the chunks of a parent, and of\n"
        "images that were added.")
        .def(py::init<std::uint32_t>(), py::arg("chunk_size") = 0,
             "Of a checkpoint without a parent; chunk_size 0: the default one.")
        .def(
            "add", &add_to_index, py::arg("dir"), py::arg("checkpoint_id"), py::arg("task"),
            "The chunks that the image of `task` in `dir`, which belongs to the same checkpoint "
            "as\n"
            "the images to come, holds itself. Not while another thread writes with it. Raises\n"
            "OSError, CorruptDataError, ValueError if it has another chunk size. Releases the GIL.")
        .def_static(
            "read",
            [](const std::filesystem::path& dir) {
                const py::gil_scoped_release unlocked;
                Lineage lineage = Lineage::above(open_dir(dir).get());
                return ParentIndex::read(lineage);
            },
            py::arg("dir"),
            "Of the checkpoint in `dir`. Raises OSError, CorruptDataError, UnsupportedDataError;\n"
            "ValueError if it holds no GPU memory. Releases the GIL.")
        .def_property_readonly("manifest", &ParentIndex::manifest)
        .def_property_readonly("chunk_size", &ParentIndex::chunk_size, "in bytes")
        .def("__len__", &ParentIndex::size, "Chunks that are not zero.");
}

} // namespace gpustasis::bindings
