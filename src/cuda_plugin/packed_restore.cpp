// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/packed_restore.hpp"

#include "core/error.hpp"
#include "core/file_pack.hpp"
#include "cuda_plugin/early_images.hpp"
#include "cuda_plugin/host.hpp"
#include "cuda_plugin/memory_directory.hpp"
#include "cuda_plugin/memory_room.hpp"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <string>

namespace gpustasis {
namespace {

[[noreturn]] void corrupt(const std::string& what) {
    throw Error(Errc::corrupt_data, std::string(kPackName) + ": " + what);
}

UniqueFd make_room(int image_dir, const char* name, std::uint64_t size) {
    const std::uint64_t limit = MemoryLimit().now();
    if (size > limit)
        throw Error(Errc::io,
                    std::string(name) + ": CRIU's images take " + std::to_string(size >> 20) +
                        " MiB of memory, and " + std::to_string(limit >> 20) + " MiB are to be had",
                    ENOMEM);
    return make_memory_directory(image_dir, limit);
}

} // namespace

UniqueFd unpack_images(const Config& config, int image_dir, const Manifest& manifest) {
    struct stat status {};
    const bool is_there = ::fstatat(image_dir, kPackName, &status, AT_SYMLINK_NOFOLLOW) == 0;
    if (!is_there && errno != ENOENT)
        throw io_error(std::string("cannot look for ") + kPackName, errno);
    if (!manifest.pack) {
        if (is_there)
            corrupt("is there, and the manifest knows nothing of it");
        return {};
    }
    const PackReader pack = PackReader::open(image_dir, config.io);
    if (pack.image().digest() != *manifest.pack ||
        pack.image().info().checkpoint_id != manifest.checkpoint_id)
        corrupt("is not the one that " + std::string(kManifestName) +
                " names: it belongs to another checkpoint");
    UniqueFd memory = make_room(image_dir, kPackName, pack.size());
    pack.extract(memory.get(), config.threads);
    require_early_images(memory.get(), image_dir);
    host::info("unpacked " + std::to_string(pack.files().size()) + " images of CRIU, " +
               std::to_string(pack.size() >> 10) + " KiB");
    return memory;
}

UniqueFd unseal_images(int image_dir, const seal::SealedCheckpoint& sealed) {
    std::uint64_t size = 0;
    std::size_t count = 0;
    for (const seal::SealedEntry& entry : sealed.entries()) {
        if (!can_be_packed(entry.name))
            continue;
        size += entry.size; // no sealed file has more than 2^52 bytes of files
        ++count;
    }
    UniqueFd memory = make_room(image_dir, seal::kSealedName, size);
    sealed.extract_some(memory.get(), can_be_packed);
    require_early_images(memory.get(), image_dir);
    host::info("unsealed " + std::to_string(count) + " images of CRIU, " +
               std::to_string(size >> 10) + " KiB");
    return memory;
}

} // namespace gpustasis
