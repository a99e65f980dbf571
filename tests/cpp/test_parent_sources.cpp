// SPDX-License-Identifier: Apache-2.0
// What images of a parent say about the files that they need, where they may say anything.
#include "check.hpp"
#include "sample.hpp"

#include "core/image_format.hpp"
#include "core/image_frame.hpp"
#include "core/image_metadata.hpp"
#include "core/image_output.hpp"
#include "core/lineage.hpp"
#include "core/manifest.hpp"
#include "core/parent_index.hpp"

#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>
#include <initializer_list>
#include <string>

using namespace gpustasis;

namespace {

/// An image of no memory that names `count` files of its own parent, each with `digest`.
ManifestTask make_image(const sample::TempDir& dir, std::uint32_t pid, std::uint32_t count,
                        const Id& digest) {
    ImageInfo info;
    info.checkpoint_id = sample::id_of(1);
    info.parent_id = sample::id_of(2);
    info.pid = pid;
    info.chunk_size = kMinChunkSize;
    for (std::uint32_t source = 1; source <= count; ++source)
        info.sources.push_back({.checkpoint_id = info.parent_id,
                                .digest = digest,
                                .file_size = 4096,
                                .pid = source,
                                .depth = 1});
    format::check_info(info, Errc::bad_argument);
    FileOutput file(dir.fd(), image_name(pid), IoMode::buffered, 1);
    const FrameResult frame = write_frame(file, info, 1, format::kHeaderSize, {});
    file.commit(frame.file_size);
    return {.pid = pid, .externalized = true, .digest = frame.digest};
}

/// Reads it as a parent; its own parent is nowhere, which is found when all images are read.
void read(const sample::TempDir& dir, std::vector<ManifestTask> tasks, Errc code) {
    write_manifest(dir.fd(), {.checkpoint_id = sample::id_of(1),
                              .driver_api_version = 0,
                              .driver_version = "",
                              .gpus = {},
                              .tasks = std::move(tasks),
                              .parent_id = sample::id_of(2),
                              .chain_length = 1});
    Lineage lineage = Lineage::above(dir.fd());
    CHECK_THROWS(code, ParentIndex::read(lineage));
}

/// Processor time, the least of three.
double seconds_for(std::uint32_t count) {
    const sample::TempDir dir;
    const ManifestTask task = make_image(dir, 1, count, sample::id_of(3));
    double least = 1e9;
    for (int turn = 0; turn < 3; ++turn) {
        const std::clock_t begin = std::clock();
        read(dir, {task}, Errc::io);
        least = std::min(least, static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC);
    }
    return least;
}

void many_sources_take_no_more_than_their_share() {
    constexpr std::uint32_t kFew = 4096;
    constexpr std::uint32_t kMany =
        format::kMaxSources - 1; // and the image itself: 16 times as many
    const double few = seconds_for(kFew);
    const double many = seconds_for(kMany);
    std::printf("%u sources: %.4f s, %u sources: %.4f s\n", kFew, few, kMany, many);
    CHECK(many < 64 * few); // it was 256 times when each was looked for among all
}

void images_that_contradict_each_other_are_refused() {
    const sample::TempDir dir;
    const ManifestTask one = make_image(dir, 1, 3, sample::id_of(3));
    const ManifestTask same = make_image(dir, 2, 3, sample::id_of(3));
    const ManifestTask other = make_image(dir, 3, 3, sample::id_of(4));
    read(dir, {one, same}, Errc::io);
    read(dir, {one, other}, Errc::corrupt_data);
}

void a_link_is_relative_unless_asked() {
    const sample::TempDir parent;
    const sample::TempDir child;
    const std::string path = directory_path(parent.fd());
    const auto text = [&] {
        char link[PATH_MAX];
        const ssize_t size = ::readlinkat(child.fd(), kParentLink, link, sizeof link);
        return std::string(link, static_cast<std::size_t>(std::max<ssize_t>(size, 0)));
    };
    link_parent(child.fd(), parent.fd());
    CHECK(text() == "../" + path.substr(path.rfind('/') + 1));
    link_parent(child.fd(), parent.fd(), LinkText::absolute);
    CHECK(text() == path && path.starts_with('/'));
}

} // namespace

int main() {
    many_sources_take_no_more_than_their_share();
    images_that_contradict_each_other_are_refused();
    a_link_is_relative_unless_asked();
}
