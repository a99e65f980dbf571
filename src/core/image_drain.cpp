// SPDX-License-Identifier: Apache-2.0
#include "core/image_drain.hpp"

#include "core/error.hpp"
#include "core/image_output.hpp"
#include "core/image_writer.hpp"
#include "core/lineage.hpp"
#include "core/parent_index.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <iterator>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <typeinfo>
#include <utility>
#include <vector>

namespace gpustasis {
namespace {

/// No more bytes of all files in a second than were asked for.
class Pace {
public:
    explicit Pace(std::uint64_t rate) : rate_(rate) {}

    /// Waits until `size` more bytes may be written. By several threads at once.
    void wait_for(std::size_t size) {
        if (rate_ == 0)
            return;
        std::chrono::steady_clock::time_point turn;
        {
            const std::lock_guard lock(mutex_);
            // A time in which nothing was written is not made up for.
            turn = std::max(next_, std::chrono::steady_clock::now());
            next_ = turn + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                               std::chrono::duration<double>(static_cast<double>(size) /
                                                             static_cast<double>(rate_)));
        }
        std::this_thread::sleep_until(turn);
    }

private:
    const std::uint64_t rate_;
    std::mutex mutex_;
    std::chrono::steady_clock::time_point next_;
};

class PacedOutput final : public ImageOutput {
public:
    PacedOutput(Pace& pace, std::unique_ptr<ImageOutput> file)
        : pace_(pace), file_(std::move(file)) {}

    void write(std::uint64_t offset, MutBytes buffer, std::size_t size) override {
        pace_.wait_for(size);
        file_->write(offset, buffer, size);
    }
    void put(std::uint64_t offset, Bytes bytes) override { file_->put(offset, bytes); }
    void commit(std::uint64_t size) override { file_->commit(size); }
    bool is_direct() const noexcept override { return file_->is_direct(); }

private:
    Pace& pace_;
    std::unique_ptr<ImageOutput> file_;
};

/// The memory that an image holds, for a writer whose chunks are the same.
class ImageMemory final : public MemorySource {
public:
    ImageMemory(const ImageReader& image, std::uint64_t& done, const ImageReader::Progress& tell)
        : image_(image), done_(done), tell_(tell) {
        std::uint64_t number = 0;
        for (const Region& region : image.info().regions) {
            runs_.emplace_back(region.address, number);
            number += (region.length + image.info().chunk_size - 1) / image.info().chunk_size;
        }
    }

    void read(std::uint64_t address, MutBytes out) override {
        const auto after = std::ranges::upper_bound(runs_, address, {}, &Run::first);
        const auto& [begin, number] = *std::prev(after);
        image_.read_chunk(number + (address - begin) / image_.info().chunk_size, out);
        const std::lock_guard lock(mutex_);
        done_ += out.size();
        if (tell_)
            tell_(done_);
    }

private:
    using Run = std::pair<std::uint64_t, std::uint64_t>; ///< address of a region, its first chunk

    const ImageReader& image_;
    std::uint64_t& done_;
    const ImageReader::Progress& tell_;
    std::vector<Run> runs_;
    std::mutex mutex_;
};

class Drain {
public:
    Drain(int arena, const DrainOptions& options, const ImageReader::Progress& tell)
        : arena_(arena), options_(options), tell_(tell), pace_(options.rate), local_(arena),
          manifest_(local_.manifest(0)) {}

    Manifest into(int image_dir, int parent) {
        build_on(durable_.emplace(image_dir), image_dir, parent);
        return run([&](const std::string& name, std::uint32_t alignment) {
            return std::make_unique<FileOutput>(image_dir, name, options_.io, alignment);
        });
    }

    Manifest into(const MakeOutput& make) {
        if (manifest_.chain_length != 0)
            throw Error(Errc::bad_argument,
                        local_.path(0) + " is built on checkpoint " + id_text(manifest_.parent_id));
        return run(make);
    }

private:
    Manifest run(const MakeOutput& make) {
        std::vector<std::pair<ManifestTask*, ImageReader>> left;
        for (ManifestTask& task : manifest_.tasks)
            if (task.externalized)
                left.emplace_back(&task, open(task));
        // Those that others of the checkpoint refer to come first.
        while (!left.empty()) {
            const auto ready = std::ranges::find_if(left, [&](const auto& candidate) {
                return std::ranges::none_of(candidate.second.info().sources, [&](const Source& s) {
                    return s.depth == 0 && std::ranges::any_of(left, [&](const auto& other) {
                               return other.first->pid == s.pid && other.first->kind == s.kind;
                           });
                });
            });
            if (ready == left.end())
                throw Error(Errc::corrupt_data,
                            local_.path(0) + ": its images refer to each other");
            write(*ready->first, ready->second, make);
            left.erase(ready);
        }
        return std::move(manifest_);
    }

    void build_on(Lineage& made, int image_dir, int parent) {
        if (manifest_.chain_length == 0) {
            if (::unlinkat(image_dir, kParentLink, 0) != 0 && errno != ENOENT)
                throw io_error(std::string("cannot remove the old ") + kParentLink, errno);
            return;
        }
        if (parent < 0)
            throw Error(Errc::bad_argument, local_.path(0) + " is built on checkpoint " +
                                                id_text(manifest_.parent_id) +
                                                ", and no parent is given");
        if (const Id found = read_manifest(parent).checkpoint_id; found != manifest_.parent_id)
            throw Error(Errc::bad_argument, directory_path(parent) + " holds checkpoint " +
                                                id_text(found) + ", and " + local_.path(0) +
                                                " is built on " + id_text(manifest_.parent_id));
        link_parent(image_dir, parent);
        ParentIndex& base = base_.emplace(ParentIndex::read(made));
        for (const ManifestTask& task : manifest_.tasks)
            if (task.externalized)
                base.forget_held_by(open(task));
    }

    ImageReader open(const ManifestTask& task) {
        ImageReader image = ImageReader::open(arena_, task.image_name(), IoMode::buffered);
        const ImageInfo& info = image.info();
        if (image.digest() != task.digest || info.pid != task.pid || info.kind != task.kind ||
            info.checkpoint_id != manifest_.checkpoint_id)
            throw Error(Errc::corrupt_data, local_.path(0) + "/" + task.image_name() +
                                                " is not the image that its manifest lists");
        image.attach_sources(local_);
        return image;
    }

    void write(ManifestTask& task, const ImageReader& image, const MakeOutput& make) {
        const ImageInfo& info = image.info();
        std::optional<ParentIndex> known; // none: nothing can be referred to
        if (durable_) {
            Lineage& made = *durable_;
            known = base_ ? *base_ : ParentIndex(info.chunk_size);
            for (const Source& source : info.sources)
                if (const ManifestTask* other = manifest_.find(source.pid, source.kind);
                    source.depth == 0 && other != nullptr)
                    known->add(made, manifest_.checkpoint_id, *other);
        }
        ImageMemory memory(image, done_, tell_);
        const WriteOptions options{.threads = options_.threads,
                                   .compress = options_.compress,
                                   .alignment = image.alignment(),
                                   .io = options_.io,
                                   .parent = known ? &*known : nullptr};
        try {
            PacedOutput output(pace_, make(task.image_name(), options.alignment));
            task.digest = write_image(output, info, memory, options).digest;
        } catch (const Error& e) {
            if (typeid(e) != typeid(Error))
                throw; // an output's own: it says what it could not write
            const std::string where = durable_ ? " into " + durable_->path(0) : "";
            throw Error(e, "cannot drain " + local_.path(0) + "/" + task.image_name() + where +
                               ": " + e.what());
        }
    }

    int arena_;
    const DrainOptions& options_;
    const ImageReader::Progress& tell_;
    Pace pace_;
    Lineage local_;
    std::optional<Lineage> durable_; ///< of what is made, if that can be referred to
    Manifest manifest_;
    std::optional<ParentIndex> base_; ///< none: there is no parent
    std::uint64_t done_ = 0;
};

} // namespace

Manifest drain_images(int arena, int image_dir, int parent, const DrainOptions& options,
                      const ImageReader::Progress& progress) {
    return Drain(arena, options, progress).into(image_dir, parent);
}

Manifest drain_images_into(int arena, const MakeOutput& make, const DrainOptions& options,
                           const ImageReader::Progress& progress) {
    return Drain(arena, options, progress).into(make);
}

} // namespace gpustasis
