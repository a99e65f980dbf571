// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"
#include "sample.hpp"

#include "core/hash.hpp"
#include "core/manifest.hpp"

#include <cstring>

using namespace gpustasis;
using sample::Buffer;

namespace {

Manifest example() {
    return {.checkpoint_id = sample::id_of(0x11),
            .driver_api_version = 13000,
            .driver_version = "580.95.05",
            .gpus = {{.uuid = sample::id_of(0x33), .name = "NVIDIA H200", .memory_size = 1U << 30}},
            .tasks = {{.pid = 7,
                       .externalized = true,
                       .digest = sample::id_of(0x44),
                       .gpu_source = GpuSource::nvml,
                       .gpus = {{.gpu = 0, .memory_size = 1U << 20}}},
                      {.pid = 9, .state_before = ProcessState::checkpointed}}};
}

void what_was_written_is_read() {
    const sample::TempDir dir;
    Manifest packed = example();
    packed.pack = sample::id_of(0x55);
    for (const Manifest& manifest : {example(), Manifest{}, packed}) {
        write_manifest(dir.fd(), manifest);
        CHECK(read_manifest(dir.fd()) == manifest);
    }
}

void damage_is_found() {
    const sample::TempDir dir;
    write_manifest(dir.fd(), example());
    Buffer bytes = sample::read_file(dir.fd(), kManifestName);
    for (std::size_t keep = 0; keep < bytes.size(); ++keep) {
        sample::write_file(dir.fd(), kManifestName, Bytes(bytes).first(keep));
        CHECK_THROWS(Errc::corrupt_data, read_manifest(dir.fd()));
    }
    for (std::size_t bit = 0; bit < bytes.size() * 8; ++bit) {
        const auto mask = static_cast<std::byte>(1U << (bit % 8));
        bytes[bit / 8] ^= mask;
        sample::write_file(dir.fd(), kManifestName, bytes);
        CHECK_THROWS(Errc::corrupt_data, read_manifest(dir.fd()));
        bytes[bit / 8] ^= mask;
    }
    bytes.push_back(std::byte{0});
    sample::write_file(dir.fd(), kManifestName, bytes);
    CHECK_THROWS(Errc::corrupt_data, read_manifest(dir.fd()));
}

template <class T>
void forged(std::size_t offset, T value, Errc code, const Manifest& manifest = example()) {
    const sample::TempDir dir;
    write_manifest(dir.fd(), manifest);
    Buffer bytes = sample::read_file(dir.fd(), kManifestName);
    std::memcpy(&bytes[offset], &value, sizeof value);
    const std::size_t body = bytes.size() - 16;
    const Id hash = hash128(Bytes(bytes).first(body));
    std::ranges::copy(hash, bytes.begin() + static_cast<std::ptrdiff_t>(body));
    sample::write_file(dir.fd(), kManifestName, bytes);
    CHECK_THROWS(code, read_manifest(dir.fd()));
}

void values_out_of_range_are_refused() {
    const std::size_t task = 96 + 280;
    forged(8, 2U, Errc::unsupported);
    forged(12, 97U, Errc::corrupt_data);
    forged(16, std::uint64_t{1} << 40, Errc::unsupported);
    forged(52, 2U, Errc::corrupt_data);
    forged(52, 0xffffffffU, Errc::corrupt_data);
    forged(56, 1U, Errc::corrupt_data);
    forged(56, 0xffffffffU, Errc::corrupt_data);
    forged(95, 'x', Errc::corrupt_data);
    forged(task, 0U, Errc::corrupt_data);
    forged(task, 9U, Errc::corrupt_data);
    forged(task + 4, 4U, Errc::corrupt_data);
    forged(task + 8, std::uint8_t{0}, Errc::corrupt_data);
    forged(task + 8, std::uint8_t{2}, Errc::corrupt_data);
    forged(task + 9, std::uint8_t{0}, Errc::corrupt_data);
    forged(task + 9, std::uint8_t{1}, Errc::corrupt_data);
    forged(task + 9, std::uint8_t{3}, Errc::corrupt_data);
    forged(task + 10, std::uint8_t{1}, Errc::corrupt_data);
    const std::size_t task_gpu = task + 2 * 32;
    forged(60, 0U, Errc::corrupt_data);
    forged(60, 2U, Errc::corrupt_data);
    forged(60, 0xffffffffU, Errc::corrupt_data);
    forged(task_gpu, 8U, Errc::corrupt_data);
    forged(task_gpu, 9U, Errc::corrupt_data);
    forged(task_gpu + 4, 1U, Errc::corrupt_data);
}

/// CPU memory of the first task too, and of one without CUDA.
Manifest with_cpu_memory() {
    Manifest manifest = example();
    for (const std::uint32_t pid : {7U, 8U})
        manifest.add({.pid = pid,
                      .externalized = true,
                      .digest = sample::id_of(0x55),
                      .kind = MemoryKind::cpu});
    return manifest;
}

void entries_of_cpu_memory_are_checked() {
    const sample::TempDir dir;
    write_manifest(dir.fd(), with_cpu_memory());
    CHECK(read_manifest(dir.fd()) == with_cpu_memory());
    const auto refused = [](std::size_t offset, auto value) {
        forged(offset, value, Errc::corrupt_data, with_cpu_memory());
    };
    constexpr std::size_t kFirst = 96 + 280; // GPU and CPU memory of pid 7, CPU of 8, GPU of 9
    constexpr std::size_t kSecond = kFirst + 32;
    constexpr std::size_t kThird = kSecond + 32;
    refused(16, std::uint64_t{0});          // required features
    refused(kFirst + 10, std::uint8_t{1});  // each of pid 7 once
    refused(kSecond + 10, std::uint8_t{0}); // the same
    refused(kThird + 10, std::uint8_t{2});  // an unknown kind
    refused(kThird + 11, std::uint8_t{1});  // reserved
    refused(kThird + 4, 1U);                // state_before: nobody has locked it
    refused(kThird + 8, std::uint8_t{0});   // no image
    refused(kThird + 9, std::uint8_t{1});   // source of GPUs that it has not
    refused(kThird + 64, 8U);               // a GPU of what is no GPU memory
}

void a_pack_is_checked() {
    Manifest manifest = example();
    manifest.pack = sample::id_of(0x55);
    constexpr std::size_t kSection = 96 + 280 + 2 * 32 + 16;
    forged(kSection + 16, std::uint8_t{1}, Errc::corrupt_data, manifest); // reserved
    forged(16, std::uint64_t{0}, Errc::corrupt_data, manifest);           // no feature
    forged(16, std::uint64_t{1} << 5, Errc::corrupt_data);                // no section
}

void what_cannot_be_stored_is_refused() {
    const sample::TempDir dir;
    const auto refused = [&](auto change) {
        Manifest manifest = example();
        change(manifest);
        CHECK_THROWS(Errc::bad_argument, write_manifest(dir.fd(), manifest));
    };
    refused([](Manifest& m) { m.tasks[0].pid = 0; });
    refused([](Manifest& m) { m.tasks[0].pid = 9; });
    refused([](Manifest& m) { m.tasks[1].pid = 0x80000000; });
    refused([](Manifest& m) { m.tasks[0].externalized = false; });
    refused([](Manifest& m) { m.tasks[0].gpu_source = GpuSource::unknown; });
    refused([](Manifest& m) { m.tasks[0].gpu_source = GpuSource::device_files; });
    refused([](Manifest& m) { m.tasks[0].gpus.push_back({}); });
    refused([](Manifest& m) { m.tasks[0].gpus[0].gpu = 1; });
    refused([](Manifest& m) { m.tasks[1].gpu_source = GpuSource::nvml; });
    refused([](Manifest& m) { m.driver_version.assign(32, 'x'); });
    refused([](Manifest& m) { m.gpus.resize(257); });
    CHECK(dir.empty());
}

void a_missing_manifest_is_an_io_error() {
    const sample::TempDir dir;
    CHECK_THROWS(Errc::io, read_manifest(dir.fd()));
}

} // namespace

int main() {
    what_was_written_is_read();
    damage_is_found();
    values_out_of_range_are_refused();
    entries_of_cpu_memory_are_checked();
    a_pack_is_checked();
    what_cannot_be_stored_is_refused();
    a_missing_manifest_is_an_io_error();
    CHECK(image_name(42) == "gpustasis-42.img");
    CHECK(image_name(42, MemoryKind::cpu) == "gpustasis-memory-42.img");
}
