// SPDX-License-Identifier: Apache-2.0
// make_fuzz_corpus DIR: small images and manifests of every kind, for the fuzzer to start from.
#include "check.hpp"
#include "sample.hpp"

#include "core/file_pack.hpp"
#include "core/image_writer.hpp"
#include "core/manifest.hpp"
#include "core/parent_index.hpp"

using namespace gpustasis;

namespace {

void make_images(int dir_fd) {
    sample::Memory none;
    sample::Memory zero;
    zero.map(0x10000, sample::Buffer(8192));
    sample::Memory packed;
    packed.map(0x10000, sample::pattern_bytes(8192));
    packed.map(0x20000, sample::pattern_bytes(4096));
    sample::Memory raw;
    raw.map(0x10000, sample::random_bytes(4096, 1));
    sample::Memory mixture;
    sample::map_mixture(mixture);
    int number = 0;
    for (sample::Memory* memory : {&none, &zero, &packed, &raw, &mixture})
        for (const std::uint32_t chunk_size : {4096U, 16384U})
            for (const std::uint32_t alignment : {1U, 64U})
                write_image(dir_fd, "image-" + std::to_string(number++),
                            info_of(*memory, chunk_size), *memory, {.alignment = alignment});
}

ImageInfo task_info(const sample::Memory& memory) {
    ImageInfo info = info_of(memory);
    info.pid = 7;
    return info;
}

// On top of a parent that has all of it but one chunk.
void make_child(int dir_fd) {
    const sample::TempDir parent;
    sample::Memory memory;
    sample::map_mixture(memory);
    const WriteResult first =
        write_image(parent.fd(), image_name(7), task_info(memory), memory, {});
    write_manifest(parent.fd(),
                   {.checkpoint_id = info_of(memory).checkpoint_id,
                    .tasks = {{.pid = 7, .externalized = true, .digest = first.digest}}});
    Lineage lineage = Lineage::above(parent.fd());
    const ParentIndex index = ParentIndex::read(lineage);
    memory.write(0x7f0000000000, sample::random_bytes(16, 9));
    write_image(dir_fd, "child", info_of(memory), memory, {.alignment = 64, .parent = &index});
}

// Of a task that has all but one chunk alike with another.
void make_alike(int dir_fd) {
    const sample::TempDir place;
    sample::Memory memory;
    sample::map_mixture(memory);
    const Id id = info_of(memory).checkpoint_id;
    const WriteResult first = write_image(place.fd(), image_name(7), task_info(memory), memory, {});
    Lineage lineage(place.fd());
    ParentIndex index(info_of(memory).chunk_size);
    index.add(lineage, id, {.pid = 7, .externalized = true, .digest = first.digest});
    memory.write(0x7f0000000000, sample::random_bytes(16, 9));
    write_image(dir_fd, "alike", info_of(memory), memory, {.alignment = 64, .parent = &index});
}

void make_pack(int dir_fd) {
    const sample::TempDir dir;
    sample::write_file(dir.fd(), "a.img", sample::pattern_bytes(5000));
    sample::write_file(dir.fd(), "b.img", sample::random_bytes(70, 3));
    write_pack(sample::id_of(1), dir.fd(), {"a.img", "b.img"}, dir.fd(), {.chunk_size = 4096});
    sample::write_file(dir_fd, "pack", sample::read_file(dir.fd(), kPackName));
}

void make_manifest(int dir_fd) {
    write_manifest(dir_fd, {.checkpoint_id = sample::id_of(1),
                            .driver_version = "580.95.05",
                            .gpus = {{.uuid = sample::id_of(2), .name = "GPU"}},
                            .tasks = {{.pid = 7,
                                       .externalized = true,
                                       .digest = sample::id_of(3),
                                       .gpu_source = GpuSource::nvml,
                                       .gpus = {{.gpu = 0, .memory_size = 1}}},
                                      {.pid = 9}}});
}

void make_manifest_with_requirements(int dir_fd) {
    Manifest manifest;
    manifest.checkpoint_id = sample::id_of(1);
    manifest.requirements = {.files = {{.path = "/lib/a",
                                        .size = 5,
                                        .identity = FileIdentity::build_id,
                                        .id = sample::Buffer(20, std::byte{1})},
                                       {.place = FilePlace::container,
                                        .path = "/lib/b",
                                        .size = 6,
                                        .identity = FileIdentity::content,
                                        .id = sample::Buffer(16, std::byte{2})},
                                       {.place = FilePlace::inner, .path = "/data", .size = 7}},
                             .unrecorded = 1};
    const sample::TempDir dir;
    write_manifest(dir.fd(), manifest);
    sample::write_file(dir_fd, "requirements", sample::read_file(dir.fd(), kManifestName));
}

} // namespace

int main(int argc, char** argv) {
    CHECK(argc == 2);
    const int dir_fd = ::open(argv[1], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    CHECK(dir_fd >= 0);
    make_images(dir_fd);
    make_child(dir_fd);
    make_alike(dir_fd);
    make_pack(dir_fd);
    make_manifest(dir_fd);
    make_manifest_with_requirements(dir_fd);
}
