// SPDX-License-Identifier: Apache-2.0
// Where the files of a checkpoint are that was dumped into memory: the marker, the owner, and who is believed.
#include "check.hpp"
#include "sample.hpp"

#include "core/arena.hpp"
#include "core/error.hpp"
#include "core/lineage.hpp"
#include "core/manifest.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>

using namespace gpustasis;

namespace {

const Id kId = sample::id_of(1);
constexpr const char* kBoot = "01234567-89ab-cdef-0123-456789abcdef";

ArenaMarker marker_of(const std::string& directory) {
    return {.checkpoint_id = kId, .boot_id = this_boot(), .directory = directory};
}

ArenaOwner owner_of(const std::string& images) {
    return {.checkpoint_id = kId,
            .boot_id = this_boot(),
            .time = 1,
            .device = 2,
            .inode = 3,
            .limit = 4,
            .pool = 5,
            .images = images};
}

void put(const std::string& path, const std::string& text) {
    std::ofstream(path) << text;
    CHECK(::chmod(path.c_str(), 0600) == 0);
}

/// An image directory on a disk, and where its checkpoint is in memory.
struct Local {
    sample::TempDir images;
    sample::TempDir arena{"/dev/shm"};

    Local() {
        put(images.path(kArenaMarker),
            marker_text(marker_of(arena.path().substr(0, arena.path().size() - 1))));
        put(arena.path(kArenaOwner), owner_text(owner_of(images.path())));
    }
    std::string found() const { return directory_path(stored_directory(images.fd()).get()); }
    std::string place() const { return directory_path(arena.fd()); }
};

void what_is_written_is_read() {
    const ArenaMarker marker{.checkpoint_id = kId, .boot_id = kBoot, .directory = "/run/a b/c"};
    CHECK(parse_marker(marker_text(marker), "m") == marker);
    const ArenaMarker known{.checkpoint_id = kId,
                            .boot_id = kBoot,
                            .directory = "/run/c",
                            .device = 7,
                            .inode = std::uint64_t{1} << 63};
    CHECK(parse_marker(marker_text(known), "m") == known);
    std::string older = marker_text(marker);
    older.resize(older.find("device"));
    CHECK(parse_marker(older, "m") == marker);
    CHECK_THROWS(Errc::corrupt_data, parse_marker(older + "device 7\n", "m"));
    ArenaOwner owner = owner_of("/srv/x y");
    owner.time = ~std::uint64_t{0};
    CHECK(parse_owner(owner_text(owner), "o") == owner);
    CHECK_THROWS(Errc::bad_argument, marker_text(marker_of("relative")));
    CHECK_THROWS(Errc::bad_argument, marker_text(marker_of("/with\nline")));
}

// Whatever byte is cut off or another, nothing is taken for something else.
void damage_is_found() {
    const std::string text = owner_text(owner_of("/srv/x"));
    for (std::size_t size = 0; size < text.size(); ++size)
        CHECK_THROWS(Errc::corrupt_data, parse_owner(text.substr(0, size), "o"));
    CHECK_THROWS(Errc::corrupt_data, parse_owner(text + "more\n", "o"));
    const std::string marker = marker_text(marker_of("/run/x"));
    CHECK_THROWS(Errc::corrupt_data, parse_marker(text, "m"));
    std::string newer = marker;
    newer[newer.find('1')] = '2';
    CHECK_THROWS(Errc::unsupported, parse_marker(newer, "m"));
    std::string no_id = marker;
    no_id[no_id.find("checkpoint ") + 11] = 'x';
    CHECK_THROWS(Errc::corrupt_data, parse_marker(no_id, "m"));
}

void a_directory_without_a_marker_is_the_place() {
    const sample::TempDir images;
    CHECK(directory_path(stored_directory(images.fd()).get()) == directory_path(images.fd()));
}

void the_marker_leads_to_the_arena_until_there_is_a_manifest() {
    const Local local;
    CHECK(local.found() == local.place());
    put(local.images.path(kManifestName), "");
    CHECK(local.found() == directory_path(local.images.fd()));
}

void others_are_not_believed() {
    const Local local;
    CHECK(::fchmod(local.arena.fd(), 0750) == 0);
    CHECK_THROWS(Errc::bad_argument, local.found());
    CHECK(::fchmod(local.arena.fd(), 0700) == 0);
    CHECK(local.found() == local.place());

    ArenaOwner other = owner_of(local.images.path());
    other.checkpoint_id = sample::id_of(2);
    put(local.arena.path(kArenaOwner), owner_text(other));
    CHECK_THROWS(Errc::corrupt_data, local.found());
    CHECK(::unlink(local.arena.path(kArenaOwner).c_str()) == 0);
    CHECK_THROWS(Errc::io, local.found());

    const sample::TempDir disk("/var/tmp");
    put(disk.path(kArenaOwner), owner_text(owner_of(local.images.path())));
    put(local.images.path(kArenaMarker), marker_text(marker_of(directory_path(disk.fd()))));
    CHECK_THROWS(Errc::bad_argument, local.found());
    CHECK(::unlink(local.images.path(kArenaMarker).c_str()) == 0);
    CHECK(::symlink(local.arena.path(kArenaOwner).c_str(),
                    local.images.path(kArenaMarker).c_str()) == 0);
    CHECK_THROWS(Errc::io, local.found());
}

void a_lost_checkpoint_says_so() {
    const Local local;
    const auto says = [&local](const std::string& words) {
        try {
            local.found();
        } catch (const Error& e) {
            const std::string what = e.what();
            return what.find("was never drained, and it is lost") != std::string::npos &&
                   what.find(words) != std::string::npos &&
                   what.find(directory_path(local.images.fd())) != std::string::npos;
        }
        return false;
    };
    ArenaMarker marker = marker_of(local.place());
    marker.boot_id = kBoot;
    put(local.images.path(kArenaMarker), marker_text(marker));
    CHECK(says("this host was booted since"));
    put(local.images.path(kArenaMarker), marker_text(marker_of(local.place() + "-gone")));
    CHECK(says(local.place() + "-gone, which is not there any more"));
}

void one_that_is_only_not_seen_is_not_lost() {
    const sample::TempDir place("/dev/shm");
    const std::string arena = place.path("arena"), aside = place.path("aside");
    const std::string stored = arena + "/stored";
    CHECK(::mkdir(arena.c_str(), 0700) == 0 && ::mkdir(stored.c_str(), 0700) == 0);
    struct stat found {};
    CHECK(::stat(arena.c_str(), &found) == 0);
    ArenaMarker marker = marker_of(stored);
    marker.device = found.st_dev;
    marker.inode = found.st_ino;
    CHECK(!is_lost(marker));
    CHECK(::rename(arena.c_str(), aside.c_str()) == 0);
    CHECK_THROWS(Errc::io, is_lost(marker)); // there is no arena
    CHECK(::mkdir(arena.c_str(), 0700) == 0);
    CHECK_THROWS(Errc::io, is_lost(marker)); // another one, or that which it was mounted on
    CHECK(::rmdir(arena.c_str()) == 0 && ::rename(aside.c_str(), arena.c_str()) == 0);
    CHECK(!is_lost(marker));
    CHECK(::rmdir(stored.c_str()) == 0);
    CHECK(is_lost(marker));
    ArenaMarker older = marker;
    older.device = older.inode = 0;
    CHECK_THROWS(Errc::io, is_lost(older));
    older.boot_id = kBoot;
    CHECK(is_lost(older));
    CHECK(::rmdir(arena.c_str()) == 0);
}

} // namespace

int main() {
    what_is_written_is_read();
    damage_is_found();
    a_directory_without_a_marker_is_the_place();
    the_marker_leads_to_the_arena_until_there_is_a_manifest();
    others_are_not_believed();
    a_lost_checkpoint_says_so();
    one_that_is_only_not_seen_is_not_lost();
    return 0;
}
