// SPDX-License-Identifier: Apache-2.0
#include "seal/sealed_drain.hpp"

#include "core/file.hpp"
#include "core/manifest.hpp"
#include "seal/errors.hpp"
#include "seal/sealed_output.hpp"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <utility>

namespace gpustasis::seal {
namespace {

/// One that is listed once it is there.
class ListedOutput final : public ImageOutput {
public:
    ListedOutput(std::vector<OtherFile>& list, FreshKey& key, int dir,
                 SealedOutput::Options options)
        : list_(list), file_(key, dir, std::move(options)) {}

    void write(std::uint64_t offset, MutBytes buffer, std::size_t size) override {
        file_.write(offset, buffer, size);
    }
    void put(std::uint64_t offset, Bytes bytes) override { file_.put(offset, bytes); }
    void commit(std::uint64_t size) override {
        file_.commit(size);
        list_.push_back(file_.listed());
    }
    bool is_direct() const noexcept override { return file_.is_direct(); }

private:
    std::vector<OtherFile>& list_;
    SealedOutput file_;
};

/// When the checkpoint was made, and not when it was sealed.
std::uint64_t time_of_manifest(int arena) {
    constexpr std::uint64_t kSecond = 1'000'000'000; // ns
    struct stat status {};
    if (::fstatat(arena, kManifestName, &status, AT_SYMLINK_NOFOLLOW) != 0)
        throw io_error(std::string("cannot examine ") + kManifestName, errno);
    return static_cast<std::uint64_t>(std::max<time_t>(status.st_mtim.tv_sec, 0)) * kSecond +
           static_cast<std::uint64_t>(status.st_mtim.tv_nsec);
}

} // namespace

SealedSizes seal_from_arena(FreshKey& key, int arena, int source, std::vector<std::string> names,
                            int target, const DrainOptions& options, const SealProgress& tell) {
    std::vector<OtherFile> images; // ascending, as they are made one after the other
    std::uint32_t next = kFirstOther;
    std::uint64_t memory = 0;
    const Manifest manifest = drain_images_into(
        arena,
        [&](const std::string& name, std::uint32_t alignment) {
            return std::make_unique<ListedOutput>(
                images, key, target,
                SealedOutput::Options{.file_id = next++,
                                      .name = name,
                                      .alignment = alignment,
                                      .frame_size = kSealedImageFrame,
                                      .io = options.io});
        },
        options,
        [&](std::uint64_t done) {
            memory = done;
            if (tell)
                tell(done);
        });
    SealOptions rest{.threads = options.threads, .others = images};
    rest.given[kManifestName] = {pack_manifest(manifest), time_of_manifest(arena)};
    SealedSizes sizes =
        write_sealed(key, source, std::move(names), target, rest, [&](std::uint64_t done) {
            if (tell)
                tell(memory + done);
        });
    for (const OtherFile& image : images) {
        struct stat status {};
        writing([&] {
            if (::fstatat(target, sealed_name(image.file_id).c_str(), &status, 0) != 0)
                throw io_error("cannot examine " + sealed_name(image.file_id), errno);
        });
        sizes.file_size += static_cast<std::uint64_t>(status.st_size);
    }
    sizes.files += images.size();
    sizes.plain_size += memory;
    return sizes;
}

} // namespace gpustasis::seal
