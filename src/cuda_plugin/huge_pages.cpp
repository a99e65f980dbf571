// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/huge_pages.hpp"

#include "core/error.hpp"
#include "cuda_plugin/host.hpp"
#include "tracee/injected_syscall.hpp"

#include <sys/mman.h>
#include <sys/syscall.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>

namespace gpustasis {
namespace {

constexpr std::uint64_t kHugePage = 2U << 20;
// Virtio 1.2, 5.5: the device's number, and its feature bit VIRTIO_BALLOON_F_PAGE_REPORTING.
constexpr const char* kBalloonDevice = "0x0005";
constexpr std::size_t kPageReporting = 5;

std::string first_word(const std::filesystem::path& path) {
    std::ifstream file(path);
    std::string word;
    file >> word;
    return word;
}

} // namespace

bool gives_memory_back() noexcept {
    try {
        for (const auto& device : std::filesystem::directory_iterator("/sys/bus/virtio/devices")) {
            const std::string features = first_word(device.path() / "features");
            if (first_word(device.path() / "device") == kBalloonDevice &&
                features.size() > kPageReporting && features[kPageReporting] == '1')
                return true;
        }
    } catch (const std::exception&) {
        return false; // no virtio
    }
    return false;
}

bool ask_for_huge_pages(HugePages wish, TaskRecord& record, const ImageInfo& info) {
    const auto large = [](const Region& region) {
        return region.kind == RegionKind::private_anonymous && region.length >= kHugePage;
    };
    if (wish == HugePages::off || std::ranges::none_of(info.regions, large) ||
        (wish == HugePages::automatic && gives_memory_back()))
        return false;
    try {
        InjectedSyscalls task({record.pid, record.restore_tid, record.thawed, record.signal_mask});
        for (const Region& region : info.regions)
            if (large(region))
                task.call(SYS_madvise, region.address, region.length, MADV_HUGEPAGE);
        task.finish();
        return true;
    } catch (const Error& e) {
        if (e.code() != Errc::unsupported)
            throw;
        // The task has no code to make a call with, and nothing of it was touched.
        host::warn(std::string("huge pages are not asked for: ") + e.what());
        return false;
    }
}

} // namespace gpustasis
