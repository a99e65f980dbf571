// SPDX-License-Identifier: Apache-2.0
#include "core/image_metadata.hpp"

#include "core/chunk_codec.hpp"

#include <algorithm>
#include <bit>
#include <string>
#include <tuple>

namespace gpustasis::format {
namespace {

constexpr std::size_t kFixedReserved = 4;
constexpr std::size_t kRegionReserved = 3;
constexpr std::size_t kSourceReserved = 1;
constexpr std::uint32_t kMaxProtection = 7; // PROT_READ | PROT_WRITE | PROT_EXEC

void check_region(const Region& region, std::uint64_t lowest, Errc blame) {
    const auto refuse = [&](const char* why) {
        throw Error(blame, "region at " + std::to_string(region.address) + ": " + why);
    };
    if (region.address % kPageSize != 0 || region.length % kPageSize != 0)
        refuse("not made of whole pages");
    if (region.length == 0)
        refuse("empty");
    if (region.address > kMaxAddress || region.length > kMaxAddress - region.address)
        refuse("beyond the end of any address space");
    if (region.address < lowest)
        refuse("overlaps the one before it, or comes out of order");
    if (region.protection > kMaxProtection)
        refuse("unknown protection bits");
    if (region.kind > RegionKind::device)
        refuse("unknown kind");
}

// `sizes`: of what came before, by GPU.
void check_device_region(const Region& region, const ImageInfo& info,
                         std::vector<std::uint64_t>& sizes, Errc blame) {
    const auto refuse = [&](const char* why) {
        throw Error(blame, "region at " + std::to_string(region.address) + ": " + why);
    };
    if (region.kind != RegionKind::device || !info.of_devices || info.kind != MemoryKind::gpu)
        refuse("memory of a GPU beside other memory");
    const std::size_t number = device_number(region.address);
    if (number >= info.gpus.size())
        refuse("of a GPU that is not listed");
    sizes.resize(info.gpus.size());
    if (device_offset(region.address) != sizes[number] || sizes[number] % kStripe != 0 ||
        region.length > kStripe)
        refuse("not the next stripe of its GPU's memory");
    sizes[number] += region.length;
}

void check_regions(const ImageInfo& info, Errc blame) {
    if (info.regions.size() > kMaxRegions)
        throw Error(blame, "too many regions: " + std::to_string(info.regions.size()));
    std::uint64_t lowest = 0;
    std::uint64_t chunks = 0; // cannot overflow: regions do not overlap
    std::vector<std::uint64_t> sizes;
    for (const Region& region : info.regions) {
        check_region(region, lowest, blame);
        lowest = region.address + region.length;
        if (region.kind == RegionKind::device || info.of_devices)
            check_device_region(region, info, sizes, blame);
        chunks += (region.length + info.chunk_size - 1) / info.chunk_size;
    }
    if (chunks > kMaxChunks)
        throw Error(blame, "too many chunks, " + std::to_string(chunks) +
                               ": the chunk size is too small for this much memory");
}

void check_sources(const ImageInfo& info, Errc blame) {
    if (info.sources.size() > kMaxSources)
        throw Error(blame, "too many sources: " + std::to_string(info.sources.size()));
    std::tuple<std::uint32_t, std::uint32_t, MemoryKind> last{};
    for (const Source& source : info.sources) {
        const auto refuse = [&](const char* why) {
            throw Error(blame, "source " + std::to_string(source.pid) + " at depth " +
                                   std::to_string(source.depth) + ": " + why);
        };
        if (source.pid == 0 || source.pid > kMaxPid)
            refuse("pid out of range");
        if (source.depth > kMaxDepth)
            refuse("depth out of range");
        if (source.depth != 0 && info.parent_id == Id{})
            refuse("there is no parent");
        if (source.depth == 0 && source.checkpoint_id != info.checkpoint_id)
            refuse("is of another checkpoint");
        if (source.depth == 0 && source.pid == info.pid && source.kind == info.kind)
            refuse("is the image itself");
        if (source.file_size > kMaxFileSize)
            refuse("file size out of range");
        const std::tuple place{source.depth, source.pid, source.kind};
        if (place <= last)
            refuse("out of order");
        last = place;
    }
}

} // namespace

MemoryKind unpack_image_kind(FieldReader& in) {
    const auto kind = in.number<std::uint8_t>();
    if (kind > static_cast<std::uint8_t>(MemoryKind::files))
        throw Error(Errc::corrupt_data, "unknown kind of memory: " + std::to_string(kind));
    return static_cast<MemoryKind>(kind);
}

MemoryKind unpack_kind(FieldReader& in) {
    const MemoryKind kind = unpack_image_kind(in);
    if (kind == MemoryKind::files)
        throw Error(Errc::corrupt_data, "files where there can only be memory");
    return kind;
}

bool has_cpu_memory(const ImageInfo& info) noexcept {
    return info.kind == MemoryKind::cpu ||
           std::ranges::find(info.sources, MemoryKind::cpu, &Source::kind) != info.sources.end();
}

bool has_alike(const ImageInfo& info) noexcept {
    return !info.sources.empty() && info.sources.front().depth == 0; // they ascend
}

Holder holder_of(std::uint16_t source, const std::vector<Source>& sources) noexcept {
    if (source == 0)
        return Holder::own;
    return sources[source - 1U].depth == 0 ? Holder::alike : Holder::earlier;
}

void check_machine(const std::string& driver_version, const std::vector<GpuInfo>& gpus,
                   Errc blame) {
    if (!text_fits(driver_version, kDriverVersionWidth))
        throw Error(blame, "driver version is too long or holds a zero byte");
    if (gpus.size() > kMaxGpus)
        throw Error(blame, "too many GPUs: " + std::to_string(gpus.size()));
    for (const GpuInfo& gpu : gpus)
        if (!text_fits(gpu.name, kGpuNameWidth))
            throw Error(blame, "name of a GPU is too long or holds a zero byte");
}

void check_info(const ImageInfo& info, Errc blame) {
    if (info.pid == 0 || info.pid > kMaxPid)
        throw Error(blame, "pid out of range: " + std::to_string(info.pid));
    if (!std::has_single_bit(info.chunk_size) || info.chunk_size < kMinChunkSize ||
        info.chunk_size > kMaxChunkSize)
        throw Error(blame, "chunk size out of range: " + std::to_string(info.chunk_size));
    if (static_cast<std::uint32_t>(info.state_before) > kMaxState)
        throw Error(blame, "unknown state of the task");
    if (!text_fits(info.comm, kCommWidth))
        throw Error(blame, "comm is too long or holds a zero byte");
    check_machine(info.driver_version, info.gpus, blame);
    if (info.of_devices && info.kind != MemoryKind::gpu)
        throw Error(blame, "memory of a GPU beside other memory");
    check_regions(info, blame);
    check_sources(info, blame);
}

void pack_gpus(const std::vector<GpuInfo>& gpus, FieldWriter& out) {
    for (const GpuInfo& gpu : gpus) {
        out.append(gpu.uuid);
        out.number(gpu.memory_size);
        out.text(gpu.name, kGpuNameWidth);
    }
}

std::vector<GpuInfo> unpack_gpus(std::uint32_t count, FieldReader& in) {
    std::vector<GpuInfo> gpus(count);
    for (GpuInfo& gpu : gpus) {
        gpu.uuid = in.id();
        gpu.memory_size = in.number<std::uint64_t>();
        gpu.name = in.text(kGpuNameWidth);
    }
    return gpus;
}

std::vector<std::byte> pack_metadata(const ImageInfo& info) {
    FieldWriter out(kMetadataFixedSize + kGpuSize * info.gpus.size() +
                    kRegionSize * info.regions.size() + kSourceSize * info.sources.size());
    out.number(info.start_time);
    out.append(info.boot_id);
    out.number(static_cast<std::uint32_t>(info.state_before));
    out.number(info.driver_api_version);
    out.number(static_cast<std::uint32_t>(info.regions.size()));
    out.number(static_cast<std::uint32_t>(info.gpus.size()));
    out.text(info.comm, kCommWidth);
    out.text(info.driver_version, kDriverVersionWidth);
    out.number(static_cast<std::uint32_t>(info.sources.size()));
    out.reserved(kFixedReserved);
    pack_gpus(info.gpus, out);
    for (const Region& region : info.regions) {
        out.number(region.address);
        out.number(region.length);
        out.number(region.protection);
        out.number(static_cast<std::uint8_t>(region.kind));
        out.reserved(kRegionReserved);
    }
    for (const Source& source : info.sources) {
        out.append(source.checkpoint_id);
        out.append(source.digest);
        out.number(source.file_size);
        out.number(source.pid);
        out.number(static_cast<std::uint16_t>(source.depth));
        out.number(static_cast<std::uint8_t>(source.kind));
        out.reserved(kSourceReserved);
    }
    return out.take();
}

void unpack_metadata(Bytes bytes, ImageInfo& info) {
    FieldReader in(bytes);
    info.start_time = in.number<std::uint64_t>();
    info.boot_id = in.id();
    info.state_before = static_cast<ProcessState>(in.number<std::uint32_t>());
    info.driver_api_version = in.number<std::uint32_t>();
    const auto region_count = in.number<std::uint32_t>();
    const auto gpu_count = in.number<std::uint32_t>();
    info.comm = in.text(kCommWidth);
    info.driver_version = in.text(kDriverVersionWidth);
    const auto source_count = in.number<std::uint32_t>();
    if (region_count > kMaxRegions || gpu_count > kMaxGpus || source_count > kMaxSources ||
        bytes.size() != kMetadataFixedSize + kGpuSize * gpu_count + kRegionSize * region_count +
                            kSourceSize * source_count)
        throw Error(Errc::corrupt_data, "metadata has the wrong size");
    in.reserved(kFixedReserved);
    info.gpus = unpack_gpus(gpu_count, in);
    info.regions.resize(region_count);
    for (Region& region : info.regions) {
        region.address = in.number<std::uint64_t>();
        region.length = in.number<std::uint64_t>();
        region.protection = in.number<std::uint32_t>();
        region.kind = static_cast<RegionKind>(in.number<std::uint8_t>());
        in.reserved(kRegionReserved);
    }
    info.sources.resize(source_count);
    for (Source& source : info.sources) {
        source.checkpoint_id = in.id();
        source.digest = in.id();
        source.file_size = in.number<std::uint64_t>();
        source.pid = in.number<std::uint32_t>();
        source.depth = in.number<std::uint16_t>();
        source.kind = unpack_kind(in);
        in.reserved(kSourceReserved);
    }
}

} // namespace gpustasis::format
