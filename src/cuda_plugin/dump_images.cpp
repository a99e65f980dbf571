// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/dump_images.hpp"

#include "core/error.hpp"
#include "core/process_memory.hpp"
#include "core/random_id.hpp"
#include "cuda_plugin/host.hpp"
#include "cuda_plugin/inventory_names.hpp"
#include "cuda_plugin/proc.hpp"
#include "cuda_plugin/worker_process.hpp"

#include <unistd.h>

#include <cerrno>
#include <utility>

namespace gpustasis {

void DumpImages::choose_parent(const ContainerStore* store) {
    parent_ = statistics_.phases.time(
        "read_parent", [&] { return gpustasis::choose_parent(config_, lineage_, store); });
    statistics_.parent_directory = parent_.directory;
    statistics_.full_because = parent_.reason;
    if (parent_.index) {
        manifest_.parent_id = parent_.index->manifest().checkpoint_id;
        manifest_.chain_length = parent_.index->manifest().chain_length + 1;
        statistics_.parent_id = id_text(manifest_.parent_id);
        statistics_.chain_length = manifest_.chain_length;
        host::info("parent: " + parent_.directory + ", " + std::to_string(parent_.index->size()) +
                   " chunks");
    } else {
        host::info("a full checkpoint: " + parent_.reason);
    }
}

void DumpImages::begin() {
    if (std::exchange(begun_, true))
        return;
    for (const char* old : {kManifestName, kUndoLogName})
        if (::unlinkat(image_dir_, old, 0) != 0 && errno != ENOENT)
            throw io_error(std::string("cannot remove the old ") + old, errno);
    manifest_.checkpoint_id = random_id();
}

WriteResult DumpImages::write(pid_t pid, ManifestTask& task, std::vector<Region> regions) {
    ProcessMemory memory(pid);
    return write(pid, task, std::move(regions), memory);
}

WriteResult DumpImages::write(pid_t pid, ManifestTask& task, std::vector<Region> regions,
                              MemorySource& memory) {
    ImageInfo info;
    info.checkpoint_id = manifest_.checkpoint_id;
    info.pid = task.pid;
    info.kind = task.kind;
    info.start_time = proc::start_time(pid);
    info.boot_id = proc::boot_id();
    info.comm = proc::comm(pid);
    info.state_before = task.state_before;
    if (task.kind == MemoryKind::gpu) {
        info.driver_api_version = manifest_.driver_api_version;
        info.driver_version = manifest_.driver_version;
        info.gpus = manifest_.gpus;
    }
    info.chunk_size = config_.chunk_size;
    info.regions = std::move(regions);
    const WriteOptions options{.threads = config_.threads,
                               .compress = config_.compress,
                               .io = config_.io,
                               .parent = parent_.index ? &*parent_.index : nullptr,
                               .check_parent = config_.check_parent};
    WriteResult written = write_image(image_dir_, task.image_name(), info, memory, options);
    if (written.damaged_in_parent != 0)
        host::warn("the parent is damaged: " + std::to_string(written.damaged_in_parent) +
                   " chunks of pid " + std::to_string(pid) +
                   " were stored anew, the first because of " + written.first_damage +
                   "; gpustasis verify says what depends on it");
    task.externalized = true;
    task.digest = written.digest;
    stored_.add(task, info.regions);
    return written;
}

void DumpImages::note(ManifestTask task) {
    if (!task.externalized)
        stored_.add(task, {});
    // Once the inventory has our name, stock criu will not restore a process without its memory.
    note_in_inventory(task.externalized);
    manifest_.add(std::move(task));
    write_manifest(image_dir_, manifest_);
}

void DumpImages::note_in_inventory(bool externalized) {
    if (externalized && !named_ours_) {
        host::add_inventory_plugin(inventory_id_name(manifest_.checkpoint_id));
        host::add_inventory_plugin(kInventoryNamesImages);
        host::add_inventory_plugin(kInventoryName);
        named_ours_ = true;
    } else if (!externalized && !named_stock_) {
        host::add_inventory_plugin(kStockInventoryName);
        named_stock_ = true;
    }
    if (named_ours_)
        name_images();
}

// criu writes the names when all is dumped; until then each replaces the one before.
void DumpImages::name_images() {
    if (!images_name_.empty() && !host::take_inventory_plugin(images_name_))
        throw Error(Errc::io, "criu's list of plugins lacks \"" + images_name_ + "\"");
    images_name_ = inventory_images_name(stored_.digest());
    host::add_inventory_plugin(images_name_);
}

} // namespace gpustasis
