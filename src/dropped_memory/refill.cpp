// SPDX-License-Identifier: Apache-2.0
#include "dropped_memory/refill.hpp"

#include "core/error.hpp"
#include "core/file.hpp"
#include "core/process_memory.hpp"
#include "core/unique_fd.hpp"
#include "dropped_memory/removed_files.hpp"
#include "tracee/injected_syscall.hpp"
#include "tracee/proc.hpp"
#include "tracee/task_maps.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <iterator>
#include <optional>
#include <span>
#include <vector>

namespace gpustasis {
namespace {

std::string hex(std::uint64_t value) {
    char text[20];
    std::snprintf(text, sizeof text, "%#llx", static_cast<unsigned long long>(value));
    return text;
}

Error other_memory(pid_t pid, std::uint64_t address) {
    return {Errc::corrupt_data,
            "process " + std::to_string(pid) + " holds something else at " + hex(address) +
                " than the image: it was checkpointed again since; nothing was changed"};
}

bool is_mapped_as(const Mapping& mapping, const Region& region, MemoryKind kind) noexcept {
    const bool shared = region.kind == RegionKind::shared_anonymous;
    return mapping.protection == region.protection && (mapping.protection & PROT_READ) != 0 &&
           (shared ? mapping.is_shared_anonymous() ||
                         (kind == MemoryKind::cpu && maps_nameless_file(mapping))
                   : mapping.is_private_anonymous());
}

/// The first address of `region` that the task does not map as it says; its end if there is none.
std::uint64_t mapped_until(const std::vector<Mapping>& maps, const Region& region,
                           MemoryKind kind) {
    const std::uint64_t end = region.address + region.length;
    std::uint64_t at = region.address;
    for (const Mapping& mapping : maps) {
        if (mapping.end <= at)
            continue;
        if (mapping.start > at || !is_mapped_as(mapping, region, kind))
            break;
        at = std::min(end, mapping.end);
        if (at == end)
            break;
    }
    return at;
}

/// Which pages of a task are there: in memory or swapped out.
class PresentPages {
public:
    explicit PresentPages(pid_t pid)
        : path_("/proc/" + std::to_string(pid) + "/pagemap"),
          fd_(::open(path_.c_str(), O_RDONLY | O_CLOEXEC)),
          page_size_(static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE))) {
        if (!fd_)
            throw io_error("cannot open " + path_, errno);
    }

    std::uint64_t page_size() const noexcept { return page_size_; }

    /// Of the pages of [address, address + length), which is at most 32 MiB and whole pages.
    std::vector<bool> look(std::uint64_t address, std::uint64_t length) {
        constexpr std::uint64_t kPresentOrSwapped = std::uint64_t{3} << 62;
        entries_.resize(length / page_size_);
        read_at(fd_.get(), address / page_size_ * sizeof(entries_[0]),
                std::as_writable_bytes(std::span(entries_)));
        std::vector<bool> present;
        present.reserve(entries_.size());
        for (const std::uint64_t entry : entries_)
            present.push_back((entry & kPresentOrSwapped) != 0);
        return present;
    }

private:
    std::string path_;
    UniqueFd fd_;
    std::uint64_t page_size_;
    std::vector<std::uint64_t> entries_;
};

bool is_untouched(PresentPages& pages, const Region& region) {
    constexpr std::uint64_t kStep = std::uint64_t{32} << 20;
    for (std::uint64_t done = 0; done < region.length; done += kStep) {
        const std::vector<bool> present =
            pages.look(region.address + done, std::min(kStep, region.length - done));
        if (std::ranges::find(present, true) != present.end())
            return false;
    }
    return true;
}

/// A shared page can be there without this task having touched it: each is written to.
class RefilledMemory : public ProcessMemory {
public:
    /// `fresh`: no page of the private regions is there.
    RefilledMemory(pid_t pid, int mem, const std::vector<Region>& regions, bool fresh)
        : ProcessMemory(pid, mem), regions_(regions), fresh_(fresh) {}

    void write_zeros(std::uint64_t address, std::uint64_t length) override {
        const auto behind = std::ranges::upper_bound(regions_, address, {}, &Region::address);
        if (!fresh_ || std::prev(behind)->kind == RegionKind::shared_anonymous)
            ProcessMemory::write_zeros(address, length);
    }

private:
    const std::vector<Region>& regions_;
    bool fresh_;
};

bool is_empty(Bytes bytes) noexcept {
    return std::ranges::all_of(bytes, [](std::byte byte) { return byte == std::byte{0}; });
}

/// See refill_dropped().
void require_same_pages(pid_t pid, const ImageReader& image) {
    PresentPages pages(pid);
    ProcessMemory memory(pid);
    const std::uint64_t page_size = pages.page_size();
    std::optional<std::uint64_t> empty; // a page that is empty and should not be
    bool refilled = true;               // no page with data is missing
    std::vector<std::byte> stored;
    std::vector<std::byte> live(page_size);
    for (std::uint64_t number = 0; number < image.chunk_count(); ++number) {
        const ChunkInfo chunk = image.chunk(number);
        const std::vector<bool> present = pages.look(chunk.address, chunk.plain_size);
        if (std::ranges::find(present, true) == present.end()) {
            refilled = refilled && chunk.encoding == Encoding::zero;
            continue;
        }
        stored.resize(chunk.plain_size);
        image.read_chunk(number, stored);
        for (std::size_t page = 0; page < present.size(); ++page) {
            const std::uint64_t address = chunk.address + page * page_size;
            const Bytes wanted = Bytes(stored).subspan(page * page_size, page_size);
            if (!present[page]) { // and so it is not read: that would give the task a page
                refilled = refilled && is_empty(wanted);
                continue;
            }
            memory.read(address, live);
            if (same_bytes(live, wanted))
                continue;
            if (!is_empty(live))
                throw other_memory(pid, address);
            if (!empty)
                empty = address;
        }
    }
    if (empty && refilled)
        throw other_memory(pid, *empty);
}

/// refill(), through /proc/PID/mem if `mem` is one.
void refill_through(int mem, pid_t pid, const ImageReader& image, unsigned threads,
                    const ImageReader::Progress& progress) {
    const std::vector<Mapping> maps = read_maps(pid);
    PresentPages pages(pid);
    bool fresh = true; // the private regions
    for (const Region& region : image.info().regions) {
        const std::uint64_t end = region.address + region.length;
        if (const std::uint64_t at = mapped_until(maps, region, image.info().kind); at != end)
            throw Error(Errc::corrupt_data, "the task does not map " + hex(region.address) + "-" +
                                                hex(end) + " as its image says (differs at " +
                                                hex(at) + ")");
        fresh =
            fresh && (region.kind == RegionKind::shared_anonymous || is_untouched(pages, region));
    }
    RefilledMemory memory(pid, mem, image.info().regions, fresh);
    const RemovedFiles files(pid, maps, image.info().regions);
    try {
        image.restore(memory, threads, false, progress);
    } catch (const Error& e) {
        throw Error(e, e.what() + (e.code() == Errc::io ? files.why_not_filled() : ""));
    }
    files.put_times_back();
}

} // namespace

ImageReader open_dropped(const DroppedTask& task, Lineage& lineage) {
    return open_dropped(task, lineage, ImageReader::open(lineage.directory(0), task.image));
}

ImageReader open_dropped(const DroppedTask& task, Lineage& lineage, ImageReader image) {
    const std::string path = lineage.path(0) + "/" + task.image;
    const ImageInfo& info = image.info();
    if (info.start_time != task.start_time || info.boot_id != proc::boot_id() ||
        proc::start_time(task.pid) != task.start_time)
        throw Error(Errc::corrupt_data, path + " is of another process than " +
                                            std::to_string(task.pid) + "; nothing was changed");
    if (info.kind != MemoryKind::gpu) // memory that no dump drops
        throw Error(Errc::corrupt_data, path + " holds CPU memory, which is missing in no process; "
                                               "nothing was changed");
    if (info.checkpoint_id != task.checkpoint_id || image.digest() != task.digest)
        throw Error(Errc::corrupt_data, path + " is not the image that the dump of process " +
                                            std::to_string(task.pid) +
                                            " wrote; nothing was changed");
    image.attach_sources(lineage);
    return image;
}

bool is_drop_over(pid_t pid, pid_t restore_thread) noexcept {
    return is_home(pid, restore_thread, SYS_madvise);
}

void refill(pid_t pid, const ImageReader& image, unsigned threads,
            const ImageReader::Progress& progress) {
    refill_through(-1, pid, image, threads, progress);
}

void refill_dropped(pid_t pid, const ImageReader& image, unsigned threads,
                    const ImageReader::Progress& progress) {
    // Reading the image may take long. Whatever has the pid by then, or runs in the task, gets none of it.
    const UniqueFd mem(
        ::open(("/proc/" + std::to_string(pid) + "/mem").c_str(), O_WRONLY | O_CLOEXEC));
    if (!mem)
        throw io_error("cannot open the memory of pid " + std::to_string(pid), errno);
    if (proc::start_time(pid) != image.info().start_time)
        throw Error(Errc::gone, "pid " + std::to_string(pid) + " is another process by now");
    const std::vector<Mapping> maps = read_maps(pid);
    for (const Region& region : image.info().regions)
        if (const std::uint64_t at = mapped_until(maps, region, image.info().kind);
            at != region.address + region.length)
            throw other_memory(pid, at);
    require_same_pages(pid, image);
    refill_through(mem.get(), pid, image, threads, progress);
}

} // namespace gpustasis
