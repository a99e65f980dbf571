// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/undo_images.hpp"

#include "core/error.hpp"
#include "core/manifest.hpp"
#include "seal/sealed_chain.hpp"
#include "seal/sealed_checkpoint.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <memory>

namespace gpustasis {

void UndoImages::use_key(const seal::DataKey& key) {
    key_ = key.at_depth(0);
    lineage_.open_by(std::make_shared<seal::SealedChain>(key));
}

void UndoImages::forget_key() noexcept {
    key_.reset();
    lineage_.open_by(nullptr);
}

void UndoImages::reopen(ParentIndex& index) const {
    const std::scoped_lock one_at_a_time(opening_);
    index.reopen(lineage_);
}

ImageReader UndoImages::open(const DroppedTask& task) const {
    const std::scoped_lock one_at_a_time(opening_); // the lineage is not for several threads
    return open_dropped(task, lineage_, open_file(task.image));
}

ImageReader UndoImages::open_file(const std::string& name) const {
    const int directory = lineage_.directory(0);
    if (!key_)
        return ImageReader::open(directory, name);
    return ImageReader::from_input(seal::find_sealed_image(directory, name, *key_), name);
}

bool UndoImages::has_direct(const TaskRecord& record) const {
    const std::scoped_lock one_at_a_time(opening_);
    const std::string name = image_name(record.image_pid);
    try {
        return open_file(name).info().checkpoint_id == record.checkpoint_id;
    } catch (const Error& e) {
        if (e.error_number() == ENOENT) // also of a sealed one
            return false;
        throw;
    }
}

ImageReader UndoImages::open_direct(const TaskRecord& record) const {
    const std::scoped_lock one_at_a_time(opening_);
    const std::string name = image_name(record.image_pid);
    ImageReader image = open_file(name);
    const bool is_known = record.direct.stored; // else who has written it died before it said so
    if (image.info().checkpoint_id != record.checkpoint_id ||
        (is_known && image.digest() != record.digest) || !image.info().of_devices)
        throw Error(Errc::corrupt_data, lineage_.path(0) + "/" + name +
                                            " is not the image of the GPU memory of process " +
                                            std::to_string(record.pid));
    image.attach_sources(lineage_);
    return image;
}

KeyHandover::KeyHandover(const UndoImages& images) {
    if (!images.key_)
        return;
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC | O_NONBLOCK) !=
        0) // a reader cannot be waited for: it is not there yet
        throw io_error("cannot make a pipe for a key", errno);
    reading_ = UniqueFd(ends[0]);
    const UniqueFd writing(ends[1]);
    const seal::Secret record = images.key_->record();
    size_ = record.size();
    // A pipe that is empty takes all of it at once, or nothing of it is in there that could be used.
    if (::write(writing.get(), record.bytes().data(), record.size()) !=
        static_cast<ssize_t>(record.size()))
        throw io_error("cannot hand a key on", errno);
}

void KeyHandover::take(UndoImages& images) {
    if (!reading_)
        return;
    images.forget_key(); // the parent's, which is not there
    seal::Secret record(size_);
    if (::read(reading_.get(), record.bytes().data(), record.size()) !=
        static_cast<ssize_t>(record.size()))
        throw Error(Errc::io, "a key was not handed on");
    images.use_key(seal::DataKey::from_record(record.bytes()));
    reading_.reset();
}

} // namespace gpustasis
