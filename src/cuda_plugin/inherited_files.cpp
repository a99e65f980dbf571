// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/inherited_files.hpp"

#include "core/error.hpp"
#include "core/unique_fd.hpp"
#include "cuda_plugin/host.hpp"
#include "cuda_plugin/inventory_names.hpp"
#include "cuda_plugin/proc.hpp"
#include "cuda_plugin/traced_thread.hpp"

#include <fcntl.h>
#include <linux/kcmp.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>

namespace gpustasis {
namespace {

constexpr unsigned kMemoryMajor = 1, kNullMinor = 3, kZeroMinor = 5;

std::string of_task(pid_t pid, const std::string& name) {
    return "/proc/" + std::to_string(pid) + "/" + name;
}

bool leads_to_driver_device(int fd) {
    return is_driver_device(link_of("/proc/self/fd/" + std::to_string(fd)));
}

std::vector<Mapping> device_mappings(std::vector<Mapping> mappings) {
    std::erase_if(mappings, [](const Mapping& one) { return !is_driver_device(one.name); });
    return mappings;
}

/// One that the driver closes at a checkpoint: a GPU, or what controls it. Others are a program's own, as
/// those of GPUDirect Storage.
bool is_closed_by_driver(std::string_view path) {
    std::string_view rest = path.substr(kDriverDevice.size());
    return rest == "ctl" || rest == "-uvm" || rest == "-uvm-tools" ||
           (!rest.empty() && rest.find_first_not_of("0123456789") == std::string_view::npos);
}

/// A library with which a program uses a GPU otherwise than by CUDA: it draws, or codes video.
bool is_other_library(std::string_view path) {
    const std::string_view name = path.substr(path.rfind('/') + 1);
    return name.find(".so") != std::string_view::npos &&
           (name.find("nvidia") != std::string_view::npos || name.starts_with("libnvcuvid.") ||
            name.starts_with("libnvoptix."));
}

bool is_same_file(pid_t one, pid_t other, int fd) {
    return ::syscall(SYS_kcmp, one, other, KCMP_FILE, fd, fd) == 0;
}

bool is_same_mapping(const Mapping& one, const Mapping& other) {
    return one.start == other.start && one.end == other.end && one.offset == other.offset &&
           one.device == other.device && one.inode == other.inode && one.name == other.name;
}

/// Whether `pid` holds the two pipes that the restore thread of `cuda` answers through, under its numbers: then it
/// was forked by `cuda`, or by a child of it, after cuInit. The pipes stay through all checkpoints of
/// `cuda`, unlike its device files, of which `pid` may have some that were closed in `cuda` since.
bool has_pipes_of(pid_t pid, const TaskRecord& cuda) {
    const auto channel = proc::restore_channel(cuda.pid, cuda.restore_tid);
    return channel && std::ranges::all_of(*channel, [&](std::uint64_t number) {
               const std::string name = "fd/" + std::to_string(number);
               const std::string mine = link_of(of_task(pid, name));
               return mine.starts_with("pipe:[") && mine == link_of(of_task(cuda.pid, name));
           });
}

/// Those of `parents` by which `pid` was forked, or by a child of theirs. Of one with a thread of the driver's own nobody is
/// known: it may have opened files since, as for NVML.
std::vector<const PossibleParent*> forked_by(pid_t pid,
                                             const std::vector<PossibleParent>& parents) {
    std::vector<const PossibleParent*> found;
    if (std::ranges::any_of(proc::thread_names(pid), proc::is_driver_thread))
        return found;
    for (const PossibleParent& one : parents)
        if (has_pipes_of(pid, *one.record))
            found.push_back(&one);
    return found;
}

/// What of `files` and `mappings` task `pid` has not inherited from one of `parents`, in words; empty: nothing.
/// `all`: whatever it maps.
std::string what_is_its_own(pid_t pid, const std::vector<DeviceFile>& files,
                            const std::vector<Mapping>& mappings, const std::vector<Mapping>& all,
                            const std::vector<PossibleParent>& parents) {
    const std::vector<const PossibleParent*> forked = forked_by(pid, parents);
    // Of a forked one some may be its parent's no more: the driver has closed them there, at a checkpoint or
    // before. Then the parent has others of that device open, or is checkpointed now.
    const auto may_be_closed_in_parent = [&](const DeviceFile& file) {
        return std::ranges::any_of(forked, [&](const PossibleParent* one) {
            return one->record->state_before == ProcessState::checkpointed ||
                   std::ranges::find(one->files, file.path, &DeviceFile::path) != one->files.end();
        });
    };
    for (const DeviceFile& file : files)
        if (!is_closed_by_driver(file.path) ||
            (std::ranges::none_of(parents,
                                  [&](const PossibleParent& one) {
                                      return is_same_file(pid, one.record->pid, file.fd);
                                  }) &&
             !may_be_closed_in_parent(file)))
            return file.path + " open";
    for (const Mapping& mapping : mappings)
        if (!is_closed_by_driver(mapping.name) ||
            (forked.empty() && std::ranges::none_of(parents, [&](const PossibleParent& one) {
                 return std::ranges::any_of(one.mappings, [&](const Mapping& other) {
                     return is_same_mapping(other, mapping);
                 });
             })))
            return mapping.name + " mapped";
    // What another CUDA task has loaded says nothing of a child that this one has forked.
    const auto has_loaded = [&](const PossibleParent& one, const std::string& library) {
        return (forked.empty() || std::ranges::find(forked, &one) != forked.end()) &&
               std::ranges::find(one.mappings, library, &Mapping::name) != one.mappings.end();
    };
    for (const Mapping& library : all)
        if (is_other_library(library.name) &&
            std::ranges::none_of(
                parents, [&](const PossibleParent& one) { return has_loaded(one, library.name); }))
            return library.name + " loaded";
    return "";
}

std::optional<int> mount_id(int fd) {
    std::istringstream info(proc::read_file("/proc/self/fdinfo/" + std::to_string(fd)));
    for (std::string word; info >> word;)
        if (int id = 0; word == "mnt_id:" && info >> id)
            return id;
    return std::nullopt;
}

bool has_mount(pid_t pid, int id) {
    std::istringstream mounts(proc::read_file(of_task(pid, "mountinfo")));
    for (std::string line; std::getline(mounts, line);)
        if (std::atoi(line.c_str()) == id)
            return true;
    return false;
}

/// The device of that number (Documentation/admin-guide/devices.txt), for reading and writing. What lies there may be a
/// container's work: nothing else is opened. Throws Error: io.
UniqueFd open_memory_device(const std::string& path, unsigned minor) {
    const UniqueFd place(::open(path.c_str(), O_PATH | O_CLOEXEC | O_NOFOLLOW));
    struct stat found {};
    if (!place || ::fstat(place.get(), &found) != 0)
        throw io_error("cannot open " + path, errno);
    if (!S_ISCHR(found.st_mode) || found.st_rdev != makedev(kMemoryMajor, minor))
        throw Error(Errc::io, path + " is another file than the device of that name");
    UniqueFd open(
        ::open(("/proc/self/fd/" + std::to_string(place.get())).c_str(), O_RDWR | O_CLOEXEC));
    if (!open && errno == ENOENT) // no /proc where the task lives
        open = UniqueFd(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
    struct stat opened {};
    if (!open || ::fstat(open.get(), &opened) != 0)
        throw io_error("cannot open " + path, errno);
    if (!S_ISCHR(opened.st_mode) || opened.st_rdev != found.st_rdev)
        throw Error(Errc::io, path + " was replaced meanwhile");
    return open;
}

std::vector<PossibleParent> possible_parents(const TaskTable& cuda_tasks) {
    std::vector<PossibleParent> found;
    for (std::size_t i = 0; i < cuda_tasks.task_count; ++i) {
        const TaskRecord& cuda = cuda_tasks.tasks[i];
        if (!is_traced_by_us(cuda.restore_tid))
            continue; // it has ended since it was locked
        found.push_back({&cuda, device_files(cuda.pid), read_maps(cuda.pid)});
        std::erase_if(found.back().mappings, [](const Mapping& one) {
            return !is_driver_device(one.name) && !is_other_library(one.name);
        });
    }
    return found;
}

} // namespace

void InheritedFiles::look_at(pid_t pid, TaskTable& cuda_tasks) {
    const std::vector<DeviceFile> files = device_files(pid);
    const std::vector<Mapping> all = read_maps(pid);
    const std::vector<Mapping> mappings = device_mappings(all);
    if (files.empty() && mappings.empty())
        return;
    if (!parents_)
        parents_ = possible_parents(cuda_tasks);
    if (const std::string own = what_is_its_own(pid, files, mappings, all, *parents_); !own.empty())
        throw Error(Errc::unsupported,
                    "pid " + std::to_string(pid) + " has " + own +
                        ", is no CUDA process, and has not inherited that from one of this tree: "
                        "CRIU cannot dump a file of the NVIDIA driver; end it before the dump");
    host::info("pid " + std::to_string(pid) + " has inherited " + std::to_string(files.size()) +
               " files and " + std::to_string(mappings.size()) +
               " mappings of the driver's devices: they are of no use to it, and are left out");
    if (heirs_.empty())
        host::add_inventory_plugin(kInventoryInherited);
    heirs_.push_back(pid);
}

// What is still open there CRIU will ask about, and not say whose it is.
void InheritedFiles::require_none_left(pid_t pid) const {
    if (heirs_.empty())
        return; // CRIU refuses it
    std::string left;
    for (const DeviceFile& file : device_files(pid))
        left = file.path + " open";
    for (const Mapping& mapping : device_mappings(read_maps(pid)))
        left = mapping.name + " mapped";
    if (!left.empty())
        throw Error(Errc::unsupported, "the process still has " + left +
                                           " after the driver has checkpointed it: CRIU cannot "
                                           "dump a file of the NVIDIA driver");
}

bool InheritedFiles::replace_mapped(int fd, struct stat& status) const {
    if (heirs_.empty() || !leads_to_driver_device(fd))
        return false;
    const auto mount = mount_id(fd);
    const auto heir =
        std::ranges::find_if(heirs_, [&](pid_t pid) { return mount && has_mount(pid, *mount); });
    if (heir == heirs_.end())
        throw Error(Errc::io, "a mapped device of the driver lies on a mount that no task has");
    const UniqueFd zero = open_memory_device(of_task(*heir, "root/dev/zero"), kZeroMinor);
    struct stat found {};
    if (::fstat(zero.get(), &found) != 0)
        throw io_error("cannot examine /dev/zero", errno);
    if (::dup3(zero.get(), fd, O_CLOEXEC) < 0)
        throw io_error("cannot have /dev/zero stand for a mapped device", errno);
    status = found;
    return true;
}

bool InheritedFiles::is_open_in_heir(int fd) const {
    return !heirs_.empty() && leads_to_driver_device(fd);
}

int InheritedFiles::open_stand_in() {
    const UniqueFd null = open_memory_device("/dev/null", kNullMinor);
    const int copy = ::fcntl(null.get(), F_DUPFD_CLOEXEC, 0);
    if (copy < 0)
        throw io_error("cannot have /dev/null stand for a device of the driver", errno);
    return copy;
}

} // namespace gpustasis
