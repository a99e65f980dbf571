// SPDX-License-Identifier: Apache-2.0
// A checkpoint in memory goes to the disk sealed: all of it comes back, and nothing was there in the clear.
#include "check.hpp"
#include "sample.hpp"
#include "sealed_sample.hpp"

#include "core/error.hpp"
#include "core/image_reader.hpp"
#include "core/image_writer.hpp"
#include "core/lineage.hpp"
#include "core/manifest.hpp"
#include "core/parent_index.hpp"
#include "seal/errors.hpp"
#include "seal/sealed_checkpoint.hpp"
#include "seal/sealed_drain.hpp"

#include <unistd.h>

#include <algorithm>
#include <string>

using namespace gpustasis;
using sample::Directory;
using sample::Memory;

namespace {

constexpr std::uint32_t kChunk = 4096;
const std::string kClear = "memory that nobody may read on the disk, as it is long and odd";

/// Two processes; the memory of the second is in the image of the first.
struct Local {
    Directory arena, images;
    Memory memory;
    Manifest manifest;

    Local() {
        sample::map_mixture(memory);
        sample::Buffer odd(kChunk);
        std::ranges::copy(std::as_bytes(std::span(kClear)), odd.begin());
        memory.map(0x7f2000000000, odd);
        ParentIndex known(kChunk);
        Lineage lineage(arena.fd());
        manifest.checkpoint_id = sample::id_of(0x11);
        for (const std::uint32_t pid : {1U, 2U}) {
            ImageInfo info = sample::info_of(memory, kChunk);
            info.pid = pid;
            const Id digest = write_image(arena.fd(), image_name(pid, MemoryKind::gpu), info,
                                          memory, {.compress = false, .parent = &known})
                                  .digest;
            const ManifestTask task{.pid = pid, .externalized = true, .digest = digest};
            known.add(lineage, manifest.checkpoint_id, task);
            manifest.add(task);
        }
        write_manifest(arena.fd(), manifest);
        images.write("core-1.img", sample::noise(5000, 1));
        images.write("inventory.img", sample::noise(40, 2));
    }
    seal::SealedSizes seal_into(seal::FreshKey& key, int target) const {
        return seal::seal_from_arena(key, arena.fd(), images.fd(), {"core-1.img", "inventory.img"},
                                     target, {.threads = 2});
    }
};

void comes_back() {
    Local local;
    const auto second = ImageReader::open(local.arena.fd(), image_name(2, MemoryKind::gpu));
    CHECK(second.info().sources.size() == 1);
    const Directory sealed, plain;
    seal::FreshKey key;
    const seal::SealedSizes sizes = local.seal_into(key, sealed.fd());
    CHECK(sizes.files == 5);
    CHECK(
        (sealed.names() == std::vector<std::string>{"gpustasis-sealed-2.img",
                                                    "gpustasis-sealed-3.img", seal::kSealedName}));
    std::uint64_t written = 0;
    for (const std::string& name : sealed.names()) {
        const sample::Buffer bytes = sealed.read(name);
        written += bytes.size();
        CHECK(std::ranges::search(bytes, std::as_bytes(std::span(kClear))).empty());
    }
    CHECK(sizes.file_size == written);

    seal::SealedCheckpoint(sealed.fd(), key.key()).extract(plain.fd());
    const Manifest made = read_manifest(plain.fd());
    CHECK(made.checkpoint_id == local.manifest.checkpoint_id && made.tasks.size() == 2);
    for (const ManifestTask& task : made.tasks) {
        const auto image = ImageReader::open(plain.fd(), task.image_name());
        CHECK(image.digest() == task.digest && image.info().sources.empty());
        Memory found;
        found.map_like(local.memory, std::byte{0x5a});
        image.restore(found, 1, false);
        CHECK(found == local.memory);
    }
    CHECK(plain.read("core-1.img") == local.images.read("core-1.img"));
}

void refused_or_failed() {
    Local local;
    const Directory sealed;
    {
        Local child;
        child.manifest.parent_id = sample::id_of(9);
        child.manifest.chain_length = 1;
        write_manifest(child.arena.fd(), child.manifest);
        seal::FreshKey key;
        CHECK_THROWS(Errc::bad_argument, child.seal_into(key, sealed.fd()));
    }
    {
        Local damaged;
        const std::string name = image_name(1, MemoryKind::gpu);
        sample::Buffer bytes = damaged.arena.read(name);
        const auto at = std::ranges::search(bytes, std::as_bytes(std::span(kClear)));
        CHECK(!at.empty());
        at.front() ^= std::byte{1};
        damaged.arena.write(name, bytes);
        seal::FreshKey key;
        CHECK_THROWS(Errc::corrupt_data, damaged.seal_into(key, sealed.fd()));
    }
    CHECK(std::ranges::count(sealed.names(), seal::kSealedName) == 0);
    UniqueFd gone; // what cannot be written is said to be that, and not that the source is bad
    {
        const Directory target;
        gone = UniqueFd(::dup(target.fd()));
    }
    seal::FreshKey key;
    bool is_output = false;
    try {
        local.seal_into(key, gone.get());
    } catch (const seal::OutputError&) {
        is_output = true;
    }
    CHECK(is_output);
}

} // namespace

int main() {
    comes_back();
    refused_or_failed();
}
