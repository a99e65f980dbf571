// SPDX-License-Identifier: Apache-2.0
#include "bindings/bind.hpp"
#include "core/error.hpp"
#include "dirty_tracker/dirty_tracker.hpp"

#include <pybind11/stl.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace gpustasis::bindings {
namespace {

constexpr DirtyBackend kBackends[] = {DirtyBackend::write_protect, DirtyBackend::soft_dirty};

std::optional<DirtyBackend> to_backend(const std::string& name) {
    if (name == "auto")
        return std::nullopt;
    for (const DirtyBackend backend : kBackends)
        if (name == name_of(backend))
            return backend;
    throw Error(Errc::bad_argument, "backend is \"auto\", \"write-protect\" or \"soft-dirty\", "
                                    "not \"" +
                                        name + "\"");
}

std::unique_ptr<DirtyTracker> make(pid_t pid, const std::string& backend) {
    const py::gil_scoped_release unlocked;
    return std::make_unique<DirtyTracker>(pid, to_backend(backend));
}

std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges_of(const DirtyPages& self) {
    std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges;
    ranges.reserve(self.ranges.size());
    for (const PageRange& range : self.ranges)
        ranges.emplace_back(range.address, range.length);
    return ranges;
}

std::map<std::string, std::string> backends() {
    const py::gil_scoped_release unlocked;
    std::map<std::string, std::string> reasons;
    for (const DirtyBackend backend : kBackends)
        reasons.emplace(name_of(backend), why_not(backend));
    return reasons;
}

} // namespace

void bind_dirty_tracker(py::module_& m) {
    py::class_<DirtyPages>(m, "DirtyPages",
                           "What a scan found. Bytes are of pages that hold something of the\n"
                           "process's own, in memory or in swap.")
        .def_property_readonly(
            "backend", [](const DirtyPages& self) { return std::string(name_of(self.backend)); })
        .def_property_readonly("ranges", &ranges_of,
                               "Written since the mark: (address, bytes), ascending.")
        .def_readonly("dirty_bytes", &DirtyPages::dirty_bytes, "of ranges")
        .def_readonly("tracked_bytes", &DirtyPages::tracked_bytes, "written or not")
        .def_readonly("untracked_bytes", &DirtyPages::untracked_bytes,
                      "in writable mappings whose writes cannot be seen");

    const auto unlocked = py::call_guard<py::gil_scoped_release>();
    py::class_<DirtyTracker>(
        m, "DirtyTracker",
        "Which pages of process `pid` were written since a mark, by the process or by the kernel\n"
        "in its name. Before the first mark every page counts as written. A context manager.\n"
        "Not seen: writes by devices, and to shared memory by other processes. Too much is said\n"
        "of mappings made since the mark (all of them), of huge pages made since then (whole), "
        "and\n"
        "of shared memory first touched since then (reading counts).")
        .def(
            py::init(&make), py::arg("pid"), py::arg("backend") = "auto",
            "backend: \"write-protect\", \"soft-dirty\", or \"auto\" for the first that works.\n"
            "Needs ptrace access to the process. write-protect stops one of its threads for about\n"
            "a millisecond, once, and closes what a tracker that was killed then has left there.\n"
            "soft-dirty clears bits that `criu --track-mem` uses too.\n"
            "Raises UnsupportedDataError, saying why, if the backend cannot work here or for this\n"
            "process, ProcessLookupError if there is no such process, OSError. Releases the GIL.")
        .def_property_readonly("pid", &DirtyTracker::pid)
        .def_property_readonly(
            "backend",
            [](const DirtyTracker& self) { return std::string(name_of(self.backend())); },
            "The one that is used.")
        .def("mark", &DirtyTracker::mark, unlocked,
             "From now on, what was written until now does not count.\n"
             "Raises as scan(). Releases the GIL.")
        .def("scan", &DirtyTracker::scan, unlocked, py::arg("remark") = false,
             "What was written since the last mark. remark: mark in the same step; with\n"
             "write-protect no write is lost between the two, with soft-dirty those of that\n"
             "moment are.\n"
             "Raises ProcessLookupError if the process has ended or executed another program,\n"
             "ValueError after close(), OSError. Releases the GIL.")
        .def("close", &DirtyTracker::close, unlocked,
             "Stop tracking; nothing is left of it in the process. Can be called again.")
        .def("__enter__", [](py::object self) { return self; })
        .def("__exit__", [](DirtyTracker& self, const py::args&) {
            const py::gil_scoped_release released;
            self.close();
        });

    m.def("dirty_backends", &backends,
          "Name of each backend -> why it cannot work on this machine; \"\": it can. Tried out on\n"
          "a page of this process. Releases the GIL.");
}

} // namespace gpustasis::bindings
