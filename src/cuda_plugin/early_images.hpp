// SPDX-License-Identifier: Apache-2.0
/// CRIU's images that its restore reads before it asks any plugin: of a packed checkpoint they lie in the open as
/// well. CRIU 4.1 reads the inventory alone so early; 4.2 and later the tree and its namespaces, too.
#pragma once

#include <string>
#include <vector>

namespace gpustasis {

inline constexpr const char* kInventoryImage = "inventory.img";

bool is_read_early(const std::string& name);

/// Whatever an earlier dump has left of them in `image_dir` is gone: that was no checkpoint any more.
/// Throws Error: io.
void remove_early_images(int image_dir);

/// Before anything is written to it: the manifest that a dump which was broken off has left without its name, and the
/// inventory of an earlier one, are gone. Throws Error: io.
void remove_unfinished(int image_dir);

/// Copy those of the files `names` of `from` into `image_dir`, durably, and the inventory last of all: what
/// lacks it is no checkpoint. On an exception none is left. Throws Error: io; corrupt_data.
void copy_early_images(int from, const std::vector<std::string>& names, int image_dir);

/// Throws Error: corrupt_data if those in `image_dir` are not those of `unpacked`, all of CRIU's images; io.
void require_early_images(int unpacked, int image_dir);

} // namespace gpustasis
