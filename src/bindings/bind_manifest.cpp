// SPDX-License-Identifier: Apache-2.0
#include "bindings/bind.hpp"
#include "bindings/buffers.hpp"
#include "bindings/convert.hpp"
#include "core/manifest.hpp"
#include "core/stored_memory.hpp"

#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace gpustasis::bindings {
namespace {

timespec time_of(std::int64_t ns) {
    constexpr std::int64_t kSecond = 1'000'000'000;
    const std::int64_t rest = (ns % kSecond + kSecond) % kSecond; // also before 1970
    return {.tv_sec = (ns - rest) / kSecond, .tv_nsec = rest};
}

} // namespace

void bind_manifest(py::module_& m) {
    m.attr("MANIFEST_NAME") = kManifestName;
    m.def("image_name", &image_name, py::arg("pid"), py::arg("kind") = MemoryKind::gpu,
          "The file name of the image of task `pid`.");

    py::enum_<GpuSource>(m, "GpuSource", "How it was found out which GPUs a task has.")
        .value("UNKNOWN", GpuSource::unknown)
        .value("DEVICE_FILES", GpuSource::device_files)
        .value("NVML", GpuSource::nvml);
    py::class_<TaskGpu>(m, "TaskGpu", "A GPU that a task can see.")
        .def(py::init([](std::uint32_t gpu, std::uint64_t memory_size) {
                 return TaskGpu{gpu, memory_size};
             }),
             py::arg("gpu"), py::arg("memory_size") = TaskGpu::kUnknownSize)
        .def_readonly("gpu", &TaskGpu::gpu, "its place in the manifest's gpus")
        .def_readonly("memory_size", &TaskGpu::memory_size,
                      "bytes that the task has in use there; UNKNOWN_SIZE: not known")
        .def("__repr__",
             [](const TaskGpu& self) {
                 return py::str("TaskGpu(gpu={}, memory_size={})")
                     .format(self.gpu, self.memory_size);
             })
        .def("__eq__", &equal<TaskGpu>, py::is_operator())
        .attr("UNKNOWN_SIZE") = TaskGpu::kUnknownSize;

    const py::bytes no_id(std::string(sizeof(Id), '\0'));
    py::class_<ManifestTask>(m, "ManifestTask",
                             "One CUDA task of the tree, or the CPU memory of one task.")
        .def(py::init([](std::uint32_t pid, bool externalized, const py::bytes& digest,
                         ProcessState state_before, GpuSource gpu_source, std::vector<TaskGpu> gpus,
                         MemoryKind kind) {
                 return ManifestTask{pid,        externalized,    to_id(digest), state_before,
                                     gpu_source, std::move(gpus), kind};
             }),
             py::kw_only(), py::arg("pid"), py::arg("externalized") = false,
             py::arg("digest") = no_id, py::arg("state_before") = ProcessState::running,
             py::arg("gpu_source") = GpuSource::unknown, py::arg("gpus") = std::vector<TaskGpu>{},
             py::arg("kind") = MemoryKind::gpu)
        .def_readonly("kind", &ManifestTask::kind)
        .def_property_readonly("image_name", &ManifestTask::image_name, "of its image")
        .def_readonly("pid", &ManifestTask::pid)
        .def_readonly("externalized", &ManifestTask::externalized, "an image holds its memory")
        .def_property_readonly("digest",
                               [](const ManifestTask& self) { return to_python(self.digest); })
        .def_readonly("state_before", &ManifestTask::state_before)
        .def_readonly("gpu_source", &ManifestTask::gpu_source)
        .def_readonly("gpus", &ManifestTask::gpus, "GPUs that it can see; empty: not known")
        .def("__eq__", &equal<ManifestTask>, py::is_operator());

    py::class_<Manifest>(m, "Manifest", "Which images belong to a checkpoint.")
        .def(py::init([](const py::bytes& checkpoint_id, std::uint32_t driver_api_version,
                         const py::str& driver_version, std::vector<GpuInfo> gpus,
                         std::vector<ManifestTask> tasks, const py::bytes& parent_id,
                         std::uint32_t chain_length, std::optional<Requirements> requirements,
                         const std::optional<py::bytes>& pack) {
                 return Manifest{to_id(checkpoint_id),
                                 driver_api_version,
                                 to_text(driver_version),
                                 std::move(gpus),
                                 std::move(tasks),
                                 to_id(parent_id),
                                 chain_length,
                                 std::move(requirements),
                                 pack ? std::optional(to_id(*pack)) : std::nullopt};
             }),
             py::kw_only(), py::arg("checkpoint_id"), py::arg("driver_api_version") = 0,
             py::arg("driver_version") = "", py::arg("gpus") = std::vector<GpuInfo>{},
             py::arg("tasks") = std::vector<ManifestTask>{}, py::arg("parent_id") = no_id,
             py::arg("chain_length") = 0, py::arg("requirements") = std::nullopt,
             py::arg("pack") = std::nullopt)
        .def_property_readonly("checkpoint_id",
                               [](const Manifest& self) { return to_python(self.checkpoint_id); })
        .def_readonly("driver_api_version", &Manifest::driver_api_version)
        .def_property_readonly("driver_version",
                               [](const Manifest& self) { return to_python(self.driver_version); })
        .def_readonly("gpus", &Manifest::gpus)
        .def_readonly("tasks", &Manifest::tasks)
        .def_property_readonly("parent_id",
                               [](const Manifest& self) { return to_python(self.parent_id); })
        .def_readonly("chain_length", &Manifest::chain_length,
                      "how many checkpoints it is built on; 0: none")
        .def_readonly("requirements", &Manifest::requirements, "None: they were not recorded")
        .def_property_readonly(
            "pack",
            [](const Manifest& self) {
                return self.pack ? std::optional(to_python(*self.pack)) : std::nullopt;
            },
            "digest of the pack of CRIU's images; None: there is none")
        .def("__eq__", &equal<Manifest>, py::is_operator());

    m.def(
        "read_manifest",
        [](const std::filesystem::path& dir) { return read_manifest(open_dir(dir).get()); },
        py::arg("dir"),
        "The manifest in a directory.\n"
        "Raises OSError (also if there is none), CorruptDataError, UnsupportedDataError.");
    m.def(
        "parse_manifest",
        [](const py::buffer& data, const std::string& name) {
            return parse_manifest(BufferView(data).bytes(), name);
        },
        py::arg("data"), py::arg("name"),
        "The manifest in a buffer; `name` is for messages.\n"
        "Raises CorruptDataError, UnsupportedDataError.");
    m.def(
        "stored_memory_digest",
        [](const std::vector<std::pair<ManifestTask, std::vector<Region>>>& entries) {
            StoredMemory stored;
            for (const auto& [task, regions] : entries)
                stored.add(task, regions);
            return to_python(stored.digest());
        },
        py::arg("entries"),
        "What CRIU's inventory holds of tasks of a manifest, each with the regions of its image.");
    m.def(
        "write_manifest",
        [](const std::filesystem::path& dir, const Manifest& manifest,
           const std::optional<std::pair<std::int64_t, std::int64_t>>& ns) {
            std::optional<FileTimes> times;
            if (ns)
                times = {time_of(ns->first), time_of(ns->second)};
            write_manifest(open_dir(dir).get(), manifest, times);
        },
        py::arg("dir"), py::arg("manifest"), py::kw_only(), py::arg("ns") = py::none(),
        "Write it, replacing an older one in a single durable step. ns: when it was last read and\n"
        "written, in nanoseconds since 1970, as of os.utime; None: now.\n"
        "Raises OSError, ValueError if it breaks a limit of docs/format.md.");
}

} // namespace gpustasis::bindings
