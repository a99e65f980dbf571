// SPDX-License-Identifier: Apache-2.0
/// What one dump writes beside CRIU's images: images, the manifest, and names in CRIU's inventory.
#pragma once

#include "core/file_pack.hpp"
#include "core/image_writer.hpp"
#include "core/lineage.hpp"
#include "core/manifest.hpp"
#include "core/stored_memory.hpp"
#include "cuda_plugin/arena_dump.hpp"
#include "cuda_plugin/config.hpp"
#include "cuda_plugin/direct_work.hpp"
#include "cuda_plugin/parent_choice.hpp"
#include "cuda_plugin/sealed_dump.hpp"
#include "cuda_plugin/statistics.hpp"

#include <sys/types.h>

#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace gpustasis {

class DumpImages final : public DirectStore {
public:
    /// All outlive it. `config` is read when something is done, and may be settled until then.
    DumpImages(const Config& config, int image_dir, Lineage& lineage, Statistics& statistics)
        : config_(config), image_dir_(image_dir), lineage_(lineage), statistics_(statistics) {}

    /// Before anything else: images and manifest go into `arena`, which outlives this, and whose directory the lineage
    /// has at depth 0 by now.
    void use_arena(ArenaDump& arena);

    /// While the tasks still run, and before the worker starts: it inherits the files of the chain.
    void choose_parent(const ContainerStore* store);

    /// While the tasks still run: what is written from now on is sealed, if `config` asks for that. The key, which
    /// the undo needs, nullptr if not. Throws as SealedDump.
    const seal::DataKey* seal();

    /// Before anything of an earlier dump is removed. Throws Error: bad_argument if this one is sealed and the image
    /// directory holds images in the clear that would stay there.
    void refuse_clear_images() const;

    /// Once; later calls do nothing. What an earlier dump left in this directory must never be taken for
    /// this one's. Throws Error: io.
    void begin();

    /// Once, after begin(): CRIU's images will be packed, so stock CRIU finds none, however little memory is in ours.
    void begin_pack();

    /// Pack the files `names` of `directory`, all that CRIU has written, note that in the manifest, and then put
    /// CRIU's inventory beside it: what lacks that is no checkpoint. Throws as write_pack.
    void pack(int directory, const std::vector<std::string>& names);

    /// Write the image of frozen task `pid`, whose regions are `regions`, read from `memory`. It refers to
    /// those written before for what is alike. Throws as write_image.
    WriteResult write(pid_t pid, ManifestTask& task, std::vector<Region> regions,
                      MemorySource& memory);

    /// The worker is to write the image of `record`: what it needs for that is in there. Once for a task. Throws Error: io.
    void leave(TaskRecord& record);
    /// In the worker, from any thread (DirectStore).
    WriteResult write(TaskRecord& record, const DriverFacts& facts, const UndoImages& images,
                      const std::function<Memory()>& open) override;
    std::vector<int> descriptors() const override;
    /// The worker has written the image of `record`, as that one says: `task` is its entry.
    void take(const TaskRecord& record, ManifestTask& task);

    /// Put `tasks` into the manifest, which is written anew, once, after CRIU's inventory names what it has. A sealed
    /// one is written by asked_about() alone. It has no name before publish(). Throws Error: io.
    void note(std::vector<ManifestTask> tasks);
    /// All images are complete, those of CRIU too: the manifest that was written gets its name, and without it they
    /// are no checkpoint. What is written later gets it at once. Nothing to do where CRIU's images are packed.
    /// Throws Error: io.
    void publish();
    bool is_published() const noexcept { return published_; }

    /// criu has asked about frozen task `pid`, and all of it is noted. A sealed manifest is written with the last
    /// one: while the dump can still fail, and the job run on. Throws Error: io; unsupported if nothing
    /// would be sealed that was to be.
    void asked_about(pid_t pid);
    /// Whether seal() has been asked to, and will.
    bool is_sealed() const noexcept { return sealed_.has_value(); }
    /// Whether the manifest is written, if there is one.
    bool is_finished() const noexcept { return !sealed_ || finished_; }

    /// Whether the layout and the recipients that `config` asks for, as it is settled by now, were begun with.
    bool is_as_asked() const noexcept {
        return (!config_.is_packed() || packs_) && (config_.recipients.empty() || is_sealed());
    }
    /// Throws Error: io unless is_as_asked().
    void require_as_asked() const;

    /// What criu has written is no checkpoint, whatever it says itself.
    void withdraw() noexcept;

    Manifest& manifest() noexcept { return manifest_; }
    /// Whether stock CRIU will refuse the checkpoint.
    bool named_ours() const noexcept { return named_ours_; }

private:
    void warn_of_damage(pid_t pid, std::uint64_t count, const std::string& first) const;
    const ParentIndex& known_chunks(const std::string& owner);
    WriteOptions write_options(const ParentIndex* known) const;
    int stored_in() const noexcept { return arena_ == nullptr ? image_dir_ : arena_->directory(); }
    void note_in_inventory(bool externalized);
    void name_images();
    const ParentIndex* known_in_worker(const UndoImages& images);
    std::unique_ptr<seal::SealedOutput> left_output(TaskRecord& record, const UndoImages& images,
                                                    const std::string& name,
                                                    const WriteOptions& options);
    void pack_sealed(SealedDump& dump, int directory, const std::vector<std::string>& names);

    const Config& config_;
    int image_dir_;
    Lineage& lineage_;
    Statistics& statistics_;
    std::optional<ParentIndex> known_;   ///< none: neither a parent nor an image yet
    std::optional<Lineage> parent_held_; ///< as of ParentChoice, to the end
    /// Whose images are written and not in `known_`, and their rights.
    std::vector<std::pair<ManifestTask, std::string>> not_known_;
    Manifest manifest_;
    StoredMemory stored_;              ///< what the manifest has, and the image that it has next
    std::string images_name_;          ///< that the inventory has; empty: none yet
    std::optional<SealedDump> sealed_; ///< none: what is written is in the clear
    std::optional<ManifestFile>
        manifest_file_;          ///< none: it has its name, or is sealed, or there is none yet
    ArenaDump* arena_ = nullptr; ///< none: images go into the image directory
    std::mutex reopening_;
    bool reopened_ = false; ///< in the worker: `known_`, whose files criu has opened
    bool begun_ = false;
    bool parent_is_chosen_ = false;
    bool finished_ = false;
    bool published_ = false;
    bool packs_ = false;
    std::optional<std::set<pid_t>> awaited_; ///< tasks that criu has not asked about yet
    bool named_ours_ = false;
    bool named_stock_ = false;
};

} // namespace gpustasis
