// SPDX-License-Identifier: Apache-2.0
// Room for what is sealed while it is written is there before the first byte.
#include "check.hpp"
#include "sealed_sample.hpp"

#include "core/block_output.hpp"
#include "core/error.hpp"
#include "core/file.hpp"
#include "seal/sealed_checkpoint.hpp"
#include "seal/sealed_output.hpp"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>
#include <cstdint>
#include <string>
#include <vector>

using namespace gpustasis;
using namespace gpustasis::seal;
using sample::Buffer;
using sample::Directory;

namespace {

constexpr const char* kName = "gpustasis-1.img";

SealedOutput::Options options(std::uint32_t file_id) {
    return {.file_id = file_id, .name = kName, .frame_size = kMinSealedFrame};
}

Buffer read_back(const Directory& dir, std::uint32_t file_id, const DataKey& key) {
    const auto input = open_sealed_image(dir.fd(), file_id, kName, key);
    Buffer bytes(input->size());
    CHECK(input->read(0, bytes.size(), bytes).size() == bytes.size());
    return bytes;
}

// Room for the worst case is there before anything is put, and what is not needed is given back.
void room_is_reserved() {
    const Directory dir;
    FreshKey key;
    constexpr std::size_t blocks = 5 * BlockOutput::kBlockSize;
    constexpr std::size_t size = blocks - 100; // what seals it is behind these blocks
    const auto blocks_of = [&](const std::string& name) {
        struct stat status {};
        CHECK(::fstatat(dir.fd(), name.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0);
        return static_cast<std::uint64_t>(status.st_blocks) * 512;
    };
    for (const std::size_t filled : {size, std::size_t{3 * kMinSealedFrame}}) {
        const std::uint32_t id = filled == size ? 2U : 3U;
        SealedOutput output(key, dir.fd(), options(id));
        CHECK(output.reserve(size));
        const std::uint64_t reserved = blocks_of(PartFile::part_name(sealed_name(id)));
        output.put(0, sample::noise(filled, id));
        output.commit(filled);
        const Buffer whole = dir.read(sealed_name(id));
        CHECK(whole.size() <= reserved); // the worst case was not more
        CHECK(filled == size || blocks_of(sealed_name(id)) < reserved / 2);
        CHECK(read_back(dir, id, key.key()) == sample::noise(filled, id));
    }
    // No file may be that long, as on a disk that is full.
    std::signal(SIGXFSZ, SIG_IGN);
    rlimit before{};
    CHECK(::getrlimit(RLIMIT_FSIZE, &before) == 0);
    const rlimit small{blocks, before.rlim_max};
    CHECK(::setrlimit(RLIMIT_FSIZE, &small) == 0);
    {
        SealedOutput output(key, dir.fd(),
                            options(4)); // `size` bytes fit: what seals them does not
        CHECK_THROWS(Errc::io, output.reserve(size));
    }
    CHECK(::setrlimit(RLIMIT_FSIZE, &before) == 0);
    CHECK(dir.names() == (std::vector<std::string>{sealed_name(2), sealed_name(3)}));
}

} // namespace

int main() {
    room_is_reserved();
}
