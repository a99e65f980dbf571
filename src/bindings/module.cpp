// SPDX-License-Identifier: Apache-2.0
#include "bindings/bind.hpp"

PYBIND11_MODULE(_core, m) {
    using namespace gpustasis::bindings;
    m.doc() = "Checkpoint images in C++. Buffers are not copied; long calls release the GIL.";
    bind_errors(m);
    bind_codec(m);
    bind_info(m);
    bind_parent(m);
    bind_image(m);
    bind_requirements(m);
    bind_manifest(m);
    bind_arena(m);
    bind_pack(m);
    bind_seal(m);
    bind_signature(m);
    bind_dirty_tracker(m);
    bind_dropped_memory(m);
}
