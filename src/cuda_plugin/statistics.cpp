// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/statistics.hpp"

#include "core/file.hpp"
#include "cuda_plugin/nvml.hpp"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <span>

#include <nlohmann/json.hpp>

namespace gpustasis {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kVersion = 1;

Json to_json(const Phases& phases) {
    Json json = Json::object();
    for (const auto& [name, milliseconds] : phases.milliseconds())
        json[name] = milliseconds;
    return json;
}

Json to_json(const EncodingTotals::Count& count) {
    return {{"chunks", count.chunks}, {"plain_bytes", count.plain}, {"stored_bytes", count.stored}};
}

const char* state_name(ProcessState state) {
    switch (state) {
    case ProcessState::running: return "running";
    case ProcessState::locked: return "locked";
    case ProcessState::checkpointed: return "checkpointed";
    case ProcessState::failed: return "failed";
    }
    return "unknown";
}

const char* source_name(GpuSource source) {
    switch (source) {
    case GpuSource::unknown: return "unknown";
    case GpuSource::device_files: return "device files";
    case GpuSource::nvml: return "nvml";
    }
    return "unknown";
}

Json to_json(const ProcessGpus& found) {
    Json list = Json::array();
    for (const ProcessGpus::Gpu& gpu : found.gpus) {
        Json size = nullptr;
        if (gpu.memory_size != TaskGpu::kUnknownSize)
            size = gpu.memory_size;
        list.push_back({{"uuid", gpu_uuid_text(gpu.uuid)}, {"memory_bytes", std::move(size)}});
    }
    return {{"source", source_name(found.source)},
            {"why_not_all", found.why_not_all},
            {"list", std::move(list)}};
}

Json to_json(const TaskStatistics& task) {
    return {{"pid", task.pid},
            {"image_pid", task.image_pid},
            {"externalized", task.externalized},
            {"state_before", state_name(task.state_before)},
            {"regions", task.regions},
            {"staged_bytes", task.staged_bytes},
            {"zero", to_json(task.totals.zero)},
            {"lz4", to_json(task.totals.lz4)},
            {"raw", to_json(task.totals.raw)},
            {"ref", to_json(task.totals.ref)},
            {"alike", to_json(task.totals.alike)},
            {"file_bytes", task.file_bytes},
            {"damaged_in_parent", task.damaged_in_parent},
            {"gpu_memory", task.gpu_memory},
            {"staged_because", task.staged_because},
            {"staging", task.staging},
            {"stored_twice_bytes", task.stored_twice},
            {"not_guarded_because", task.not_guarded_because},
            {"huge_pages", task.huge_pages},
            {"gpus", to_json(task.gpus)},
            {"phases_ms", to_json(task.phases)}};
}

Json to_json(const CpuMemoryStatistics& task) {
    return {{"pid", task.pid},
            {"image_pid", task.image_pid},
            {"left_because", task.left_because},
            {"regions", task.regions},
            {"bytes", task.bytes},
            {"shared_bytes", task.shared_bytes},
            {"zero", to_json(task.totals.zero)},
            {"lz4", to_json(task.totals.lz4)},
            {"raw", to_json(task.totals.raw)},
            {"ref", to_json(task.totals.ref)},
            {"alike", to_json(task.totals.alike)},
            {"file_bytes", task.file_bytes},
            {"damaged_in_parent", task.damaged_in_parent},
            {"scans", task.scans},
            {"stored_twice_bytes", task.stored_twice},
            {"phases_ms", to_json(task.phases)}};
}

Json parent_json(const Statistics& statistics) {
    if (statistics.parent_directory.empty())
        return nullptr;
    return {{"directory", statistics.parent_directory},
            {"checkpoint_id", statistics.parent_id},
            {"chain_length", statistics.chain_length}};
}

Json to_json(const Statistics& statistics) {
    Json gpus = Json::array();
    for (const GpuInfo& gpu : statistics.gpus)
        gpus.push_back({{"uuid", gpu_uuid_text(gpu.uuid)},
                        {"name", gpu.name},
                        {"memory_bytes", gpu.memory_size}});
    Json moves = Json::array();
    for (const GpuMove& move : statistics.gpu_moves)
        moves.push_back({{"from", gpu_uuid_text(move.from)}, {"to", gpu_uuid_text(move.to)}});
    Json tasks = Json::array();
    for (const TaskStatistics& task : statistics.tasks)
        tasks.push_back(to_json(task));
    Json cpu_memory = Json::array();
    for (const CpuMemoryStatistics& task : statistics.cpu_memory)
        cpu_memory.push_back(to_json(task));
    return {{"version", kVersion},
            {"stage", statistics.stage},
            {"result", statistics.result},
            {"error", statistics.error},
            {"backend", statistics.backend},
            {"driver_api_version", statistics.driver_api_version},
            {"driver_version", statistics.driver_version},
            {"gpus", std::move(gpus)},
            {"gpu_moves", std::move(moves)},
            {"parallel_gpus", statistics.parallel_gpus},
            {"in_turn_because", statistics.in_turn_because},
            {"risks", statistics.risks},
            {"parent", parent_json(statistics)},
            {"full_because", statistics.full_because},
            {"not_kept_because", statistics.not_kept_because},
            {"arena_directory", statistics.arena_directory},
            {"config", statistics.config_source},
            {"threads", statistics.threads},
            {"tasks", std::move(tasks)},
            {"cpu_memory", std::move(cpu_memory)},
            {"shared_stored_twice_bytes", statistics.shared_stored_twice},
            {"phases_ms", to_json(statistics.phases)}};
}

} // namespace

void Phases::add(const std::string& name, std::chrono::steady_clock::duration time) noexcept {
    const double milliseconds = std::chrono::duration<double, std::milli>(time).count();
    try {
        const auto known = std::ranges::find(times_, name, &std::pair<std::string, double>::first);
        if (known != times_.end())
            known->second += milliseconds;
        else
            times_.emplace_back(name, milliseconds);
    } catch (const std::exception&) {
        return;
    }
}

void write_statistics(int image_dir, const Statistics& statistics) {
    // Names and errors may hold bytes that are no UTF-8 (a task may call itself anything).
    const std::string text =
        to_json(statistics).dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
    PartFile file(image_dir, "gpustasis-" + statistics.stage + ".json");
    write_at(file.fd(), 0, std::as_bytes(std::span(text)));
    file.commit();
}

} // namespace gpustasis
