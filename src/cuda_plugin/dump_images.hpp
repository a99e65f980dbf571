// SPDX-License-Identifier: Apache-2.0
/// What one dump writes beside CRIU's images: images, the manifest, and names in CRIU's inventory.
#pragma once

#include "core/image_writer.hpp"
#include "core/lineage.hpp"
#include "core/manifest.hpp"
#include "core/stored_memory.hpp"
#include "cuda_plugin/config.hpp"
#include "cuda_plugin/parent_choice.hpp"
#include "cuda_plugin/statistics.hpp"

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

namespace gpustasis {

class DumpImages {
public:
    /// All outlive it. `config` is read when something is done, and may be settled until then.
    DumpImages(const Config& config, int image_dir, Lineage& lineage, Statistics& statistics)
        : config_(config), image_dir_(image_dir), lineage_(lineage), statistics_(statistics) {}

    /// While the tasks still run, and before the worker starts: it inherits the files of the chain.
    void choose_parent(const ContainerStore* store);

    /// Once; later calls do nothing. What an earlier dump left in this directory must never be taken for
    /// this one's. Throws Error: io.
    void begin();

    /// Write the image of frozen task `pid`, whose regions are `regions`, read from `memory`. Throws as
    /// write_image.
    WriteResult write(pid_t pid, ManifestTask& task, std::vector<Region> regions,
                      MemorySource& memory);
    /// The same, read from the task.
    WriteResult write(pid_t pid, ManifestTask& task, std::vector<Region> regions);

    /// Put `task` into the manifest, which is written anew, after CRIU's inventory names what it has.
    void note(ManifestTask task);

    Manifest& manifest() noexcept { return manifest_; }
    /// Whether stock CRIU will refuse the checkpoint.
    bool named_ours() const noexcept { return named_ours_; }

private:
    void note_in_inventory(bool externalized);
    void name_images();

    const Config& config_;
    int image_dir_;
    Lineage& lineage_;
    Statistics& statistics_;
    ParentChoice parent_;
    Manifest manifest_;
    StoredMemory stored_;     ///< what the manifest has, and the image that it has next
    std::string images_name_; ///< that the inventory has; empty: none yet
    bool begun_ = false;
    bool named_ours_ = false;
    bool named_stock_ = false;
};

} // namespace gpustasis
