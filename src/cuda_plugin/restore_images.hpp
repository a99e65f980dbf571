// SPDX-License-Identifier: Apache-2.0
/// What one restore reads beside CRIU's images, checked before anything is created: the manifest,
/// the images that it lists, and what CRIU's inventory says of both.
#pragma once

#include "core/image_reader.hpp"
#include "core/lineage.hpp"
#include "core/manifest.hpp"
#include "core/unique_fd.hpp"
#include "cuda_plugin/config.hpp"
#include "cuda_plugin/signature_check.hpp"
#include "cuda_plugin/undo_images.hpp"
#include "seal/sealed_checkpoint.hpp"

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace gpustasis {

class RestoreImages {
public:
    using ByPid = std::map<std::uint32_t, ImageReader>; ///< in the innermost namespace

    /// All outlive it. `images`: of the same directory; gets the key of what is sealed. Its lineage becomes that of the
    /// directory where the images are (core/arena.hpp).
    RestoreImages(const Config& config, int image_dir, UndoImages& images)
        : config_(config), image_dir_(image_dir), undo_images_(images), lineage_(images.lineage()),
          signature_(config, image_dir) {}

    /// Once, before the worker starts. False: the checkpoint is none of this plugin. Throws Error: corrupt_data, also if an
    /// image that the dump has made is not listed; as ImageReader::open and attach_sources, stored_directory().
    bool read();

    /// After read(): CRIU's images in a directory in memory, if they are packed, or sealed with ours; none if they
    /// are where criu looks. Throws as unpack_images() and unseal_images().
    UniqueFd unpack() const;

    /// All memory is in its place, and nothing is read any more: nobody is kept from removing what was.
    void release() noexcept;

    /// An empty one if there is none.
    const Manifest& manifest() const noexcept { return manifest_; }
    /// False: the checkpoint is the stock plugin's.
    bool has_manifest() const noexcept { return has_manifest_; }
    /// The inventory says: restorable by this plugin alone.
    bool externalized() const noexcept { return externalized_; }
    /// The inventory says that files of the driver's devices were left out.
    bool has_inherited_files() const noexcept { return inherited_files_; }
    const ByPid& of_gpu() const noexcept { return of_gpu_; }
    const ByPid& of_cpu() const noexcept { return of_cpu_; }

private:
    Manifest read_manifest();
    ImageReader open_image(const std::string& name) const;
    void open(const ManifestTask& task);
    void require_all() const;

    const Config& config_;
    int image_dir_;   ///< criu's
    UniqueFd stored_; ///< where manifest and images of ours are: there, or in an arena
    UndoImages& undo_images_;
    std::optional<Lineage> image_dir_lock_; ///< nobody removes it, wherever its images of ours are
    Lineage& lineage_;
    SignatureCheck signature_;
    std::optional<seal::SealedCheckpoint> sealed_; ///< none: it is in the clear
    std::size_t known_ancestors_ = 0;              ///< whose keys the envelope held
    Manifest manifest_;
    ByPid of_gpu_;
    ByPid of_cpu_;
    bool has_manifest_ = false;
    bool externalized_ = false;
    bool inherited_files_ = false;
};

} // namespace gpustasis
