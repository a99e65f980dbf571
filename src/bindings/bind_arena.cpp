// SPDX-License-Identifier: Apache-2.0
#include "bindings/bind.hpp"
#include "bindings/convert.hpp"
#include "core/arena.hpp"
#include "core/image_drain.hpp"
#include "core/lineage.hpp"

#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <cstdint>
#include <filesystem>
#include <optional>

namespace py = pybind11;

namespace gpustasis::bindings {
namespace {

std::filesystem::path stored_directory_of(const std::filesystem::path& dir) {
    const UniqueFd opened = open_dir(dir);
    const UniqueFd stored = stored_directory(opened.get());
    // As it was given, where that is the place.
    const std::filesystem::path found = directory_path(stored.get());
    return found == directory_path(opened.get()) ? dir : found;
}

Manifest drain(const std::filesystem::path& arena, const std::filesystem::path& images,
               const std::optional<std::filesystem::path>& parent, unsigned threads, bool compress,
               std::uint64_t rate, const Tell& progress) {
    const py::gil_scoped_release unlocked;
    const UniqueFd below = parent ? open_dir(*parent) : UniqueFd();
    return drain_images(open_dir(arena).get(), open_dir(images).get(), below ? below.get() : -1,
                        {.threads = threads, .compress = compress, .rate = rate},
                        progress_of(progress));
}

} // namespace

void bind_arena(py::module_& m) {
    m.attr("ARENA_MARKER") = kArenaMarker;
    m.attr("ARENA_OWNER") = kArenaOwner;
    m.attr("ARENA_OVER") = kArenaOver;
    py::class_<ArenaMarker>(m, "ArenaMarker", "What the marker in an image directory says.")
        .def_property_readonly(
            "checkpoint_id", [](const ArenaMarker& self) { return to_python(self.checkpoint_id); })
        .def_property_readonly(
            "directory", [](const ArenaMarker& self) { return to_python(self.directory); },
            "of the checkpoint in the arena")
        .def_property_readonly("boot_id",
                               [](const ArenaMarker& self) { return to_python(self.boot_id); });
    py::class_<ArenaOwner>(m, "ArenaOwner", "Whose a directory in an arena is.")
        .def_property_readonly("checkpoint_id",
                               [](const ArenaOwner& self) { return to_python(self.checkpoint_id); })
        .def_property_readonly("boot_id",
                               [](const ArenaOwner& self) { return to_python(self.boot_id); })
        .def_readonly("time", &ArenaOwner::time, "of the dump, s since 1970")
        .def_readonly("device", &ArenaOwner::device, "of the image directory")
        .def_readonly("inode", &ArenaOwner::inode, "of the image directory")
        .def_readonly("limit", &ArenaOwner::limit, "bytes that the arena may hold")
        .def_readonly("pool", &ArenaOwner::pool,
                      "of these, bytes of files to be written into again; 0: automatic")
        .def_property_readonly(
            "images", [](const ArenaOwner& self) { return to_python(self.images); },
            "path of the image directory, as the dump saw it");
    m.def(
        "find_arena_marker",
        [](const std::filesystem::path& dir) { return find_marker(open_dir(dir).get()); },
        py::arg("dir"),
        "The marker in an image directory; None: there is none. Raises OSError, CorruptDataError,\n"
        "UnsupportedDataError.");
    m.def(
        "is_arena_lost",
        [](const std::filesystem::path& dir) {
            const std::optional<ArenaMarker> marker = find_marker(open_dir(dir).get());
            return marker && is_lost(*marker);
        },
        py::arg("dir"),
        "Whether the memory that the marker in an image directory leads to is gone for certain; "
        "False:\n"
        "it is there, or there is no marker. Raises OSError if that cannot be told, ValueError,\n"
        "CorruptDataError, UnsupportedDataError.");
    m.def(
        "read_arena_owner",
        [](const std::filesystem::path& dir) { return read_owner(open_dir(dir).get()); },
        py::arg("dir"),
        "Of a directory in an arena. Raises OSError (also if there is none), CorruptDataError,\n"
        "UnsupportedDataError, ValueError if others can write there.");
    m.def(
        "require_arena",
        [](const std::filesystem::path& dir) { require_arena(open_dir(dir).get(), dir.string()); },
        py::arg("dir"),
        "Raises ValueError unless the directory is on a tmpfs, root's or this user's, and has "
        "mode\n"
        "0700; OSError.");
    m.def(
        "stored_directory", &stored_directory_of, py::arg("dir"),
        "Where the manifest and the images of the checkpoint in image directory `dir` are: there,\n"
        "or in an arena. Raises OSError if that is gone, and the checkpoint lost; ValueError,\n"
        "CorruptDataError if it is no arena, or another checkpoint's.");
    m.def(
        "drain_images", &drain, py::arg("arena"), py::arg("images"), py::arg("parent"),
        py::kw_only(), py::arg("threads") = 0, py::arg("compress") = true, py::arg("rate") = 0,
        py::arg("progress") = py::none(),
        "Write the images of the checkpoint in `arena`, a directory of an arena, to `images`, "
        "with\n"
        "references into those of `parent`. Each is complete and durable on return. Returns the\n"
        "manifest of what was written, which is for the caller to write. rate: bytes of images "
        "that\n"
        "are written in a second, at most; 0: no limit. progress(bytes of memory read).\n"
        "Raises CorruptDataError, OSError, ValueError if `parent` is not the one that it is built\n"
        "on. Releases the GIL.");
}

} // namespace gpustasis::bindings
