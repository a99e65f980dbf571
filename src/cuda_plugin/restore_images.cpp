// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/restore_images.hpp"

#include "core/arena.hpp"
#include "core/error.hpp"
#include "core/stored_memory.hpp"
#include "cuda_plugin/early_images.hpp"
#include "cuda_plugin/host.hpp"
#include "cuda_plugin/inventory_names.hpp"
#include "cuda_plugin/packed_restore.hpp"
#include "cuda_plugin/sealed_key.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <utility>
#include <vector>

namespace gpustasis {
namespace {

// No inventory names this; an image from before CRIU recorded plugins answers yes to anything.
constexpr const char* kNobody = "no-such-plugin";

bool is_same(int one, int other) {
    struct stat a {};
    struct stat b {};
    if (::fstat(one, &a) != 0 || ::fstat(other, &b) != 0)
        throw io_error("cannot examine the image directory", errno);
    return a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

bool exists(int image_dir, const char* name) {
    return ::faccessat(image_dir, name, F_OK, AT_SYMLINK_NOFOLLOW) == 0;
}

} // namespace

bool RestoreImages::read() {
    signature_.check_own();
    const bool before_plugin_lists = host::take_inventory_plugin(kNobody);
    const bool ours = host::take_inventory_plugin(kInventoryName);
    const bool stock = host::take_inventory_plugin(kStockInventoryName);
    inherited_files_ = host::take_inventory_plugin(kInventoryInherited) && !before_plugin_lists;
    if (!ours && !stock)
        return false;
    image_dir_lock_.emplace(std::move(lineage_)); // CRIU reads its images there to the end
    stored_ = stored_directory(image_dir_);
    const auto follow_drain = [&] {
        UniqueFd now = stored_directory(image_dir_);
        if (is_same(now.get(), stored_.get()))
            return false;
        stored_ = std::move(now);
        lineage_ = Lineage(stored_.get());
        return true;
    };
    try {
        lineage_ = Lineage(stored_.get());
    } catch (const Error&) { // a drain that has just ended removes what is there
        if (!follow_drain())
            throw;
    }
    // One that ended before that was locked has left nothing there.
    follow_drain();
    has_manifest_ = exists(stored_.get(), kManifestName);
    if (holds_sealed(image_dir_)) {
        if (has_manifest_)
            throw Error(Errc::corrupt_data,
                        std::string(kManifestName) + " lies in the clear beside a sealed one");
        const seal::DataKey key =
            open_sealed_key(image_dir_, config_.private_key, "the checkpoint");
        sealed_.emplace(image_dir_, key, config_.io);
        undo_images_.use_key(key);
        has_manifest_ = sealed_->has(kManifestName);
        known_ancestors_ = key.ancestor_count();
    }
    externalized_ = ours && (!before_plugin_lists || has_manifest_);
    if (!externalized_ && !has_manifest_)
        return true;

    manifest_ = read_manifest();
    if (externalized_ && !host::take_inventory_plugin(inventory_id_name(manifest_.checkpoint_id)))
        throw Error(Errc::corrupt_data, std::string(kManifestName) +
                                            " is not the one that CRIU's images in this "
                                            "directory were made with");
    if (manifest_.pack && !externalized_)
        throw Error(Errc::corrupt_data, std::string(kManifestName) +
                                            " names a pack of CRIU's images, which CRIU's "
                                            "inventory knows nothing of");
    if (sealed_ && manifest_.chain_length != known_ancestors_)
        throw Error(Errc::corrupt_data, std::string(kManifestName) + ": is built on " +
                                            std::to_string(manifest_.chain_length) +
                                            " checkpoints, and the envelope holds the keys of " +
                                            std::to_string(known_ancestors_));
    signature_.check_chain(lineage_, manifest_.chain_length);
    for (const ManifestTask& task : manifest_.tasks)
        if (task.externalized)
            open(task);
    if (externalized_)
        require_all();
    return true;
}

UniqueFd RestoreImages::unpack() const {
    if (!sealed_)
        return unpack_images(config_, image_dir_, manifest_);
    if (manifest_.pack)
        throw Error(Errc::unsupported,
                    "a packed checkpoint that was sealed when it was finished is "
                    "not restored as it is: gpustasis unseal comes first");
    return sealed_->has(kInventoryImage) ? unseal_images(image_dir_, *sealed_) : UniqueFd();
}

void RestoreImages::release() noexcept {
    of_gpu_.clear();
    of_cpu_.clear();
    sealed_.reset();
    lineage_.close();
    image_dir_lock_.reset();
    stored_ = UniqueFd();
}

Manifest RestoreImages::read_manifest() {
    if (!sealed_)
        return gpustasis::read_manifest(stored_.get());
    return parse_manifest(sealed_->read(kManifestName, max_manifest_size()), kManifestName);
}

ImageReader RestoreImages::open_image(const std::string& name) const {
    const bool is_local = exists(stored_.get(), kArenaOwner); // memory has no other way
    if (!sealed_)
        return ImageReader::open(stored_.get(), name, is_local ? IoMode::buffered : config_.io);
    if (!sealed_->has(name))
        throw Error(Errc::corrupt_data, "no sealed file holds " + name);
    return ImageReader::from_input(sealed_->input(name), name);
}

void RestoreImages::open(const ManifestTask& task) {
    const std::string name = task.image_name();
    if (!externalized_)
        throw Error(Errc::corrupt_data, std::string(kManifestName) + " lists " + name +
                                            ", which CRIU's inventory knows nothing of");
    ImageReader image = open_image(name);
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
