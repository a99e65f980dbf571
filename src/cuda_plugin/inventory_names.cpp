// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/inventory_names.hpp"

#include "core/lineage.hpp"

namespace gpustasis {

std::string inventory_id_name(const Id& checkpoint_id) {
    return "checkpoint-" + id_text(checkpoint_id);
}

std::string inventory_images_name(const Id& digest) {
    return "images-" + id_text(digest);
}

} // namespace gpustasis
