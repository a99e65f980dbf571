// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"
#include "sample.hpp"

#include "core/image_flatten.hpp"
#include "core/image_reader.hpp"
#include "core/image_writer.hpp"
#include "core/lineage.hpp"
#include "core/manifest.hpp"
#include "core/parent_index.hpp"

#include <sys/file.h>

#include <atomic>
#include <optional>
#include <thread>
using namespace gpustasis;
using sample::Buffer;
using sample::Memory;

namespace {

constexpr std::uint32_t kChunk = 4096;

/// A store of checkpoints of one task or more, each on top of the one before if it is asked to.
class Store {
public:
    UniqueFd dir(const std::string& name) const {
        UniqueFd fd(::openat(root_.fd(), name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
        CHECK(fd.get() >= 0);
        return fd;
    }

    /// Checkpoint `name` of task 4242 with this memory, and of others with theirs.
    WriteResult add(const std::string& name, Memory& memory, const std::string& parent = {},
                    std::map<std::uint32_t, Memory*> others = {}) {
        CHECK(::mkdirat(root_.fd(), name.c_str(), 0700) == 0);
        const UniqueFd fd = dir(name);
        Manifest manifest{.checkpoint_id = sample::id_of(static_cast<unsigned char>(++last_id_)),
                          .driver_api_version = 13000,
                          .driver_version = "",
                          .gpus = {},
                          .tasks = {}};
        std::optional<Lineage> lineage;
        std::optional<ParentIndex> index;
        if (!parent.empty()) {
            const UniqueFd parent_fd = dir(parent);
            link_parent(fd.get(), parent_fd.get());
            lineage = Lineage::above(parent_fd.get());
            index = ParentIndex::read(*lineage);
            manifest.parent_id = index->manifest().checkpoint_id;
            manifest.chain_length = index->manifest().chain_length + 1;
        }
        others[4242] = &memory;
        WriteResult result;
        for (const auto& [pid, content] : others) {
            ImageInfo info = info_of(*content, kChunk);
            info.checkpoint_id = manifest.checkpoint_id;
            info.pid = pid;
            const WriteResult written =
                write_image(fd.get(), image_name(pid), info, *content,
                            {.threads = 2, .parent = index ? &*index : nullptr});
            manifest.tasks.push_back({pid, true, written.digest, ProcessState::running});
            if (pid == 4242)
                result = written;
        }
        write_manifest(fd.get(), manifest);
        CHECK(read_manifest(fd.get()) == manifest);
        return result;
    }

    ImageReader open(const std::string& name, std::uint32_t pid = 4242) const {
        const UniqueFd fd = dir(name);
        ImageReader image = ImageReader::open(fd.get(), image_name(pid));
        Lineage lineage(fd.get());
        image.attach_sources(lineage);
        return image;
    }
    void check_holds(const std::string& name, const Memory& memory,
                     std::uint32_t pid = 4242) const {
        const ImageReader image = open(name, pid);
        image.verify(2);
        Memory restored;
        restored.map_like(memory, std::byte{0xaa});
        image.restore(restored, 2, false);
        CHECK(restored == memory);
    }
    void remove(const std::string& name) {
        CHECK(std::system(("rm -r -- " + root_.path(name)).c_str()) == 0);
    }
    void rename(const std::string& from, const std::string& to) {
        CHECK(::renameat(root_.fd(), from.c_str(), root_.fd(), to.c_str()) == 0);
    }
    const sample::TempDir& root() const { return root_; }

private:
    sample::TempDir root_;
    unsigned last_id_ = 0;
};

/// One region of chunks that do not compress.
class Noise : public Memory {
public:
    Noise(std::uint64_t address, std::size_t chunks, std::uint64_t seed) {
        map(address, sample::random_bytes(chunks * kChunk, seed));
    }
};

void set_byte(Memory& memory, std::uint64_t address, std::byte value) {
    memory.write(address, Bytes(&value, 1));
}

void what_is_the_same_is_not_stored_again() {
    Store store;
    Memory memory;
    map_mixture(memory);
    const WriteResult full = store.add("a", memory);
    CHECK(full.totals.ref.chunks == 0);
    const WriteResult same = store.add("b", memory, "a");
    CHECK(same.totals.ref.chunks == full.totals.raw.chunks + full.totals.lz4.chunks);
    CHECK(same.totals.zero == full.totals.zero);
    CHECK(same.totals.raw.chunks == 0 && same.totals.lz4.chunks == 0);

    set_byte(memory, 0x7f0000000000, std::byte{0xff});
    const WriteResult changed = store.add("c", memory, "b");
    CHECK(changed.totals.raw.chunks + changed.totals.lz4.chunks == 1);
    // All that is the same lies in the first one, and the second is not needed for it.
    const ImageReader image = store.open("c");
    CHECK(image.info().sources.size() == 1);
    CHECK(image.info().sources[0].depth == 2);
    CHECK(image.info().sources[0].digest == full.digest);
    store.check_holds("c", memory);
}

void content_is_found_wherever_it_was() {
    Store store;
    Noise first(0x10000, 8, 1);
    Noise second(0x900000, 8, 2);
    store.add("a", first, {}, {{7, &second}});
    Memory moved; // at other addresses, and from the other task
    Buffer both(16 * kChunk);
    first.read(0x10000, MutBytes(both).first(8 * kChunk));
    second.read(0x900000, MutBytes(both).last(8 * kChunk));
    moved.map(0x5000000, both);
    const WriteResult result = store.add("b", moved, "a");
    CHECK(result.totals.ref.chunks == 16);
    CHECK(result.totals.ref.plain == 16 * kChunk && result.totals.ref.stored == 0);
    CHECK(store.open("b").info().sources.size() == 2);
    store.check_holds("b", moved);
}

void a_last_chunk_is_not_taken_for_a_whole_one() {
    Store store;
    Memory memory;
    memory.map(0x10000, Buffer(kChunk, std::byte{1}));
    store.add("a", memory);
    // Chunks of the same content and another size have another hash; both must be told apart.
    Memory longer;
    longer.map(0x10000, Buffer(3 * kChunk, std::byte{1}));
    const WriteResult result = store.add("b", longer, "a");
    CHECK(result.totals.ref.chunks == 3);
    store.check_holds("b", longer);
}

void long_chains_work() {
    Store store;
    constexpr int kLength = 120;
    Noise memory(0x10000, kLength, 5);
    store.add("0", memory);
    for (int i = 1; i <= kLength; ++i) {
        set_byte(memory, 0x10000 + static_cast<std::uint64_t>(i - 1) * kChunk, std::byte{0x5a});
        set_byte(memory, 0x10001 + static_cast<std::uint64_t>(i - 1) * kChunk,
                 static_cast<std::byte>(i));
        store.add(std::to_string(i), memory, std::to_string(i - 1));
    }
    store.check_holds(std::to_string(kLength), memory);
    const ImageReader last = store.open(std::to_string(kLength));
    CHECK(last.info().sources.size() == kLength - 1); // all but the full one: nothing of it is left
    CHECK(last.totals().ref.chunks == kLength - 1);
    const UniqueFd fd = store.dir(std::to_string(kLength));
    CHECK(read_manifest(fd.get()).chain_length == kLength);
}

void chunks_without_sources_can_be_read_without_the_parent() {
    Store store;
    Noise memory(0x10000, 2, 1);
    store.add("a", memory);
    set_byte(memory, 0x10000, std::byte{0});
    set_byte(memory, 0x10001, std::byte{1});
    store.add("b", memory, "a");
    store.remove("a");
    const UniqueFd fd = store.dir("b");
    const ImageReader image = ImageReader::open(fd.get(), image_name(4242));
    Buffer plain(kChunk);
    image.read_chunk(0, plain);
    CHECK_THROWS(Errc::bad_argument, image.read_chunk(1, plain));
    CHECK_THROWS(Errc::bad_argument, image.verify(1));
}

/// The message of the Error that `body` throws.
template <class Body>
std::string error_of(Errc code, const Body& body) {
    try {
        body();
    } catch (const Error& e) {
        CHECK(e.code() == code);
        return e.what();
    }
    CHECK(false && "no error");
    return {};
}

bool has(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
}

void a_missing_or_other_parent_is_named() {
    Store store;
    Noise memory(0x10000, 4, 1);
    store.add("a", memory);
    store.add("b", memory, "a");
    store.rename("a", "elsewhere");
    const std::string missing = error_of(Errc::io, [&] { store.open("b"); });
    CHECK(has(missing, "checkpoint 01010101010101010101010101010101"));
    CHECK(has(missing, "/b/gpustasis-parent to ../a: No such file"));

    // A dump in its first moments: a link, and no manifest yet. Its parent is removed just then.
    CHECK(::mkdirat(store.root().fd(), "begun", 0700) == 0);
    const UniqueFd begun = store.dir("begun");
    CHECK(::symlinkat("../gone\x1b[31m", begun.get(), "gpustasis-parent") == 0);
    Lineage dumping(begun.get());
    const std::string gone = error_of(Errc::io, [&] { dumping.directory(1); });
    CHECK(has(gone, "/begun/gpustasis-parent to ../gone?[31m: No such file"));

    Noise other(0x10000, 4, 2);
    store.add("a", other);
    const std::string replaced = error_of(Errc::corrupt_data, [&] { store.open("b"); });
    CHECK(has(replaced, "/a/gpustasis-4242.img is another image"));

    store.remove("a");
    store.rename("elsewhere", "a");
    store.check_holds("b", memory);
}

void a_damaged_parent_is_found_when_it_is_read() {
    Store store;
    Noise memory(0x10000, 4, 1);
    store.add("a", memory);
    store.add("b", memory, "a");
    const UniqueFd fd = store.dir("a");
    Buffer file = sample::read_file(fd.get(), image_name(4242));
    file[4096 + 17] ^= std::byte{1};
    sample::write_file(fd.get(), image_name(4242), file);
    const ImageReader image = store.open("b");
    const std::string damaged = error_of(Errc::corrupt_data, [&] { image.verify(2); });
    CHECK(has(damaged, "chunk 0 at 0x10000"));
}

void a_parent_that_cannot_serve_is_refused() {
    Store store;
    Noise memory(0x10000, 4, 1);
    store.add("a", memory);
    store.add("b", memory, "a");
    const UniqueFd a = store.dir("a");
    CHECK_THROWS(Errc::bad_argument, link_parent(a.get(), a.get()));

    // Another chunk size.
    Lineage above = Lineage::above(a.get());
    const ParentIndex index = ParentIndex::read(above);
    CHECK_THROWS(Errc::bad_argument,
                 write_image(a.get(), "x.img", info_of(memory, 8192), memory, {.parent = &index}));
    CHECK(!store.root().has("a/x.img"));

    // What the parent itself is built on is gone: to build on it would lose the job.
    store.rename("a", "c");
    const UniqueFd b = store.dir("b");
    Lineage broken = Lineage::above(b.get());
    CHECK_THROWS(Errc::io, ParentIndex::read(broken));

    // No GPU memory, no manifest.
    CHECK(::mkdirat(store.root().fd(), "empty", 0700) == 0);
    const UniqueFd empty = store.dir("empty");
    Lineage nothing = Lineage::above(empty.get());
    CHECK_THROWS(Errc::io, ParentIndex::read(nothing));
    write_manifest(empty.get(), {.checkpoint_id = sample::id_of(9),
                                 .driver_api_version = 0,
                                 .driver_version = "",
                                 .gpus = {},
                                 .tasks = {{7, false, {}, ProcessState::running}}});
    CHECK_THROWS(Errc::bad_argument, ParentIndex::read(nothing));
}

void who_removes_a_checkpoint_keeps_readers_out() {
    Store store;
    Noise memory(0x10000, 4, 1);
    store.add("a", memory);
    store.add("b", memory, "a");
    {
        const UniqueFd remover = store.dir("a");
        CHECK(::flock(remover.get(), LOCK_EX | LOCK_NB) == 0);
        CHECK(has(error_of(Errc::io, [&] { store.open("b"); }), "/a is locked"));
        const UniqueFd a = store.dir("a");
        CHECK_THROWS(Errc::io, Lineage::above(a.get()));
    }
    const UniqueFd b = store.dir("b");
    Lineage reading(b.get());
    CHECK(has(reading.path(1), "/a"));
    const UniqueFd remover = store.dir("a");
    CHECK(::flock(remover.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK);

    // Removed between the caller's open and our lock.
    Noise other(0x10000, 4, 3);
    store.add("c", other);
    const UniqueFd c = store.dir("c");
    store.remove("c");
    CHECK(has(error_of(Errc::io, [&] { Lineage::above(c.get()); }), "removed or replaced"));
}

void flattened_is_what_a_full_one_would_have_been() {
    Store store;
    Memory memory;
    map_mixture(memory);
    store.add("a", memory);
    set_byte(memory, 0x7f0000000000, std::byte{0xff});
    store.add("b", memory, "a");
    set_byte(memory, 0x7f0000007000, std::byte{0xff});
    store.add("c", memory, "b");

    ImageInfo info = info_of(memory, kChunk);
    info.checkpoint_id = store.open("c").info().checkpoint_id;
    const WriteResult full = write_image(store.root().fd(), "full.img", info, memory, {});
    const WriteResult flat = flatten_image(store.open("c"), store.root().fd(), "flat.img", 2);
    CHECK(flat.digest == full.digest && flat.totals == full.totals);
    CHECK(sample::read_file(store.root().fd(), "full.img") ==
          sample::read_file(store.root().fd(), "flat.img"));

    // Damage is not copied.
    const UniqueFd a = store.dir("a");
    Buffer file = sample::read_file(a.get(), image_name(4242));
    file[2 * 4096 + 1] ^= std::byte{1};
    sample::write_file(a.get(), image_name(4242), file);
    const ImageReader damaged = store.open("c");
    CHECK_THROWS(Errc::corrupt_data, flatten_image(damaged, store.root().fd(), "damaged.img", 2));
    CHECK(!store.root().has("damaged.img") && !store.root().has(".damaged.img.part"));
}

void a_lock_ends_with_who_took_it() {
    Store store;
    Noise memory(0x10000, 8, 1);
    store.add("a", memory);
    store.add("b", memory, "a");
    const UniqueFd kept = store.dir("b"); // the caller's own stays open
    const UniqueFd parent = store.dir("a");
    const UniqueFd remover = store.dir("b");
    const UniqueFd remover_of_parent = store.dir("a");
    {
        Lineage lineage(kept.get());
        const Lineage above = Lineage::above(parent.get());
        CHECK(::flock(remover.get(), LOCK_EX | LOCK_NB) != 0);
        CHECK(::flock(remover_of_parent.get(), LOCK_EX | LOCK_NB) != 0);
    }
    CHECK(::flock(remover.get(), LOCK_EX | LOCK_NB) == 0);
    CHECK(::flock(remover_of_parent.get(), LOCK_EX | LOCK_NB) == 0);
}

void sources_are_attached_while_others_read() {
    Store store;
    Noise memory(0x10000, 64, 1);
    store.add("a", memory);
    store.add("b", memory, "a");
    const UniqueFd fd = store.dir("b");
    ImageReader image = store.open("b");
    Lineage lineage(fd.get());
    std::atomic<bool> done = false;
    std::thread other([&] {
        while (!done)
            image.attach_sources(lineage);
    });
    for (int round = 0; round < 200; ++round)
        image.verify(2);
    done = true;
    other.join();
}

} // namespace

int main() {
    what_is_the_same_is_not_stored_again();
    content_is_found_wherever_it_was();
    a_last_chunk_is_not_taken_for_a_whole_one();
    long_chains_work();
    chunks_without_sources_can_be_read_without_the_parent();
    a_missing_or_other_parent_is_named();
    a_damaged_parent_is_found_when_it_is_read();
    a_parent_that_cannot_serve_is_refused();
    who_removes_a_checkpoint_keeps_readers_out();
    a_lock_ends_with_who_took_it();
    sources_are_attached_while_others_read();
    flattened_is_what_a_full_one_would_have_been();
}
