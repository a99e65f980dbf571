// SPDX-License-Identifier: Apache-2.0
/// What one restore reads beside CRIU's images, checked before anything is created: the manifest,
/// the images that it lists, and what CRIU's inventory says of both.
#pragma once

#include "core/image_reader.hpp"
#include "core/lineage.hpp"
#include "core/manifest.hpp"
#include "cuda_plugin/config.hpp"

#include <cstdint>
#include <map>

namespace gpustasis {

class RestoreImages {
public:
    using ByPid = std::map<std::uint32_t, ImageReader>; ///< in the innermost namespace

    /// All outlive it.
    RestoreImages(const Config& config, int image_dir, Lineage& lineage)
        : config_(config), image_dir_(image_dir), lineage_(lineage) {}

    /// Once. False: the checkpoint is none of this plugin. Throws Error: corrupt_data, also if an
    /// image that the dump has made is not listed; as ImageReader::open and attach_sources.
    bool read();

    /// An empty one if there is none.
    const Manifest& manifest() const noexcept { return manifest_; }
    /// False: the checkpoint is the stock plugin's.
    bool has_manifest() const noexcept { return has_manifest_; }
    /// The inventory says: restorable by this plugin alone.
    bool externalized() const noexcept { return externalized_; }
    const ByPid& of_gpu() const noexcept { return of_gpu_; }
    const ByPid& of_cpu() const noexcept { return of_cpu_; }

private:
    void open(const ManifestTask& task);
    void require_all() const;

    const Config& config_;
    int image_dir_;
    Lineage& lineage_;
    Manifest manifest_;
    ByPid of_gpu_;
    ByPid of_cpu_;
    bool has_manifest_ = false;
    bool externalized_ = false;
};

} // namespace gpustasis
