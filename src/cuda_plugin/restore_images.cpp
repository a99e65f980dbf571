// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/restore_images.hpp"

#include "core/error.hpp"
#include "core/stored_memory.hpp"
#include "cuda_plugin/host.hpp"
#include "cuda_plugin/inventory_names.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <string>
#include <utility>
#include <vector>

namespace gpustasis {
namespace {

// No inventory names this; an image from before CRIU recorded plugins answers yes to anything.
constexpr const char* kNobody = "no-such-plugin";

bool manifest_exists(int image_dir) {
    return ::faccessat(image_dir, kManifestName, F_OK, 0) == 0;
}

} // namespace

bool RestoreImages::read() {
    const bool before_plugin_lists = host::take_inventory_plugin(kNobody);
    const bool ours = host::take_inventory_plugin(kInventoryName);
    const bool stock = host::take_inventory_plugin(kStockInventoryName);
    if (!ours && !stock)
        return false;
    has_manifest_ = manifest_exists(image_dir_);
    externalized_ = ours && (!before_plugin_lists || has_manifest_);
    if (!externalized_ && !has_manifest_)
        return true;

    manifest_ = read_manifest(image_dir_);
    if (externalized_ && !host::take_inventory_plugin(inventory_id_name(manifest_.checkpoint_id)))
        throw Error(Errc::corrupt_data, std::string(kManifestName) +
                                            " is not the one that CRIU's images in this "
                                            "directory were made with");
    for (const ManifestTask& task : manifest_.tasks)
        if (task.externalized)
            open(task);
    if (externalized_)
        require_all();
    return true;
}

void RestoreImages::open(const ManifestTask& task) {
    const std::string name = task.image_name();
    if (!externalized_)
        throw Error(Errc::corrupt_data, std::string(kManifestName) + " lists " + name +
                                            ", which CRIU's inventory knows nothing of");
    ImageReader image = ImageReader::open(image_dir_, name, config_.io);
    if (image.digest() != task.digest || image.info().pid != task.pid ||
        image.info().kind != task.kind || image.info().checkpoint_id != manifest_.checkpoint_id ||
        image.info().parent_id != manifest_.parent_id)
        throw Error(Errc::corrupt_data, name + " is not the image that " + kManifestName +
                                            " lists: it belongs to another checkpoint or "
                                            "another process");
    image.attach_sources(lineage_);
    ByPid& images = task.kind == MemoryKind::cpu ? of_cpu_ : of_gpu_;
    images.emplace(task.pid, std::move(image));
}

// What a dump has put into images of ours, CRIU's lack: without it a process would run on zeros.
void RestoreImages::require_all() const {
    StoredMemory stored;
    for (const ManifestTask& task : manifest_.tasks) {
        const ByPid& images = task.kind == MemoryKind::cpu ? of_cpu_ : of_gpu_;
        const auto image = images.find(task.pid);
        stored.add(task,
                   image == images.end() ? std::vector<Region>{} : image->second.info().regions);
    }
    const bool is_named = host::take_inventory_plugin(kInventoryNamesImages);
    const bool is_same = host::take_inventory_plugin(inventory_images_name(stored.digest()));
    if (is_named && is_same)
        return;
    if (is_named || (of_gpu_.empty() && of_cpu_.empty()))
        throw Error(Errc::corrupt_data, std::string(kManifestName) +
                                            " does not list the memory that the dump has "
                                            "left out of CRIU's images: a process would run "
                                            "without it");
    host::warn("an older gpustasis made this checkpoint: nothing says whether its manifest lists "
               "all images");
}

} // namespace gpustasis
