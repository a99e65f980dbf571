// SPDX-License-Identifier: Apache-2.0
#include "dropped_memory/drop_record.hpp"

#include "core/error.hpp"
#include "core/file.hpp"
#include "core/lineage.hpp"
#include "core/trusted_directory.hpp"
#include "tracee/proc.hpp"
#include "tracee/ptrace.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <chrono>
#include <exception>
#include <memory>
#include <span>
#include <sstream>
#include <string_view>
#include <thread>

namespace gpustasis {
namespace {

constexpr const char* kHead = "gpustasis drop record 1";
// A path has at most 4096 bytes, and a chain 65,535 checkpoints.
constexpr std::size_t kMaxSize = 8 << 20;

Id parse_id(std::string_view text) {
    Id id{};
    if (text.size() != 2 * id.size())
        throw Error(Errc::corrupt_data, "an id has the wrong length");
    for (std::size_t i = 0; i < id.size(); ++i) {
        unsigned value = 0;
        const char* begin = text.data() + 2 * i;
        const auto [at, error] = std::from_chars(begin, begin + 2, value, 16);
        if (error != std::errc{} || at != begin + 2)
            throw Error(Errc::corrupt_data, "an id is not in hex");
        id[i] = static_cast<std::byte>(value);
    }
    return id;
}

std::string text_of(const DropRecord& record) {
    std::ostringstream text;
    text << kHead << '\n'
         << record.task.pid_namespace << ' ' << record.task.inner_pid << ' '
         << record.task.start_time << '\n'
         << record.pid << ' ' << record.seen_from << ' ' << record.signals << ' '
         << record.was_locked << ' ' << record.handed_over << ' ' << record.filled << '\n'
         << id_text(record.boot_id) << '\n'
         << id_text(record.checkpoint_id) << '\n'
         << id_text(record.digest) << '\n'
         << record.image << '\n'
         << record.device << ' ' << record.inode;
    for (const BuiltOn& one : record.built_on)
        text << ' ' << one.device << ' ' << one.inode << ' ' << id_text(one.checkpoint_id);
    text << '\n' << record.directory; // to the end: a path may hold anything
    return text.str();
}

DropRecord parse(const std::string& content) {
    std::istringstream text(content);
    text.exceptions(std::ios::badbit);
    const auto line = [&text] {
        std::string found;
        if (!std::getline(text, found))
            throw Error(Errc::corrupt_data, "it ends too early");
        return found;
    };
    const auto numbers = [&line](auto&... values) {
        std::istringstream words(line());
        if (!((words >> values) && ...))
            throw Error(Errc::corrupt_data, "a number is missing");
    };
    if (line() != kHead)
        throw Error(Errc::corrupt_data, "it is not a drop record, or of another version");
    DropRecord record;
    numbers(record.task.pid_namespace, record.task.inner_pid, record.task.start_time);
    std::istringstream words(line());
    if (!(words >> record.pid >> record.seen_from))
        throw Error(Errc::corrupt_data, "a number is missing");
    if (!(words >> record.signals)) // which earlier versions did not write
        record.signals = 0;
    if (!(words >> record.was_locked)) // nor this
        record.was_locked = false;
    if (!(words >> record.handed_over)) // nor this
        record.handed_over = false;
    if (!(words >> record.filled)) // nor this
        record.filled = false;
    record.boot_id = parse_id(line());
    record.checkpoint_id = parse_id(line());
    record.digest = parse_id(line());
    record.image = line();
    words = std::istringstream(line());
    if (!(words >> record.device >> record.inode))
        throw Error(Errc::corrupt_data, "a number is missing");
    std::string id; // the rest of the line is what earlier versions did not write
    for (BuiltOn one; words >> one.device >> one.inode >> id;) {
        one.checkpoint_id = parse_id(id);
        record.built_on.push_back(one);
    }
    std::getline(text, record.directory, '\0');
    return record;
}

constexpr std::chrono::seconds kStopsWithin{5};

bool is_alive(const DropRecord& record) {
    if (record.boot_id != proc::boot_id())
        return false;
    if (record.seen_from != pid_namespace_of("self"))
        return true; // its pid is not one of ours: nothing tells that it is dead
    return proc::liveness(record.pid, record.task.start_time) != proc::Liveness::dead;
}

struct CloseDir {
    void operator()(DIR* dir) const noexcept { ::closedir(dir); }
};

} // namespace

DropRecords::DropRecords(std::string base, std::string kind)
    : base_(std::move(base)), kind_(std::move(kind)) {
    if (base_.empty())
        base_ = run_directory();
}

std::string DropRecords::path() const {
    return base_ + "/gpustasis/" + kind_;
}

UniqueFd DropRecords::open(bool make) const {
    return open_trusted(base_, {"gpustasis", kind_}, make ? IfMissing::make : IfMissing::nothing);
}

void DropRecords::write(const DropRecord& record) {
    const UniqueFd dir = open(true);
    try {
        PartFile file(dir.get(), file_name(record.task));
        const std::string text = text_of(record);
        write_at(file.fd(), 0, std::as_bytes(std::span(text)));
        file.commit();
    } catch (const Error& e) {
        throw Error(e, "cannot write a record to " + path() + ": " + e.what());
    }
}

void DropRecords::remove(const TaskIdentity& task) {
    const UniqueFd dir = open(false);
    if (dir && ::unlinkat(dir.get(), file_name(task).c_str(), 0) != 0 && errno != ENOENT)
        throw io_error("cannot remove " + path() + "/" + file_name(task), errno);
}

std::optional<DropRecord> DropRecords::find(const TaskIdentity& task) {
    std::optional<DropRecord> record = read(task);
    if (record && record->boot_id != proc::boot_id())
        return std::nullopt;
    return record;
}

std::optional<DropRecord> DropRecords::read(const TaskIdentity& task) {
    const UniqueFd dir = open(false);
    const std::string name = file_name(task);
    struct stat status {};
    if (!dir ||
        (::fstatat(dir.get(), name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0 && errno == ENOENT))
        return std::nullopt;
    try {
        const UniqueFd file(
            ::openat(dir.get(), name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
        if (!file && errno == ENOENT)
            return std::nullopt; // removed meanwhile
        if (!file)
            throw io_error("cannot open it", errno);
        require_trusted(file.get(), name);
        const std::uint64_t size = file_size(file.get());
        if (size > kMaxSize)
            throw Error(Errc::corrupt_data, "it is too long");
        const std::vector<std::byte> bytes = read_part(file.get(), 0, size);
        DropRecord record = parse({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
        if (record.task != task)
            throw Error(Errc::corrupt_data, "it is of another task");
        return record;
    } catch (const Error& e) {
        throw Error(e, path() + "/" + name + ": " + e.what());
    }
}

std::vector<DropRecord> DropRecords::list() {
    std::vector<DropRecord> records;
    const UniqueFd dir = open(false);
    if (!dir)
        return records;
    const std::unique_ptr<DIR, CloseDir> entries(
        ::fdopendir(::openat(dir.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC)));
    if (!entries)
        throw io_error("cannot list " + path(), errno);
    while (const dirent* entry = ::readdir(entries.get())) {
        const std::optional<TaskIdentity> task = task_of_file(entry->d_name);
        if (!task)
            continue; // a file that was not finished, or none of ours
        const std::optional<DropRecord> record = read(*task);
        if (!record) // removed meanwhile: what has its name by now is another dump's
            continue;
        if (is_alive(*record))
            records.push_back(*record);
        else
            ::unlinkat(dir.get(), entry->d_name, 0);
    }
    return records;
}

void begin_filling(const TaskIdentity& task) {
    if (const auto record = DropRecords({}, DropRecords::kCheckpointed).find(task))
        DropRecords({}, DropRecords::kFilling).write(*record);
}

void note_filled(const TaskIdentity& task) noexcept {
    try {
        DropRecords records({}, DropRecords::kFilling);
        if (auto record = records.find(task)) {
            record->filled = true;
            records.write(*record);
        }
    } catch (const std::exception&) { // NOLINT(bugprone-empty-catch): see drop_record.hpp
    }
}

void end_filling(const TaskIdentity& task) noexcept {
    try {
        DropRecords({}, DropRecords::kFilling).remove(task);
    } catch (const std::exception&) { // NOLINT(bugprone-empty-catch): see drop_record.hpp
    }
}

bool give_signals_back(pid_t pid, pid_t restore_thread) {
    const std::optional<DropRecord> record =
        DropRecords({}, DropRecords::kCheckpointed).find(identify_task(pid));
    if (!record || record->signals == 0)
        return false;
    bool was_left = false;
    std::exception_ptr failure;
    std::thread([&] { // as SeizedThread wants it
        try {
            const SeizedThread held(restore_thread, kStopsWithin);
            was_left = is_mask_of_dump(get_signal_mask(restore_thread));
            if (was_left)
                set_signal_mask(restore_thread, record->signals);
        } catch (...) {
            failure = std::current_exception();
        }
    })
        .join();
    if (failure)
        std::rethrow_exception(failure);
    return was_left;
}

} // namespace gpustasis
