// SPDX-License-Identifier: Apache-2.0
/// What CRIU's inventory.img says of a checkpoint of ours, as names of plugins that the restore
/// needs. None of them may begin with another: CRIU before 4.3 compares only as many bytes as it is
/// asked for, and later ones cannot be asked for the beginning of a name.
#pragma once

#include "core/image_info.hpp"

#include <string>

namespace gpustasis {

/// Of a checkpoint that only this plugin can restore.
inline constexpr const char* kInventoryName = "gpustasis";
/// Of one that the stock CUDA plugin can restore too.
inline constexpr const char* kStockInventoryName = "cuda_plugin";
/// Of one that has a name by inventory_images_name() too.
inline constexpr const char* kInventoryNamesImages = "names-images";

/// Of one in which something stands for files of the driver's devices (inherited_files.hpp).
inline constexpr const char* kInventoryInherited = "inherited-files";

/// Ties CRIU's images to one manifest: "checkpoint-<checkpoint id in hex>".
std::string inventory_id_name(const Id& checkpoint_id);

/// Says which memory is in images of ours, and not in CRIU's: "images-<StoredMemory::digest>".
std::string inventory_images_name(const Id& digest);

} // namespace gpustasis
