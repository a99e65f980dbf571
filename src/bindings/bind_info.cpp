// SPDX-License-Identifier: Apache-2.0
#include "bindings/bind.hpp"
#include "bindings/convert.hpp"
#include "core/image_info.hpp"
#include "core/manifest.hpp"

#include <pybind11/stl.h>

namespace py = pybind11;

namespace gpustasis::bindings {
namespace {

void bind_region(py::module_& m) {
    py::enum_<RegionKind>(m, "RegionKind", "How a region is mapped in the task.")
        .value("PRIVATE_ANONYMOUS", RegionKind::private_anonymous)
        .value("SHARED_ANONYMOUS", RegionKind::shared_anonymous)
        .value("DEVICE", RegionKind::device);

    py::class_<Region>(m, "Region", "A run of the task's memory; in bytes, whole pages.")
        .def(py::init([](std::uint64_t address, std::uint64_t length, std::uint32_t protection,
                         RegionKind kind) { return Region{address, length, protection, kind}; }),
             py::arg("address"), py::arg("length"), py::arg("protection") = 3,
             py::arg("kind") = RegionKind::private_anonymous)
        .def_readonly("address", &Region::address)
        .def_readonly("length", &Region::length)
        .def_readonly("protection", &Region::protection, "PROT_READ 1 | PROT_WRITE 2 | PROT_EXEC 4")
        .def_readonly("kind", &Region::kind)
        .def("__repr__",
             [](const Region& self) {
                 return py::str("Region(address={:#x}, length={:#x}, protection={}, kind={})")
                     .format(self.address, self.length, self.protection, self.kind);
             })
        .def("__eq__", &equal<Region>, py::is_operator());
}

void bind_gpu(py::module_& m) {
    py::class_<GpuInfo>(m, "GpuInfo", "One GPU of the machine of the checkpoint.")
        .def(py::init([](const py::bytes& uuid, const py::str& name, std::uint64_t memory_size) {
                 return GpuInfo{to_id(uuid), to_text(name), memory_size};
             }),
             py::arg("uuid"), py::arg("name"), py::arg("memory_size"))
        .def_property_readonly("uuid", [](const GpuInfo& self) { return to_python(self.uuid); })
        .def_property_readonly("name", [](const GpuInfo& self) { return to_python(self.name); })
        .def_readonly("memory_size", &GpuInfo::memory_size, "all device memory, in bytes")
        .def("__repr__",
             [](const GpuInfo& self) {
                 return py::str("GpuInfo(uuid={!r}, name={!r}, memory_size={})")
                     .format(to_python(self.uuid), to_python(self.name), self.memory_size);
             })
        .def("__eq__", &equal<GpuInfo>, py::is_operator());
}

void bind_source(py::module_& m) {
    py::class_<Source>(m, "Source", "Another file that holds chunks of an image.")
        .def_property_readonly("checkpoint_id",
                               [](const Source& self) { return to_python(self.checkpoint_id); })
        .def_property_readonly("digest", [](const Source& self) { return to_python(self.digest); })
        .def_readonly("file_size", &Source::file_size, "of that file, in bytes")
        .def_readonly("pid", &Source::pid)
        .def_readonly("kind", &Source::kind)
        .def_property_readonly(
            "image_name", [](const Source& self) { return image_name(self.pid, self.kind); },
            "of that file")
        .def_readonly("depth", &Source::depth,
                      "parent links to its directory; 0: own, 1: the parent's")
        .def("__eq__", &equal<Source>, py::is_operator());
}

ImageInfo make_info(std::uint32_t pid, const py::bytes& checkpoint_id, std::uint64_t start_time,
                    const py::bytes& boot_id, const py::str& comm, ProcessState state_before,
                    std::uint32_t driver_api_version, const py::str& driver_version,
                    std::vector<GpuInfo> gpus, std::uint32_t chunk_size,
                    std::vector<Region> regions, MemoryKind kind) {
    const bool of_devices = !regions.empty() && regions.front().kind == RegionKind::device;
    return {.checkpoint_id = to_id(checkpoint_id),
            .parent_id = {},
            .pid = pid,
            .kind = kind,
            .start_time = start_time,
            .boot_id = to_id(boot_id),
            .comm = to_text(comm),
            .state_before = state_before,
            .driver_api_version = driver_api_version,
            .driver_version = to_text(driver_version),
            .gpus = std::move(gpus),
            .chunk_size = chunk_size,
            .regions = std::move(regions),
            .sources = {},
            .of_devices = of_devices};
}

} // namespace

void bind_info(py::module_& m) {
    py::enum_<ProcessState>(m, "ProcessState", "The driver's view of a process.")
        .value("RUNNING", ProcessState::running)
        .value("LOCKED", ProcessState::locked)
        .value("CHECKPOINTED", ProcessState::checkpointed)
        .value("FAILED", ProcessState::failed);
    py::enum_<MemoryKind>(m, "MemoryKind", "Which memory of a task an image holds.")
        .value("GPU", MemoryKind::gpu)
        .value("CPU", MemoryKind::cpu)
        .value("FILES", MemoryKind::files);
    bind_region(m);
    bind_gpu(m);
    bind_source(m);

    const py::bytes no_id(std::string(sizeof(Id), '\0'));
    py::class_<ImageInfo>(m, "ImageInfo",
                          "What an image says about its task; fields as in docs/format.md.")
        .def(py::init(&make_info), py::kw_only(), py::arg("pid"), py::arg("checkpoint_id"),
             py::arg("start_time") = 0, py::arg("boot_id") = no_id, py::arg("comm") = "",
             py::arg("state_before") = ProcessState::running, py::arg("driver_api_version") = 0,
             py::arg("driver_version") = "", py::arg("gpus") = std::vector<GpuInfo>{},
             py::arg("chunk_size") = 0, py::arg("regions") = std::vector<Region>{},
             py::arg("kind") = MemoryKind::gpu)
        .def_property_readonly("checkpoint_id",
                               [](const ImageInfo& self) { return to_python(self.checkpoint_id); })
        .def_property_readonly("parent_id",
                               [](const ImageInfo& self) { return to_python(self.parent_id); })
        .def_readonly("pid", &ImageInfo::pid)
        .def_readonly("kind", &ImageInfo::kind)
        .def_property_readonly(
            "image_name", [](const ImageInfo& self) { return image_name(self.pid, self.kind); },
            "of its file")
        .def_readonly("start_time", &ImageInfo::start_time, "clock ticks since boot")
        .def_property_readonly("boot_id",
                               [](const ImageInfo& self) { return to_python(self.boot_id); })
        .def_property_readonly("comm", [](const ImageInfo& self) { return to_python(self.comm); })
        .def_readonly("state_before", &ImageInfo::state_before)
        .def_readonly("driver_api_version", &ImageInfo::driver_api_version)
        .def_property_readonly("driver_version",
                               [](const ImageInfo& self) { return to_python(self.driver_version); })
        .def_readonly("gpus", &ImageInfo::gpus)
        .def_readonly("chunk_size", &ImageInfo::chunk_size, "in bytes")
        .def_readonly("regions", &ImageInfo::regions)
        .def_readonly("sources", &ImageInfo::sources)
        .def_readonly("of_devices", &ImageInfo::of_devices)
        .def("__eq__", &equal<ImageInfo>, py::is_operator());
}

} // namespace gpustasis::bindings
