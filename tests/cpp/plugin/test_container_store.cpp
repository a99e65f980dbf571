// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"
#include "sample.hpp"

#include "core/lineage.hpp"
#include "core/manifest.hpp"
#include "cuda_plugin/container_store.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

using namespace gpustasis;
namespace fs = std::filesystem;

namespace {

const std::string kContainer(64, 'c');

/// An image directory with a checkpoint as a dump leaves it.
class Images {
public:
    explicit Images(unsigned char number) : id_(sample::id_of(number)) {
        write("gpustasis-7.img", "image " + id_text(id_));
        write("gpustasis-dump.json", "{}");
        write("gpustasis-sealed.cms", "envelope");
        write("pages-1.img", "CRIU's");
        write("inventory.img", "inventory");
        Manifest manifest;
        manifest.checkpoint_id = id_;
        write_manifest(directory_.fd(), manifest);
    }
    const Id& id() const { return id_; }
    int fd() const { return directory_.fd(); }
    std::string path(const std::string& name) const { return directory_.path(name); }
    void write(const std::string& name, const std::string& text) const {
        std::ofstream(directory_.path(name)) << text;
    }

private:
    sample::TempDir directory_;
    Id id_;
};

/// A /var/lib of the test's own.
class Base {
public:
    std::string path() const {
        const std::string path = directory_.path();
        return path.substr(0, path.size() - 1);
    }
    fs::path store() const { return fs::path(path()) / "gpustasis/containers" / kContainer; }
    ContainerStore open() const { return ContainerStore(kContainer, path()); }

private:
    sample::TempDir directory_;
};

bool same_inode(const fs::path& a, const fs::path& b) {
    return fs::equivalent(a, b);
}

void a_checkpoint_is_kept_and_found() {
    const Base base;
    const Images images(1);
    {
        const ContainerStore store = base.open();
        CHECK(!store.newest());
        store.keep(images.fd(), images.id());
        const UniqueFd newest = store.newest();
        CHECK(newest && read_manifest(newest.get()).checkpoint_id == images.id());
    }
    const fs::path kept = base.store() / id_text(images.id());
    CHECK(same_inode(kept / "gpustasis-7.img", images.path("gpustasis-7.img")));
    CHECK(fs::exists(kept / "gpustasis-7.img") && fs::exists(kept / kManifestName));
    CHECK(fs::exists(kept / "inventory.img"));
    CHECK(!same_inode(kept / "inventory.img", images.path("inventory.img")));
    CHECK(fs::exists(kept / "gpustasis-sealed.cms")); // without it nothing sealed opens
    CHECK(!fs::exists(kept / "pages-1.img") && !fs::exists(kept / "gpustasis-dump.json"));
    struct stat status {};
    for (const fs::path& path : {kept, base.store(), base.store().parent_path()})
        CHECK(::stat(path.c_str(), &status) == 0 && (status.st_mode & 07777) == 0700);
}

void a_chain_is_kept_with_its_links() {
    const Base base;
    const ContainerStore store = base.open();
    const Images first(1), second(2);
    store.keep(first.fd(), first.id());
    link_parent(second.fd(), store.newest().get());
    store.keep(second.fd(), second.id());
    const fs::path link = base.store() / id_text(second.id()) / kParentLink;
    CHECK(fs::read_symlink(link) == fs::path("..") / id_text(first.id()));
    CHECK(read_manifest(store.newest().get()).checkpoint_id == second.id());
}

void where_links_cannot_go_files_are_copied() {
    const Base base;
    const Images images(1);
    // On a file system of its own: /dev/shm is one everywhere that CRIU runs.
    const sample::TempDir elsewhere("/dev/shm");
    for (const auto& entry : fs::directory_iterator(images.path("")))
        fs::copy_file(entry.path(), elsewhere.path(entry.path().filename()));
    const timespec old[2] = {{1'500'000'000, 0}, {1'500'000'000, 0}};
    CHECK(::utimensat(elsewhere.fd(), kManifestName, old, 0) == 0);
    const ContainerStore store = base.open();
    store.keep(elsewhere.fd(), images.id());
    const fs::path kept = base.store() / id_text(images.id());
    CHECK(fs::file_size(kept / "gpustasis-7.img") == fs::file_size(images.path("gpustasis-7.img")));
    struct stat status {};
    CHECK(::stat((kept / kManifestName).c_str(), &status) == 0);
    CHECK(status.st_mtim.tv_sec == 1'500'000'000);
}

void one_dump_at_a_time() {
    const Base base;
    const ContainerStore store = base.open();
    CHECK_THROWS(Errc::io, base.open());
    CHECK(ContainerStore(std::string(64, 'd'), base.path()).path() != store.path());
}

void what_was_left_half_done_goes() {
    const Base base;
    { const ContainerStore store = base.open(); }
    fs::create_directory(base.store() / ".gpustasis-new-x");
    std::ofstream(base.store() / ".gpustasis-new-x/gpustasis-7.img") << "half";
    { const ContainerStore store = base.open(); }
    CHECK(!fs::exists(base.store() / ".gpustasis-new-x"));
}

void a_failure_leaves_the_store_as_it_was() {
    const Base base;
    const ContainerStore store = base.open();
    const Images first(1), second(2);
    store.keep(first.fd(), first.id());
    fs::remove(second.path("inventory.img"));
    CHECK_THROWS(Errc::io, store.keep(second.fd(), second.id()));
    CHECK(read_manifest(store.newest().get()).checkpoint_id == first.id());
    CHECK(!fs::exists(base.store() / (".gpustasis-new-" + id_text(second.id()))));
    CHECK(!fs::exists(base.store() / id_text(second.id())));
}

void newest_leads_nowhere_else() {
    const Base base;
    const ContainerStore store = base.open();
    const fs::path link = base.store() / "newest";
    for (const char* target : {"/etc", "..", "../..", "x", "0123456789abcdef0123456789abcdeF"}) {
        fs::remove(link);
        fs::create_symlink(target, link);
        CHECK_THROWS(Errc::corrupt_data, store.newest());
    }
    fs::remove(link);
    fs::create_symlink(std::string(32, '0'), link);
    CHECK(!store.newest()); // removed: the next dump is a full one
    fs::create_symlink("/etc", base.store() / std::string(32, '0'));
    CHECK_THROWS(Errc::io, store.newest());
}

void a_directory_of_others_is_refused() {
    const Base base;
    { const ContainerStore store = base.open(); }
    CHECK(::chmod(base.store().c_str(), 0777) == 0);
    CHECK_THROWS(Errc::bad_argument, base.open());
    CHECK(::chmod(base.store().c_str(), 0700) == 0);
    fs::rename(base.store(), base.store().string() + "-x");
    fs::create_symlink(base.store().string() + "-x", base.store());
    CHECK_THROWS(Errc::io, base.open());
}

void a_checkpoint_is_found_by_its_id() {
    const Base base;
    const std::string root = base.path() + "/gpustasis";
    const Images one(1), two(2);
    CHECK(!find_checkpoint(one.id(), root));
    base.open().keep(one.fd(), one.id());
    CHECK(read_manifest(find_checkpoint(one.id(), root).get()).checkpoint_id == one.id());
    CHECK(!find_checkpoint(two.id(), root));
    const fs::path by_hand = fs::path(root) / "checkpoints" / id_text(two.id());
    fs::create_directories(by_hand);
    CHECK(!find_checkpoint(two.id(), root)); // nothing in it
    fs::copy_file(one.path(kManifestName), by_hand / kManifestName);
    CHECK(!find_checkpoint(two.id(), root)); // another checkpoint's
    fs::copy_file(two.path(kManifestName), by_hand / kManifestName,
                  fs::copy_options::overwrite_existing);
    CHECK(find_checkpoint(two.id(), root));
}

} // namespace

int main() {
    a_checkpoint_is_kept_and_found();
    a_chain_is_kept_with_its_links();
    where_links_cannot_go_files_are_copied();
    one_dump_at_a_time();
    what_was_left_half_done_goes();
    a_failure_leaves_the_store_as_it_was();
    newest_leads_nowhere_else();
    a_directory_of_others_is_refused();
    a_checkpoint_is_found_by_its_id();
}
