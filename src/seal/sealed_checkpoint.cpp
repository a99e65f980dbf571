// SPDX-License-Identifier: Apache-2.0
#include "seal/sealed_checkpoint.hpp"

#include "core/error.hpp"
#include "core/file.hpp"
#include "seal/secret.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <filesystem>
#include <system_error>
#include <utility>

namespace gpustasis::seal {
namespace {

constexpr std::uint64_t kPiece = 1U << 20; // of plain text, in memory that is locked

// Of the sealed file itself, errors are named by the caller.
template <class Work>
auto named(std::uint32_t file_id, const Work& work) {
    try {
        return work();
    } catch (const Error& error) {
        throw Error(error, sealed_name(file_id) + ": " + error.what());
    }
}

std::shared_ptr<const SealedReader> open_file(int dir, std::uint32_t file_id, const DataKey& key,
                                              IoMode io = IoMode::automatic) {
    return named(file_id, [&] {
        return std::make_shared<const SealedReader>(dir, sealed_name(file_id), key, file_id, io);
    });
}

class SealedInput final : public ImageInput {
public:
    SealedInput(std::shared_ptr<const SealedReader> sealed, std::size_t file)
        : sealed_(std::move(sealed)), file_(file) {}

    std::uint64_t size() const noexcept override { return sealed_->entries()[file_].size; }
    Bytes read(std::uint64_t offset, std::size_t size, MutBytes buffer) const override {
        return named(sealed_->file_id(), [&] {
            if (offset > this->size() || size > this->size() - offset)
                throw Error(Errc::corrupt_data, "ends at " + std::to_string(this->size()));
            sealed_->read(file_, offset, buffer.first(size));
            return Bytes(buffer.first(size));
        });
    }
    bool is_direct() const noexcept override { return sealed_->is_direct(); }

private:
    std::shared_ptr<const SealedReader> sealed_;
    std::size_t file_;
};

} // namespace

SealedCheckpoint::SealedCheckpoint(int dir, const DataKey& key, IoMode io) {
    files_.push_back(open_file(dir, kSealedFile, key));
    std::vector<std::uint32_t> expected{kSealedFile};
    for (const OtherFile& other : files_.front()->others()) {
        expected.push_back(other.file_id);
        files_.push_back(open_file(dir, other.file_id, key, io));
        if (files_.back()->end_tag() != other.end_tag)
            throw Error(Errc::corrupt_data, sealed_name(other.file_id) + " is not the one that " +
                                                kSealedName + " lists");
    }
    for (const std::uint32_t found : list_sealed_files(dir))
        if (!std::ranges::binary_search(expected, found))
            throw Error(Errc::corrupt_data,
                        sealed_name(found) + " is not listed in " + kSealedName +
                            ": it is of another checkpoint, or of a dump that failed");
    const std::vector<SealedEntry> all = entries();
    if (const auto twice = std::ranges::adjacent_find(all, {}, &SealedEntry::name);
        twice != all.end())
        throw Error(Errc::corrupt_data, twice->name + " is in two sealed files");
}

std::vector<SealedEntry> SealedCheckpoint::entries() const {
    std::vector<SealedEntry> all;
    for (const auto& file : files_)
        all.insert(all.end(), file->entries().begin(), file->entries().end());
    std::ranges::sort(all, {}, &SealedEntry::name);
    return all;
}

std::uint64_t SealedCheckpoint::file_size() const noexcept {
    std::uint64_t size = 0;
    for (const auto& file : files_)
        size += file->file_size();
    return size;
}

bool SealedCheckpoint::has(const std::string& name) const {
    return std::ranges::any_of(files_,
                               [&](const auto& file) { return file->find(name).has_value(); });
}

SealedCheckpoint::Place SealedCheckpoint::find(const std::string& name) const {
    for (const auto& holder : files_)
        if (const auto file = holder->find(name))
            return {holder, *file};
    throw Error(Errc::bad_argument, "no sealed file " + name);
}

std::vector<std::byte> SealedCheckpoint::read(const std::string& name, std::uint64_t limit) const {
    const Place place = find(name);
    const std::uint64_t size = place.holder->entries()[place.file].size;
    if (size > limit)
        throw Error(Errc::bad_argument,
                    name + " is longer than " + std::to_string(limit) + " bytes");
    std::vector<std::byte> bytes(size);
    named(place.holder->file_id(), [&] { place.holder->read(place.file, 0, bytes); });
    return bytes;
}

std::shared_ptr<const ImageInput> SealedCheckpoint::input(const std::string& name) const {
    const Place place = find(name);
    return std::make_shared<SealedInput>(place.holder, place.file);
}

void SealedCheckpoint::extract(int dir, unsigned threads, const SealProgress& tell) const {
    std::uint64_t before = 0;
    for (const auto& file : files_) {
        const auto tell_all = [&](std::uint64_t done) { tell(before + done); };
        extract_sealed(*file, dir, threads, tell ? SealProgress(tell_all) : SealProgress());
        before += file->file_size();
    }
}

void SealedCheckpoint::extract_some(int dir,
                                    const std::function<bool(const std::string&)>& wanted) const {
    Secret piece(kPiece);
    for (const auto& holder : files_)
        for (std::size_t file = 0; file < holder->entries().size(); ++file) {
            const SealedEntry& entry = holder->entries()[file];
            if (!wanted(entry.name))
                continue;
            const UniqueFd made(::openat(dir, entry.name.c_str(),
                                         O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
                                         entry.mode));
            if (!made || ::fchmod(made.get(), entry.mode) != 0)
                throw io_error("cannot make " + entry.name, errno);
            for (std::uint64_t at = 0; at < entry.size; at += kPiece) {
                const MutBytes bytes = piece.bytes().first(std::min(kPiece, entry.size - at));
                named(holder->file_id(), [&] { holder->read(file, at, bytes); });
                write_at(made.get(), at, bytes);
            }
        }
}

void SealedCheckpoint::compare(int dir, unsigned threads, const SealProgress& tell) const {
    std::uint64_t before = 0;
    for (const auto& file : files_) {
        const auto tell_all = [&](std::uint64_t done) { tell(before + done); };
        compare_sealed(*file, dir, threads, tell ? SealProgress(tell_all) : SealProgress());
        before += file->file_size();
    }
}

void SealedCheckpoint::check(const std::set<std::string>& elsewhere, unsigned threads,
                             const SealProgress& tell) const {
    const auto is_elsewhere = [&](const SealedEntry& entry) {
        return elsewhere.contains(entry.name);
    };
    std::uint64_t before = 0;
    for (const auto& file : files_) {
        if (std::ranges::all_of(file->entries(), is_elsewhere))
            continue;
        const auto tell_all = [&](std::uint64_t done) { tell(before + done); };
        named(file->file_id(), [&] {
            file->read_all([](std::size_t, std::uint64_t, Bytes) {}, threads,
                           tell ? SealProgress(tell_all) : SealProgress());
        });
        before += file->file_size();
    }
}

std::shared_ptr<const ImageInput> open_sealed_image(int dir, std::uint32_t file_id,
                                                    const std::string& name, const DataKey& key) {
    std::shared_ptr<const SealedReader> sealed = open_file(dir, file_id, key);
    const auto file = sealed->find(name);
    if (!file)
        throw Error(Errc::corrupt_data, sealed_name(file_id) + " does not hold " + name);
    return std::make_shared<SealedInput>(std::move(sealed), *file);
}

std::shared_ptr<const ImageInput> find_sealed_image(int dir, const std::string& name,
                                                    const DataKey& key) {
    std::exception_ptr why; // of one that is not whole: another may be the one that is wanted
    for (const std::uint32_t file_id : list_sealed_files(dir)) {
        try {
            std::shared_ptr<const SealedReader> sealed = open_file(dir, file_id, key);
            if (const auto file = sealed->find(name))
                return std::make_shared<SealedInput>(std::move(sealed), *file);
        } catch (const Error&) {
            if (!why)
                why = std::current_exception();
        }
    }
    if (why)
        std::rethrow_exception(why);
    throw io_error("no sealed file holds " + name, ENOENT);
}

std::vector<std::uint32_t> list_sealed_files(int dir) {
    std::vector<std::uint32_t> found;
    std::error_code error;
    std::filesystem::directory_iterator at("/proc/self/fd/" + std::to_string(dir), error);
    for (const std::filesystem::directory_iterator end; !error && at != end; at.increment(error))
        if (const std::uint32_t id = sealed_file_id(at->path().filename().string()); id != 0)
            found.push_back(id);
    if (error)
        throw io_error("cannot list the directory", error.value());
    std::ranges::sort(found);
    return found;
}

void remove_sealed_files(int dir) {
    const auto remove = [&](const std::string& name) {
        if (::unlinkat(dir, name.c_str(), 0) != 0 && errno != ENOENT)
            throw io_error("cannot remove the old " + name, errno);
    };
    for (const std::uint32_t id : list_sealed_files(dir))
        remove(sealed_name(id));
    remove(kEnvelopeName);
}

} // namespace gpustasis::seal
