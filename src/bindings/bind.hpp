// SPDX-License-Identifier: Apache-2.0
/// The parts of gpustasis._core; each binds one noun and holds no logic of its own.
#pragma once

#include <pybind11/pybind11.h>

namespace gpustasis::bindings {

void bind_arena(pybind11::module_& m);
void bind_errors(pybind11::module_& m);
void bind_dirty_tracker(pybind11::module_& m);
void bind_dropped_memory(pybind11::module_& m);
void bind_codec(pybind11::module_& m);
void bind_info(pybind11::module_& m);
void bind_image(pybind11::module_& m);
void bind_manifest(pybind11::module_& m);
void bind_pack(pybind11::module_& m);
void bind_parent(pybind11::module_& m);
void bind_requirements(pybind11::module_& m);
void bind_seal(pybind11::module_& m);
void bind_signature(pybind11::module_& m);

} // namespace gpustasis::bindings
