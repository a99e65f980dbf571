// SPDX-License-Identifier: Apache-2.0
#include "core/manifest.hpp"

#include "core/error.hpp"
#include "core/fields.hpp"
#include "core/image_metadata.hpp"
#include "core/sealed_block.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <functional>
#include <string_view>
#include <utility>

namespace gpustasis {
namespace {

constexpr std::size_t kFixedSize = 96;
constexpr std::size_t kTaskSize = 32;
constexpr std::size_t kTaskGpuSize = 16;
constexpr std::size_t kParentSize = 32;
constexpr std::size_t kPackSize = 32;
constexpr std::uint32_t kMaxTasks = 65536;
constexpr std::uint32_t kMaxTaskGpus = 1U << 20;
constexpr std::size_t kTaskReserved = 5;
constexpr std::size_t kParentReserved = 12;
constexpr std::size_t kPackReserved = 16;
constexpr std::size_t kMaxSize = kFixedSize + format::kGpuSize * format::kMaxGpus +
                                 kTaskSize * std::size_t{kMaxTasks} +
                                 kTaskGpuSize * std::size_t{kMaxTaskGpus} + kParentSize +
                                 kPackSize + format::kMaxRequirementsSize + format::kHashSize;

constexpr format::BlockKind kManifest{
    .magic = std::string_view("\x93"
                              "GPUSMF\n",
                              8),
    .header_size = kFixedSize,
    .wrong_magic = "not a manifest: wrong magic",
    .wrong_hash = "does not match its checksum: damaged, or cut short",
    .features = format::kParent | format::kRequirements | format::kCpuMemory | format::kFiles};

[[noreturn]] void corrupt(const std::string& what) {
    throw Error(Errc::corrupt_data, what);
}

std::size_t count_task_gpus(const Manifest& manifest) noexcept {
    std::size_t count = 0;
    for (const ManifestTask& task : manifest.tasks)
        count += task.gpus.size();
    return count;
}

/// nullptr: nothing is wrong with what `task` says about its GPUs.
const char* fault_of_gpus(const ManifestTask& task, std::size_t gpu_count) noexcept {
    if (task.gpu_source > GpuSource::nvml)
        return "unknown source of its GPUs";
    if (task.gpus.empty() != (task.gpu_source == GpuSource::unknown))
        return "its GPUs and their source contradict each other";
    std::int64_t last = -1;
    for (const TaskGpu& gpu : task.gpus) {
        if (gpu.gpu >= gpu_count)
            return "a GPU that the manifest does not list";
        if (gpu.gpu <= last)
            return "its GPUs do not ascend";
        if (task.gpu_source == GpuSource::device_files && gpu.memory_size != TaskGpu::kUnknownSize)
            return "device files do not tell how much memory is in use";
        last = gpu.gpu;
    }
    return nullptr;
}

void check(const Manifest& manifest, Errc blame) {
    format::check_machine(manifest.driver_version, manifest.gpus, blame);
    if (manifest.tasks.size() > kMaxTasks)
        throw Error(blame, "too many tasks: " + std::to_string(manifest.tasks.size()));
    if (count_task_gpus(manifest) > kMaxTaskGpus)
        throw Error(blame, "too many GPUs of tasks: " + std::to_string(count_task_gpus(manifest)));
    if ((manifest.parent_id == Id{}) != (manifest.chain_length == 0))
        throw Error(blame, "parent and length of the chain contradict each other");
    if (manifest.chain_length > format::kMaxDepth)
        throw Error(blame, "chain is too long: " + std::to_string(manifest.chain_length));
    if (manifest.requirements)
        format::check_requirements(*manifest.requirements, blame);
    std::pair<std::uint32_t, MemoryKind> last{0, MemoryKind::cpu};
    for (const ManifestTask& task : manifest.tasks) {
        const auto refuse = [&](const char* why) {
            throw Error(blame, "task " + std::to_string(task.pid) + ": " + why);
        };
        if (task.pid > format::kMaxPid)
            refuse("pid out of range");
        const std::pair place{task.pid, task.kind};
        if (place <= last) // also refuses pid 0
            refuse("pids do not ascend");
        if (static_cast<std::uint32_t>(task.state_before) > format::kMaxState)
            refuse("unknown state");
        if (!task.externalized && task.digest != Id{})
            refuse("digest of an image that does not exist");
        if (const char* fault = fault_of_gpus(task, manifest.gpus.size()); fault != nullptr)
            refuse(fault);
        if (task.kind == MemoryKind::cpu &&
            (!task.externalized || task.state_before != ProcessState::running ||
             task.gpu_source != GpuSource::unknown))
            refuse("CPU memory without an image, or with what only GPU memory has");
        if (task.kind > MemoryKind::cpu)
            refuse("its kind is none of memory");
        last = place;
    }
}

ManifestTask unpack_task(FieldReader& in) {
    ManifestTask task;
    task.pid = in.number<std::uint32_t>();
    task.state_before = static_cast<ProcessState>(in.number<std::uint32_t>());
    const auto externalized = in.number<std::uint8_t>();
    if (externalized > 1)
        corrupt("externalized is neither 0 nor 1");
    task.externalized = externalized == 1;
    task.gpu_source = static_cast<GpuSource>(in.number<std::uint8_t>());
    task.kind = format::unpack_kind(in);
    in.reserved(kTaskReserved);
    task.digest = in.id();
    return task;
}

/// The tasks stand there already, in ascending order.
void unpack_task_gpus(std::uint32_t count, FieldReader& in, std::vector<ManifestTask>& tasks) {
    auto task = tasks.begin();
    for (std::uint32_t i = 0; i < count; ++i) {
        const auto pid = in.number<std::uint32_t>();
        while (task != tasks.end() && (task->pid != pid || task->kind != MemoryKind::gpu))
            ++task;
        if (task == tasks.end())
            corrupt("a GPU of task " + std::to_string(pid) +
                    ", which is out of order or not there");
        const auto gpu = in.number<std::uint32_t>();
        task->gpus.push_back({gpu, in.number<std::uint64_t>()});
    }
}

Manifest unpack(Bytes bytes) {
    if (bytes.size() < kFixedSize + format::kHashSize)
        corrupt("too short for a manifest");
    auto [in, required, hash] = format::open_block(bytes, kManifest);
    const bool has_parent = (required & format::kParent) != 0;
    const bool has_requirements = (required & format::kRequirements) != 0;
    const bool has_pack = (required & format::kFiles) != 0;

    Manifest manifest;
    manifest.checkpoint_id = in.id();
    manifest.driver_api_version = in.number<std::uint32_t>();
    const auto gpu_count = in.number<std::uint32_t>();
    const auto task_count = in.number<std::uint32_t>();
    const auto task_gpu_count = in.number<std::uint32_t>();
    const std::size_t least_size = kFixedSize + format::kGpuSize * gpu_count +
                                   kTaskSize * task_count + kTaskGpuSize * task_gpu_count +
                                   (has_parent ? kParentSize : 0) + (has_pack ? kPackSize : 0) +
                                   (has_requirements ? format::kRequirementsFixedSize : 0) +
                                   format::kHashSize;
    if (gpu_count > format::kMaxGpus || task_count > kMaxTasks || task_gpu_count > kMaxTaskGpus ||
        bytes.size() < least_size || (!has_requirements && bytes.size() != least_size))
        corrupt("has the wrong size");
    manifest.driver_version = in.text(format::kDriverVersionWidth);
    manifest.gpus = format::unpack_gpus(gpu_count, in);
    manifest.tasks.reserve(task_count);
    for (std::uint32_t i = 0; i < task_count; ++i)
        manifest.tasks.push_back(unpack_task(in));
    unpack_task_gpus(task_gpu_count, in, manifest.tasks);
    if (has_parent) {
        manifest.parent_id = in.id();
        manifest.chain_length = in.number<std::uint32_t>();
        in.reserved(kParentReserved);
        if (manifest.parent_id == Id{})
            corrupt("parent section without a parent");
    }
    if (has_pack) {
        manifest.pack = in.id();
        in.reserved(kPackReserved);
    }
    if (has_requirements)
        manifest.requirements = format::unpack_requirements(in);
    in.take(format::kHashSize);
    if (in.size() != 0)
        corrupt("has the wrong size");
    check(manifest, Errc::corrupt_data);
    if (manifest.has(MemoryKind::cpu) != ((required & format::kCpuMemory) != 0))
        corrupt("kinds of memory and features contradict each other");
    return manifest;
}

std::vector<std::byte> pack(const Manifest& manifest) {
    const bool has_parent = manifest.parent_id != Id{};
    FieldWriter out = format::begin_block(
        kManifest,
        (has_parent ? format::kParent : std::uint64_t{0}) |
            (manifest.requirements ? format::kRequirements : std::uint64_t{0}) |
            (manifest.has(MemoryKind::cpu) ? format::kCpuMemory : std::uint64_t{0}) |
            (manifest.pack ? format::kFiles : std::uint64_t{0}),
        kFixedSize + format::kGpuSize * manifest.gpus.size() + kTaskSize * manifest.tasks.size() +
            kTaskGpuSize * count_task_gpus(manifest) + kParentSize + kPackSize +
            (manifest.requirements ? format::requirements_size(*manifest.requirements) : 0) +
            format::kHashSize);
    out.append(manifest.checkpoint_id);
    out.number(manifest.driver_api_version);
    out.number(static_cast<std::uint32_t>(manifest.gpus.size()));
    out.number(static_cast<std::uint32_t>(manifest.tasks.size()));
    out.number(static_cast<std::uint32_t>(count_task_gpus(manifest)));
    out.text(manifest.driver_version, format::kDriverVersionWidth);
    format::pack_gpus(manifest.gpus, out);
    for (const ManifestTask& task : manifest.tasks) {
        out.number(task.pid);
        out.number(static_cast<std::uint32_t>(task.state_before));
        out.number(static_cast<std::uint8_t>(task.externalized));
        out.number(static_cast<std::uint8_t>(task.gpu_source));
        out.number(static_cast<std::uint8_t>(task.kind));
        out.reserved(kTaskReserved);
        out.append(task.digest);
    }
    for (const ManifestTask& task : manifest.tasks)
        for (const TaskGpu& gpu : task.gpus) {
            out.number(task.pid);
            out.number(gpu.gpu);
            out.number(gpu.memory_size);
        }
    if (has_parent) {
        out.append(manifest.parent_id);
        out.number(manifest.chain_length);
        out.reserved(kParentReserved);
    }
    if (manifest.pack) {
        out.append(*manifest.pack);
        out.reserved(kPackReserved);
    }
    if (manifest.requirements)
        format::pack_requirements(*manifest.requirements, out);
    return format::seal(std::move(out));
}

} // namespace

std::string image_name(std::uint32_t pid, MemoryKind kind) {
    const char* what = kind == MemoryKind::cpu ? "memory-" : "";
    return std::string("gpustasis-") + what + std::to_string(pid) + ".img";
}

const ManifestTask* Manifest::find(std::uint32_t pid, MemoryKind kind) const noexcept {
    const auto found = std::ranges::find_if(
        tasks, [&](const ManifestTask& task) { return task.pid == pid && task.kind == kind; });
    return found == tasks.end() ? nullptr : &*found;
}

bool Manifest::has(MemoryKind kind) const noexcept {
    return std::ranges::find(tasks, kind, &ManifestTask::kind) != tasks.end();
}

void Manifest::add(ManifestTask task) {
    tasks.push_back(std::move(task));
    std::ranges::sort(tasks, {},
                      [](const ManifestTask& one) { return std::pair{one.pid, one.kind}; });
}

std::vector<std::byte> pack_manifest(const Manifest& manifest) {
    check(manifest, Errc::bad_argument);
    return pack(manifest);
}

std::uint64_t max_manifest_size() noexcept {
    return kMaxSize;
}

namespace {

void writing_manifest(const std::function<void()>& write) {
    try {
        write();
    } catch (const Error& e) {
        throw Error(e, std::string(kManifestName) + ": " + e.what());
    }
}

} // namespace

ManifestFile::ManifestFile(int dir_fd, const Manifest& manifest,
                           const std::optional<FileTimes>& times) {
    writing_manifest([&] {
        const std::vector<std::byte> bytes = pack_manifest(manifest);
        file_.emplace(dir_fd, kManifestName);
        write_at(file_->fd(), 0, bytes);
        if (times && ::futimens(file_->fd(), times->data()) != 0)
            throw io_error("set its times", errno);
        file_->sync();
    });
}

void ManifestFile::commit() {
    writing_manifest([this] { file_->commit(); });
}

void write_manifest(int dir_fd, const Manifest& manifest, const std::optional<FileTimes>& times) {
    ManifestFile(dir_fd, manifest, times).commit();
}

Manifest read_manifest(int dir_fd) {
    try {
        const UniqueFd fd = open_regular(dir_fd, kManifestName);
        const std::uint64_t size = file_size(fd.get());
        if (size > kMaxSize)
            corrupt("too large for a manifest");
        std::vector<std::byte> bytes(size);
        read_at(fd.get(), 0, bytes);
        return unpack(bytes);
    } catch (const Error& e) {
        throw Error(e, std::string(kManifestName) + ": " + e.what());
    }
}

Manifest parse_manifest(Bytes bytes, const std::string& name) {
    try {
        return unpack(bytes);
    } catch (const Error& e) {
        throw Error(e, name + ": " + e.what());
    }
}

} // namespace gpustasis
