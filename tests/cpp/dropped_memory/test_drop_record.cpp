// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"
#include "sample.hpp"

#include "dropped_memory/drop_record.hpp"
#include "tracee/proc.hpp"

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

using namespace gpustasis;

namespace {

DropRecord record_of(pid_t pid) {
    DropRecord record;
    record.task = identify_task(pid);
    record.pid = pid;
    record.seen_from = pid_namespace_of("self");
    record.signals = 0xfffffffe7ffbfeff;
    record.was_locked = true;
    record.boot_id = proc::boot_id();
    record.checkpoint_id[0] = std::byte{0xab};
    record.digest[15] = std::byte{0x01};
    record.image = "gpustasis-1.img";
    record.device = 5;
    record.inode = 7;
    record.built_on = {{.device = 5, .inode = 8, .checkpoint_id = {}},
                       {.device = 6, .inode = 9, .checkpoint_id = record.checkpoint_id}};
    record.directory = "/a path\nwith a line end";
    return record;
}

void what_is_written_is_found_until_it_is_removed() {
    const sample::TempDir base;
    DropRecords records(base.path());
    DropRecord record = record_of(::getpid());
    CHECK(!records.find(record.task) && records.list().empty());
    records.remove(record.task);
    records.write(record);
    CHECK(records.find(record.task) == record);
    CHECK(records.list().size() == 1);
    record.filled = true;
    records.write(record);
    CHECK(records.find(record.task) == record);
    struct stat status {};
    CHECK(::stat(records.path().c_str(), &status) == 0 && (status.st_mode & 07777) == 0700);
    TaskIdentity other = record.task;
    ++other.start_time;
    CHECK(!records.find(other));
    records.remove(record.task);
    CHECK(!records.find(record.task));
}

// The host was upgraded between the dump that was killed and its recovery.
void one_of_an_earlier_version_says_less() {
    const sample::TempDir base;
    DropRecords records(base.path());
    DropRecord record = record_of(::getpid());
    records.write(record);
    const auto path = std::filesystem::directory_iterator(records.path())->path();
    std::string text;
    CHECK(std::getline(std::ifstream(path), text, '\0'));
    const std::string signals = " " + std::to_string(record.signals), locked = " 1";
    const std::size_t at = text.find(signals + locked);
    CHECK(at != std::string::npos);
    CHECK(std::ofstream(path) << text.erase(at + signals.size(), locked.size()) << std::flush);
    record.was_locked = false;
    CHECK(records.find(record.task) == record);
    CHECK(std::ofstream(path) << text.erase(at, signals.size()) << std::flush);
    record.signals = 0;
    CHECK(records.find(record.task) == record);
    const std::size_t ancestors = text.find(" 5 8 ");
    CHECK(ancestors != std::string::npos);
    CHECK(std::ofstream(path) << text.erase(ancestors, text.find('\n', ancestors) - ancestors)
                              << std::flush);
    record.built_on.clear();
    CHECK(records.find(record.task) == record);
}

void records_of_both_kinds_are_apart() {
    const sample::TempDir base;
    DropRecords dropped(base.path());
    DropRecords checkpointed(base.path(), DropRecords::kCheckpointed);
    const DropRecord record = record_of(::getpid());
    checkpointed.write(record);
    CHECK(checkpointed.find(record.task) == record);
    CHECK(!dropped.find(record.task) && dropped.list().empty());
    dropped.remove(record.task);
    CHECK(checkpointed.find(record.task));
}

void records_of_another_boot_and_of_the_dead_count_for_nothing() {
    const sample::TempDir base;
    DropRecords records(base.path());
    DropRecord record = record_of(::getpid());
    record.boot_id[0] ^= std::byte{1};
    records.write(record);
    CHECK(!records.find(record.task));
    CHECK(records.list().empty());

    const pid_t child = fork_child();
    if (child == 0) {
        ::pause();
        ::_exit(0);
    }
    records.write(record_of(child));
    CHECK(records.list().size() == 1);
    ::kill(child, SIGKILL);
    CHECK(::waitpid(child, nullptr, 0) == child);
    CHECK(records.list().empty());
    CHECK(std::filesystem::is_empty(records.path()));
}

void what_others_could_have_written_is_refused() {
    const sample::TempDir base;
    DropRecords records(base.path());
    const DropRecord record = record_of(::getpid());
    records.write(record);
    const auto file = std::filesystem::directory_iterator(records.path())->path();

    CHECK(::chmod(file.c_str(), 0666) == 0);
    CHECK_THROWS(Errc::bad_argument, records.find(record.task));
    CHECK(::chmod(file.c_str(), 0600) == 0);
    CHECK(::chmod(records.path().c_str(), 0777) == 0);
    CHECK_THROWS(Errc::bad_argument, records.find(record.task));
    CHECK_THROWS(Errc::bad_argument, records.write(record));
    CHECK(::chmod(records.path().c_str(), 0700) == 0);

    const std::string kept = base.path("kept");
    std::filesystem::rename(file, kept);
    std::filesystem::create_symlink(kept, file);
    CHECK_THROWS(Errc::io, records.find(record.task));
    std::filesystem::remove(file);
    CHECK(::mkfifo(file.c_str(), 0600) == 0);
    CHECK_THROWS(Errc::corrupt_data, records.find(record.task));
    std::filesystem::remove(file);
    std::filesystem::copy_file(kept, file);
    std::filesystem::resize_file(file, 40);
    CHECK_THROWS(Errc::corrupt_data, records.find(record.task));
    std::filesystem::resize_file(file, 1 << 20);
    CHECK_THROWS(Errc::corrupt_data, records.find(record.task));

    const std::string ours = base.path("gpustasis");
    std::filesystem::rename(ours, ours + "-moved");
    std::filesystem::create_directory_symlink(ours + "-moved", ours);
    CHECK_THROWS(Errc::io, records.find(record.task));
}

} // namespace

int main() {
    what_is_written_is_found_until_it_is_removed();
    one_of_an_earlier_version_says_less();
    records_of_both_kinds_are_apart();
    records_of_another_boot_and_of_the_dead_count_for_nothing();
    what_others_could_have_written_is_refused();
}
