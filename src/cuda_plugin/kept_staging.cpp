// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/kept_staging.hpp"

#include "core/error.hpp"
#include "cuda_plugin/findings.hpp"
#include "cuda_plugin/host.hpp"
#include "cuda_plugin/side_by_side.hpp"

#include <algorithm>

namespace gpustasis {
namespace {

std::string mib(std::uint64_t bytes) {
    return std::to_string(bytes >> 20) + " MiB";
}

} // namespace

std::string why_not_all_fits(const std::vector<ToStage>& tasks, const std::string& root) {
    StagingRoom room(root);
    for (const auto& [pid, bytes] : tasks) {
        const std::string who = "pid " + std::to_string(pid);
        if (!bytes)
            return "how much GPU memory " + who + " uses is not known";
        if (const auto full = room.add(pid, with_margin(*bytes)))
            return who + ": " + full->text;
    }
    return "";
}

void KeptStaging::prepare() {
    if (!config_.externalize || config_.staging == Staging::drop || pages_)
        return;
    try {
        pages_.emplace();
    } catch (const Error& e) {
        if (config_.staging == Staging::keep)
            throw Error(e, std::string("staging = \"keep\": ") + e.what());
        why_not_ = e.what();
    }
}

void KeptStaging::choose(const std::vector<ToStage>& tasks) {
    if (!config_.externalize || config_.staging == Staging::drop || tasks.empty())
        return;
    std::string why_not = why_not_;
    if (config_.staging == Staging::automatic && why_not.empty())
        why_not = why_not_all_fits(tasks);
    keeps_ = why_not.empty() && pages_.has_value();
    if (config_.staging == Staging::keep)
        host::info("staging = \"keep\": staged memory stays in the tasks, hidden from criu");
    else if (keeps_)
        host::info(
            "staging = \"auto\": staged memory stays in the tasks, hidden from criu: there is "
            "room for that of all at once");
    else
        host::info("staging = \"auto\": staged memory is dropped: " + why_not);
}

// With what is dropped one task after the other fits; here that of all before this one is still there, and the measured
// room lacks it.
bool KeptStaging::has_room(const ToStage& task) {
    const auto& [pid, bytes] = task;
    if (!any_kept_ || !keeps_ || !bytes)
        return true;
    const std::uint64_t room = room_of(pid);
    if (with_margin(*bytes) <= room)
        return true;
    const std::string why = "the driver stages " + mib(*bytes) + " of the GPU memory of pid " +
                            std::to_string(pid) +
                            " in host memory, beside that of other tasks, which is kept "
                            "there, and there is room for " +
                            mib(room);
    if (config_.staging == Staging::keep)
        throw Error(Errc::unsupported,
                    why + ": set staging = \"drop\" or \"auto\", or free memory");
    host::info("staging = \"auto\": that of all tasks is dropped after all: " + why);
    keeps_ = false;
    return false;
}

// CRIU dumps shared memory once, by its file, and asks there where it has data.
bool KeptStaging::keeps(const std::vector<Region>& regions) const {
    if (!keeps_)
        return false;
    if (std::ranges::find(regions, RegionKind::shared_anonymous, &Region::kind) == regions.end())
        return true;
    const std::string why =
        "the driver has put GPU memory into shared memory, of which criu asks no "
        "task";
    if (config_.staging == Staging::keep)
        throw Error(Errc::unsupported,
                    "staging = \"keep\": " + why + ": set staging = \"drop\" or \"auto\"");
    host::info("staging = \"auto\": that of one task is dropped: " + why);
    return false;
}

void KeptStaging::hide(pid_t pid, const std::vector<Region>& regions) {
    if (!pages_)
        throw Error(Errc::io, "criu's questions lead to nobody who would hide staged memory");
    any_kept_ = true;
    pages_->hide(pid, MemoryKind::gpu, regions);
    host::info("keeping the staged memory of pid " + std::to_string(pid) + ", hidden from criu");
}

void KeptStaging::finish(bool succeeded) noexcept {
    if (!pages_ || !any_kept_ || !succeeded) // one that has failed may not have asked yet
        return;
    for (TaskStatistics& told : statistics_.tasks) {
        if (told.staging != "kept")
            continue;
        const HiddenPages::Answered answered = pages_->answered(told.pid, MemoryKind::gpu);
        told.stored_twice = answered.wanted - answered.hidden;
        if (told.stored_twice != 0)
            host::warn("criu did not ask this plugin about " + mib(told.stored_twice) +
                       " of the GPU memory of pid " + std::to_string(told.pid) +
                       ": its images hold them as well");
    }
}

} // namespace gpustasis
