// SPDX-License-Identifier: Apache-2.0
// `make_sealed_golden CERTIFICATE CRIU_FILES DIR`: seals a checkpoint as a dump does while it is made, with the
// files of the directory CRIU_FILES as CRIU's. What is in tests/data/sealed/v1-dump was made by it, once;
// tests/python/test_plain_sealed.py says of what.
#include "check.hpp"

#include "core/file.hpp"
#include "core/image_writer.hpp"
#include "cuda_plugin/sealed_dump.hpp"

#include <fcntl.h>

#include <algorithm>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

using namespace gpustasis;

namespace {

constexpr std::uint32_t kPage = 4096;
constexpr std::uint32_t kPid = 4242;
constexpr std::uint64_t kAddress = 0x7f0000000000;

/// Noise, a page of zeros, and a page of one byte.
class Memory final : public MemorySource {
public:
    Memory(std::size_t pages, unsigned seed) : bytes_((pages + 2) * kPage) {
        std::minstd_rand random(seed);
        for (std::size_t at = 0; at < pages * kPage; ++at)
            bytes_[at] = static_cast<std::byte>(random());
        std::fill(bytes_.end() - kPage, bytes_.end(), std::byte{9});
    }
    void read(std::uint64_t address, MutBytes out) override {
        std::ranges::copy(Bytes(bytes_).subspan(address - kAddress, out.size()), out.begin());
    }
    std::size_t size() const { return bytes_.size(); }

private:
    std::vector<std::byte> bytes_;
};

Id checkpoint_id() {
    Id id{};
    for (std::size_t at = 0; at < id.size(); ++at)
        id[at] = static_cast<std::byte>(at);
    return id;
}

ManifestTask seal_memory(SealedDump& dump, MemoryKind kind, Memory memory) {
    ImageInfo info;
    info.pid = kPid;
    info.checkpoint_id = checkpoint_id();
    info.kind = kind;
    info.comm = "train";
    info.chunk_size = kPage;
    info.regions = {{.address = kAddress, .length = memory.size(), .protection = 3}};
    const WriteOptions how{.threads = 1};
    ManifestTask task{.pid = kPid, .externalized = true, .kind = kind};
    dump.write_image(task.image_name(), how.alignment, [&](ImageOutput& output) {
        task.digest = write_image(output, info, memory, how).digest;
    });
    return task;
}

UniqueFd open_directory(const char* path) {
    UniqueFd fd(::open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    CHECK(static_cast<bool>(fd));
    return fd;
}

} // namespace

int main(int argc, char** argv) {
    CHECK(argc == 4);
    Config config;
    config.recipients = {argv[1]};
    const UniqueFd criu = open_directory(argv[2]);
    const UniqueFd images = open_directory(argv[3]);
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(argv[2]))
        names.push_back(entry.path().filename());
    SealedDump dump(config, images.get());
    Manifest manifest;
    manifest.checkpoint_id = checkpoint_id();
    // More than a frame of the image; and less than one.
    manifest.add(seal_memory(dump, MemoryKind::gpu, Memory(9, 1)));
    manifest.add(seal_memory(dump, MemoryKind::cpu, Memory(1, 2)));
    dump.write_files(manifest, criu.get(), names, 1);
}
