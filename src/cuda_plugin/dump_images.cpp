// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/dump_images.hpp"

#include "core/error.hpp"
#include "core/process_memory.hpp"
#include "core/random_id.hpp"
#include "cuda_plugin/early_images.hpp"
#include "cuda_plugin/host.hpp"
#include "cuda_plugin/inventory_names.hpp"
#include "cuda_plugin/memory_directory.hpp"
#include "cuda_plugin/proc.hpp"
#include "cuda_plugin/worker_process.hpp"
#include "seal/sealed_checkpoint.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <iterator>
#include <utility>

namespace gpustasis {

void DumpImages::use_arena(ArenaDump& arena) {
    arena_ = &arena;
    statistics_.arena_directory = directory_path(arena.directory());
}

void DumpImages::choose_parent(const ContainerStore* store) {
    if (sealed_)
        require_sealable(config_); // a policy may have been settled since
    ParentChoice parent = statistics_.phases.time("read_parent", [&] {
        return gpustasis::choose_parent(config_, image_dir_, lineage_, store,
                                        sealed_ ? &*sealed_ : nullptr);
    });
    statistics_.parent_directory = parent.directory;
    statistics_.full_because = parent.reason;
    if (parent.index) {
        manifest_.parent_id = parent.index->manifest().checkpoint_id;
        manifest_.chain_length = parent.index->manifest().chain_length + 1;
        statistics_.parent_id = id_text(manifest_.parent_id);
        statistics_.chain_length = manifest_.chain_length;
        host::info("parent: " + parent.directory + ", " + std::to_string(parent.index->size()) +
                   " chunks");
        known_ = std::move(parent.index);
        parent_held_ = std::move(parent.held);
    } else {
        host::info("a full checkpoint: " + parent.reason);
    }
    parent_is_chosen_ = true;
    if (sealed_ && begun_)
        sealed_->write_envelope();
}

const seal::DataKey* DumpImages::seal() {
    if (!config_.recipients.empty() && !sealed_)
        sealed_.emplace(config_, image_dir_);
    return sealed_ ? &sealed_->key() : nullptr;
}

// What is sealed or read early is in the way of nobody: it is removed, or replaced.
void DumpImages::refuse_clear_images() const {
    if (!sealed_)
        return;
    for (const std::string& name : names_in(image_dir_)) {
        const bool goes = name == kManifestName || name == kPackName || is_read_early(name) ||
                          seal::sealed_file_id(name) != 0;
        if (name.ends_with(".img") && !goes)
            throw Error(Errc::bad_argument,
                        "recipients: the image directory holds " + name +
                            " of an earlier checkpoint, in the clear: use another directory");
    }
}

void DumpImages::require_as_asked() const {
    if (!is_as_asked())
        throw Error(Errc::io,
                    "a layout or recipients are asked for, and the dump was not begun with "
                    "them: the container's policy could not be read then, or another "
                    "plugin has answered PAUSE_DEVICES; try again");
}

void DumpImages::withdraw() noexcept {
    try {
        remove_early_images(image_dir_);
        if (::unlinkat(stored_in(), kManifestName, 0) != 0 && errno != ENOENT)
            throw io_error(std::string("cannot remove ") + kManifestName, errno);
        const UniqueFd directory(::openat(image_dir_, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
        if (!directory || ::fsync(directory.get()) != 0)
            throw io_error("cannot sync the image directory", errno);
    } catch (const std::exception& e) {
        host::error(std::string("what this dump has left is no checkpoint: remove it: ") +
                    e.what());
    }
}

void DumpImages::begin() {
    if (begun_)
        return;
    remove_marker(image_dir_); // where a drain is at work, nothing is removed
    for (const char* old : {kManifestName, kUndoLogName, kPackName})
        if (::unlinkat(image_dir_, old, 0) != 0 && errno != ENOENT)
            throw io_error(std::string("cannot remove the old ") + old, errno);
    const bool keeps_link = parent_is_chosen_ && arena_ == nullptr;
    if (!keeps_link && ::unlinkat(image_dir_, kParentLink, 0) != 0 && errno != ENOENT)
        throw io_error(std::string("cannot remove the old ") + kParentLink, errno);
    seal::remove_sealed_files(image_dir_);
    remove_unfinished(image_dir_);
    manifest_.checkpoint_id = arena_ != nullptr ? arena_->id() : random_id();
    if (arena_ != nullptr)
        arena_->mark();
    begun_ = true;                    // last: what has failed is tried, and refused, anew
    if (sealed_ && parent_is_chosen_) // else it is not known yet whose keys it is to hold
        sealed_->write_envelope();
}

void DumpImages::begin_pack() {
    packs_ = true;
    note_in_inventory(true);
}

void DumpImages::pack(int directory, const std::vector<std::string>& names) {
    if (sealed_) {
        pack_sealed(*sealed_, directory, names);
        return;
    }
    const PackResult packed = write_pack(manifest_.checkpoint_id, directory, names, image_dir_,
                                         {.threads = config_.threads,
                                          .compress = config_.compress,
                                          .chunk_size = config_.chunk_size,
                                          .io = config_.io});
    try {
        manifest_.pack = packed.digest;
        manifest_file_.reset();
        write_manifest(image_dir_, manifest_);
        copy_early_images(directory, names, image_dir_);
    } catch (const Error&) {
        ::unlinkat(image_dir_, kPackName, 0);
        throw;
    }
    host::info("packed " + std::to_string(packed.files) + " images of CRIU, " +
               std::to_string(packed.plain_size >> 10) + " KiB, as " +
               std::to_string(packed.file_size >> 10) + " KiB");
}

// On an exception the sealed images stay: the undo may still need them.
void DumpImages::pack_sealed(SealedDump& dump, int directory,
                             const std::vector<std::string>& names) {
    try {
        const seal::SealedSizes sealed =
            dump.write_files(manifest_, directory, names, config_.threads);
        copy_early_images(directory, names, image_dir_);
        finished_ = true;
        host::info("sealed " + std::to_string(names.size()) + " images of CRIU, " +
                   std::to_string(sealed.plain_size >> 10) + " KiB");
    } catch (const Error&) {
        ::unlinkat(image_dir_, seal::kSealedName, 0);
        throw;
    }
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
    const std::string owner = proc::rights(pid);
    const WriteOptions options = write_options(&known_chunks(owner));
    WriteResult written;
    if (sealed_)
        sealed_->write_image(task.image_name(), options.alignment, [&](ImageOutput& output) {
            written = write_image(output, info, memory, options);
        });
    else if (arena_ != nullptr)
        written = arena_->write(task.image_name(), info, memory, options);
    else
        written = write_image(image_dir_, task.image_name(), info, memory, options);
    if (written.damaged_in_parent != 0)
        warn_of_damage(pid, written.damaged_in_parent, written.first_damage);
    task.externalized = true;
    task.digest = written.digest;
    stored_.add(task, info.regions);
    if (!sealed_) // sealed images share nothing
        not_known_.emplace_back(task, owner);
    return written;
}

void DumpImages::warn_of_damage(pid_t pid, std::uint64_t count, const std::string& first) const {
    host::warn("the parent is damaged, or an image of this dump: " + std::to_string(count) +
               " chunks of pid " + std::to_string(pid) +
               " were stored anew, the first because of " + first +
               "; gpustasis verify says what depends on it");
}

void DumpImages::leave(TaskRecord& record) {
    if (sealed_)
        record.direct.left_file = sealed_->leave_image();
}

// What criu has opened of a sealed chain needs keys that fork() does not copy: it is opened anew, once, by the key
// that was handed on.
const ParentIndex* DumpImages::known_in_worker(const UndoImages& images) {
    const std::lock_guard lock(reopening_);
    if (known_ && sealed_ && config_.check_parent && !reopened_) {
        images.reopen(*known_);
        reopened_ = true;
    }
    return known_ ? &*known_ : nullptr;
}

// The number goes first: whatever fails from here on, nothing is sealed under it again.
std::unique_ptr<seal::SealedOutput> DumpImages::left_output(TaskRecord& record,
                                                            const UndoImages& images,
                                                            const std::string& name,
                                                            const WriteOptions& options) {
    const std::uint32_t file_id = record.direct.left_file.exchange(0);
    if (file_id == 0 || images.key() == nullptr)
        throw Error(Errc::bad_argument, std::string("to be sealed, and the worker has no ") +
                                            (file_id == 0 ? "number left for it" : "key"));
    seal::FreshKey key = seal::FreshKey::of_left_file(*images.key(), file_id);
    return std::make_unique<seal::SealedOutput>(
        key, lineage_.directory(0), options_of_image(file_id, name, options.alignment, options.io));
}

WriteResult DumpImages::write(TaskRecord& record, const DriverFacts& facts,
                              const UndoImages& images, const std::function<Memory()>& open) {
    const std::string name = image_name(record.image_pid);
    // As criu says, also where this process, for whatever reason, would know nothing of it.
    const std::uint32_t left_file = record.direct.left_file;
    const bool is_sealed = sealed_ || left_file != 0;
    const std::string named = is_sealed ? seal::sealed_name(left_file) + " with " + name : name;
    const auto write_to = [&](ImageOutput& output, const WriteOptions& options) {
        ImageInfo info;
        info.checkpoint_id = record.checkpoint_id;
        info.pid = record.image_pid;
        info.start_time = record.start_time;
        info.boot_id = proc::boot_id();
        info.comm = proc::comm(record.pid);
        info.state_before = record.state_before;
        info.driver_api_version = facts.api_version;
        info.driver_version = facts.version;
        info.gpus = facts.gpu_infos();
        info.chunk_size = config_.chunk_size;
        info.of_devices = true;
        Memory memory = open();
        info.regions = std::move(memory.regions);
        return write_image(output, info, *memory.source, options);
    };
    try {
        const WriteOptions options = write_options(known_in_worker(images));
        if (is_sealed) {
            const auto output = left_output(record, images, name, options);
            record.direct.room_was_reserved = output->reserve(record.direct.most);
            const WriteResult written = write_to(*output, options);
            record.direct.sealed = output->listed();
            return written;
        }
        if (arena_ != nullptr) { // where room was reserved before anything was locked
            record.direct.room_was_reserved = true;
            return arena_->write(name, options.alignment, record.direct.most,
                                 record.direct.room_taken,
                                 [&](ImageOutput& output) { return write_to(output, options); });
        }
        // This process has no other descriptor of the directory.
        FileOutput output(lineage_.directory(0), name, options.io, options.alignment);
        record.direct.room_was_reserved = output.reserve(record.direct.most);
        return write_to(output, options);
    } catch (const DriverError&) {
        throw;
    } catch (const Error& e) {
        throw Error(e, named + ": " + e.what());
    }
}

std::vector<int> DumpImages::descriptors() const {
    std::vector<int> found{image_dir_}; // for the account of an undo
    if (arena_ != nullptr)
        std::ranges::copy(arena_->descriptors(), std::back_inserter(found));
    return found;
}

void DumpImages::take(const TaskRecord& record, ManifestTask& task) {
    const DirectRecord& direct = record.direct;
    if (direct.damaged_in_parent != 0)
        warn_of_damage(record.pid, direct.damaged_in_parent, direct.first_damage);
    if (arena_ != nullptr)
        arena_->room().spent(direct.room_taken);
    task.externalized = true;
    task.digest = record.digest;
    stored_.add(task, regions_of(direct.device_sizes()));
    if (sealed_)
        sealed_->list(direct.sealed);
    else // sealed images share nothing
        not_known_.emplace_back(task, proc::rights(record.pid));
}

// What goes into memory first is compressed when it is drained, while the job runs.
WriteOptions DumpImages::write_options(const ParentIndex* known) const {
    return {.threads = config_.threads,
            .compress = config_.compress && arena_ == nullptr,
            .io = arena_ == nullptr ? config_.io : IoMode::buffered,
            .parent = known,
            .check_parent = config_.check_parent};
}

// Images are looked at once another one is to be written: a dump with one task never pays for it.
const ParentIndex& DumpImages::known_chunks(const std::string& owner) {
    if (!known_)
        known_.emplace(config_.chunk_size);
    for (const auto& [task, of] : std::exchange(not_known_, {}))
        known_->add(lineage_, manifest_.checkpoint_id, task, of);
    known_->write_for(owner);
    return *known_;
}

void DumpImages::note(std::vector<ManifestTask> tasks) {
    for (const ManifestTask& task : tasks)
        if (!task.externalized)
            stored_.add(task, {});
    // Once the inventory has our name, stock criu will not restore a process without its memory.
    for (const bool externalized : {false, true})
        if (std::ranges::find(tasks, externalized, &ManifestTask::externalized) != tasks.end())
            note_in_inventory(externalized);
    for (ManifestTask& task : tasks)
        manifest_.add(std::move(task));
    if (sealed_)
        return;
    manifest_file_.reset();
    manifest_file_.emplace(stored_in(), manifest_);
    if (published_)
        publish();
}

void DumpImages::publish() {
    published_ = true;
    if (sealed_)
        sealed_->publish_manifest();
    else if (manifest_file_)
        manifest_file_->commit();
    manifest_file_.reset();
}

// Once: under its key, nothing can take its place. With CRIU's images in it, it is written by pack().
void DumpImages::asked_about(pid_t pid) {
    if (!sealed_ || packs_)
        return;
    if (!awaited_) {
        awaited_.emplace();
        for (const proc::Tracee& task : proc::tracees())
            if (task.state != 'Z') // CRIU asks for none of those
                awaited_->insert(task.pid);
    }
    awaited_->erase(pid);
    if (!awaited_->empty() || std::exchange(finished_, true))
        return;
    sealed_->write_manifest(manifest_);
    if (published_)
        publish();
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
