// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"
#include "child.hpp"
#include "sample.hpp"

#include "core/file_identity.hpp"
#include "core/hash.hpp"
#include "tracee/mapped_files.hpp"

#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <string>
#include <vector>

using namespace gpustasis;
using sample::Buffer;

namespace {

constexpr std::size_t kSize = 8192;
constexpr std::chrono::hours kLong{1}; // what is found does not depend on how busy the machine is

void map_file(const std::string& path, int protection, int flags = MAP_PRIVATE) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0 || ::mmap(nullptr, kSize, protection, flags, fd, 0) == MAP_FAILED)
        ::_exit(1);
    ::close(fd);
}

const RequiredFile* find(const Requirements& found, const std::string& path) {
    const auto at = std::ranges::find(found.files, path, &RequiredFile::path);
    return at == found.files.end() ? nullptr : &*at;
}

Requirements found_in(pid_t pid, std::chrono::milliseconds time = kLong) {
    MappedFiles files(pid, nullptr, time);
    files.add(pid);
    return files.result();
}

void each_file_is_told_by_what_it_is_for() {
    const sample::TempDir dir;
    const Buffer code = sample::random_bytes(kSize, 1);
    sample::write_file(dir.fd(), "code", code);
    sample::write_file(dir.fd(), "data", code);
    sample::write_file(dir.fd(), "both", code);
    sample::write_file(dir.fd(), "new\nline", code);
    sample::write_file(dir.fd(), "gone", code);
    sample::write_file(dir.fd(), "renamed", code);
    sample::write_file(dir.fd(), ".nfs000001", code);
    const Child child([&] {
        map_file(dir.path("code"), PROT_READ | PROT_EXEC);
        map_file(dir.path("data"), PROT_READ, MAP_SHARED);
        map_file(dir.path("both"), PROT_READ);
        map_file(dir.path("both"), PROT_READ | PROT_EXEC);
        map_file(dir.path("new\nline"), PROT_READ);
        map_file(dir.path("gone"), PROT_READ | PROT_EXEC);
        map_file(dir.path(".nfs000001"), PROT_READ | PROT_EXEC);
        map_file("/dev/zero", PROT_READ);
        map_file(dir.path("renamed"), PROT_READ | PROT_EXEC);
        ::unlink(dir.path("gone").c_str());
        // What criu --link-remap makes a name for.
        if (::link(dir.path("renamed").c_str(), dir.path("kept").c_str()) != 0)
            ::_exit(1);
        ::unlink(dir.path("renamed").c_str());
    });
    const Requirements found = found_in(child.pid());
    format::check_requirements(found, Errc::corrupt_data);
    CHECK(found.unrecorded == 0);
    const Id hash = hash128(code);
    for (const char* name : {"code", "both"}) {
        const RequiredFile* file = find(found, dir.path(name));
        CHECK(file != nullptr && file->size == kSize && file->place == FilePlace::host);
        CHECK(file->identity == FileIdentity::content && std::ranges::equal(file->id, hash));
    }
    for (const char* name : {"data", "new\nline"}) {
        const RequiredFile* file = find(found, dir.path(name));
        CHECK(file != nullptr && file->identity == FileIdentity::size && file->size == kSize);
    }
    for (const char* name :
         {"gone", "gone (deleted)", "renamed", "renamed (deleted)", ".nfs000001"})
        CHECK(find(found, dir.path(name)) == nullptr);
    CHECK(find(found, "/dev/zero") == nullptr);
}

void a_program_is_told_by_its_build_id() {
    const Child child([] {});
    const Requirements found = found_in(child.pid());
    const auto with_build_id = [](const RequiredFile& file) {
        return file.identity == FileIdentity::build_id && file.id.size() == 20 && file.size != 0;
    };
    const auto self = std::ranges::find_if(found.files, [](const RequiredFile& file) {
        return file.path.ends_with("/test_mapped_files");
    });
    CHECK(self != found.files.end() && with_build_id(*self));
    const auto libc = std::ranges::find_if(found.files, [](const RequiredFile& file) {
        return file.path.find("/libc.so") != std::string::npos;
    });
    CHECK(libc != found.files.end() && with_build_id(*libc));
    const UniqueFd root(::open("/", O_PATH | O_CLOEXEC));
    for (const RequiredFile& file : found.files)
        CHECK(!difference(root.get(), file.path, file));
}

void tasks_are_put_together() {
    const sample::TempDir dir;
    const Buffer code = sample::random_bytes(kSize, 2);
    sample::write_file(dir.fd(), "one", code);
    sample::write_file(dir.fd(), "shared", code);
    const Child first([&] { map_file(dir.path("shared"), PROT_READ); });
    const Child second([&] {
        map_file(dir.path("one"), PROT_READ);
        map_file(dir.path("shared"), PROT_READ | PROT_EXEC);
    });
    Child dead([] {});
    MappedFiles files(first.pid(), nullptr, kLong);
    files.add(first.pid());
    files.add(second.pid());
    const pid_t ended = dead.pid();
    dead.end();
    files.add(ended);
    const Requirements found = files.result();
    CHECK(found.unrecorded == 0);
    CHECK(find(found, dir.path("one"))->identity == FileIdentity::size);
    CHECK(find(found, dir.path("shared"))->identity == FileIdentity::content);
    CHECK(std::ranges::count(found.files, dir.path("shared"), &RequiredFile::path) == 1);
}

/// A child in a mount namespace of its own, where `at` is `file`, mapped executable.
Child in_a_namespace(const std::string& file, const std::string& at) {
    return Child([&] {
        if (::unshare(CLONE_NEWNS) != 0 ||
            ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
            ::mount(file.c_str(), at.c_str(), nullptr, MS_BIND, nullptr) != 0)
            ::_exit(1);
        map_file(at, PROT_READ | PROT_EXEC);
    });
}

Requirements found_in_order(const std::vector<pid_t>& pids, const Requirements* expected) {
    MappedFiles files(::getpid(), expected, kLong);
    for (const pid_t pid : pids)
        files.add(pid);
    return files.result();
}

// Two files of one path, in two namespaces: whichever is seen first, neither is taken for the other.
void a_path_of_two_files_is_left_out() {
    const sample::TempDir dir;
    sample::write_file(dir.fd(), "at", sample::random_bytes(kSize, 1));
    sample::write_file(dir.fd(), "one", sample::random_bytes(kSize, 2));
    sample::write_file(dir.fd(), "other", sample::random_bytes(kSize, 3));
    const std::string at = dir.path("at");
    const Child one = in_a_namespace(dir.path("one"), at);
    const Child same = in_a_namespace(dir.path("one"), at);
    const Child other = in_a_namespace(dir.path("other"), at);
    const Requirements alone = found_in_order({one.pid(), same.pid()}, nullptr);
    CHECK(alone.unrecorded == 0);
    CHECK(find(alone, at)->place == FilePlace::inner);
    CHECK(find(alone, at)->identity == FileIdentity::content);
    for (const auto& pids : {std::vector{one.pid(), other.pid()}, {other.pid(), one.pid()}}) {
        const Requirements found = found_in_order(pids, nullptr);
        CHECK(find(found, at) == nullptr && found.unrecorded == 2);
        // Nor is it compared with the record of a dump that saw only one.
        CHECK(find(found_in_order(pids, &alone), at) == nullptr);
    }
}

// Of a record only what is in it is looked at, in the way that it has it.
void a_record_says_what_is_looked_at() {
    const sample::TempDir dir;
    const Buffer code = sample::random_bytes(kSize, 1);
    for (const char* name : {"hashed", "sized", "longer", "named", "beside"})
        sample::write_file(dir.fd(), name, code);
    const Child child([&] {
        for (const char* name : {"hashed", "sized", "longer", "named", "beside"})
            map_file(dir.path(name), PROT_READ | PROT_EXEC);
    });
    const Buffer id(16);
    Requirements expected;
    expected.files = {
        {.path = dir.path("hashed"), .size = kSize, .identity = FileIdentity::content, .id = id},
        {.path = dir.path("longer"), .size = 1, .identity = FileIdentity::content, .id = id},
        {.path = dir.path("named"), .size = kSize, .identity = FileIdentity::build_id, .id = id},
        {.path = dir.path("sized"), .size = kSize}};
    MappedFiles files(child.pid(), &expected);
    files.add(child.pid());
    const Requirements found = files.result();
    CHECK(found.files.size() == 4 && found.unrecorded == 0 && files.unreadable().empty());
    CHECK(std::ranges::equal(find(found, dir.path("hashed"))->id, hash128(code)));
    CHECK(find(found, dir.path("sized"))->identity == FileIdentity::size);
    CHECK(find(found, dir.path("longer"))->identity == FileIdentity::size);
    // It has none any more: that is a difference, not a file that nothing is known of.
    CHECK(find(found, dir.path("named"))->identity == FileIdentity::build_id);
    CHECK(find(found, dir.path("named"))->id.empty());
}

// Of 20,000 names, each looked at while the tasks stand still, no more than there is time and room for.
void many_names_take_no_longer() {
    constexpr std::size_t kNames = 20'000;
    constexpr std::size_t kLarge = std::size_t{1} << 20;
    const sample::TempDir dir;
    sample::write_file(dir.fd(), "file", sample::random_bytes(kLarge, 1));
    const std::string file = dir.path("file");
    const auto name = [&](std::size_t i) { return dir.path("link" + std::to_string(i)); };
    for (std::size_t i = 0; i < kNames; ++i)
        CHECK(::link(file.c_str(), name(i).c_str()) == 0);
    const Child child([&] {
        for (std::size_t i = 0; i < kNames; ++i)
            map_file(name(i), PROT_READ | PROT_EXEC);
    });
    const std::clock_t begin = std::clock(); // of this process: others run beside it
    const Requirements found = found_in(child.pid(), MappedFiles::kTime);
    const std::chrono::duration<double> took(static_cast<double>(std::clock() - begin) /
                                             CLOCKS_PER_SEC);
    CHECK(took < 6 * MappedFiles::kTime);
    format::check_requirements(found, Errc::corrupt_data);
    CHECK(found.files.size() <= format::kMaxRequiredFiles);
    CHECK(found.unrecorded + found.files.size() >= kNames);
}

} // namespace

int main() {
    a_path_of_two_files_is_left_out();
    a_record_says_what_is_looked_at();
    many_names_take_no_longer();
    each_file_is_told_by_what_it_is_for();
    a_program_is_told_by_its_build_id();
    tasks_are_put_together();
}
