// SPDX-License-Identifier: Apache-2.0
// What two tasks of a checkpoint have alike: an image refers to another one of the same checkpoint.
#include "check.hpp"
#include "sample.hpp"

#include "core/error.hpp"
#include "core/file.hpp"
#include "core/hash.hpp"
#include "core/image_flatten.hpp"
#include "core/image_format.hpp"
#include "core/image_frame.hpp"
#include "core/image_metadata.hpp"
#include "core/image_output.hpp"
#include "core/image_reader.hpp"
#include "core/image_writer.hpp"
#include "core/lineage.hpp"
#include "core/manifest.hpp"
#include "core/parent_index.hpp"

#include <optional>
#include <string>
#include <utility>

using namespace gpustasis;
using sample::Buffer;
using sample::Memory;

namespace {

constexpr std::uint32_t kChunk = 4096;
constexpr std::uint64_t kBase = 0x10000;
const Id kOwnId = sample::id_of(1);

Memory noise(std::size_t chunks, std::uint64_t seed, std::uint64_t address = kBase) {
    Memory memory;
    memory.map(address, sample::random_bytes(chunks * kChunk, seed));
    return memory;
}

void set_byte(Memory& memory, std::uint64_t address, std::byte value) {
    memory.write(address, Bytes(&value, 1));
}

/// One checkpoint in the making, as a dump makes it: each image is known to those after it.
class Dump {
public:
    explicit Dump(const sample::TempDir& place, const Id& id = kOwnId, int parent = -1)
        : place_(place), lineage_(place.fd()), index_(std::make_optional<ParentIndex>(kChunk)) {
        manifest_.checkpoint_id = id;
        if (parent < 0)
            return;
        link_parent(place.fd(), parent);
        lineage_ = Lineage(place.fd());
        index_ = ParentIndex::read(lineage_);
        manifest_.parent_id = index_->manifest().checkpoint_id;
        manifest_.chain_length = index_->manifest().chain_length + 1;
    }

    WriteResult add(std::uint32_t pid, Memory& memory, const std::string& owner) {
        return add(pid, memory, MemoryKind::gpu, false, owner);
    }
    WriteResult add(std::uint32_t pid, Memory& memory, MemoryKind kind = MemoryKind::gpu,
                    bool check = false, const std::string& owner = {}) {
        ImageInfo info = info_of(memory, kChunk);
        info.checkpoint_id = manifest_.checkpoint_id;
        info.pid = pid;
        info.kind = kind;
        const WriteResult written =
            write_image(place_.fd(), image_name(pid, kind), info, memory,
                        {.threads = 2, .parent = &*index_, .check_parent = check});
        ManifestTask task{.pid = pid, .externalized = true, .digest = written.digest};
        task.kind = kind;
        index_->add(lineage_, manifest_.checkpoint_id, task, owner);
        manifest_.add(task);
        write_manifest(place_.fd(), manifest_);
        return written;
    }
    ParentIndex& index() { return *index_; }
    Lineage& lineage() { return lineage_; }
    const Manifest& manifest() const { return manifest_; }

private:
    const sample::TempDir& place_;
    Lineage lineage_;
    std::optional<ParentIndex> index_;
    Manifest manifest_;
};

ImageReader open(const sample::TempDir& place, std::uint32_t pid,
                 MemoryKind kind = MemoryKind::gpu) {
    ImageReader image = ImageReader::open(place.fd(), image_name(pid, kind));
    Lineage lineage(place.fd());
    image.attach_sources(lineage);
    return image;
}

void check_holds(const sample::TempDir& place, std::uint32_t pid, const Memory& memory,
                 MemoryKind kind = MemoryKind::gpu) {
    const ImageReader image = open(place, pid, kind);
    image.verify(2);
    Memory restored;
    restored.map_like(memory, std::byte{0xaa});
    image.restore(restored, 2, false);
    CHECK(restored == memory);
}

std::string error_of(Errc code, const auto& body) {
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

void what_is_alike_is_stored_once() {
    const sample::TempDir place;
    Dump dump(place);
    Memory first;
    map_mixture(first);
    Memory second = first;
    set_byte(second, 0x7f0000007000, std::byte{0x5a}); // and one chunk of its own
    set_byte(second, 0x7f0000007001, std::byte{0x5b});
    Memory third = second;
    const WriteResult one = dump.add(7, first);
    CHECK(one.totals.alike.chunks == 0);
    const WriteResult two = dump.add(8, second);
    CHECK(two.totals.alike.chunks == one.totals.raw.chunks + one.totals.lz4.chunks - 1);
    CHECK(two.totals.alike.stored == 0 && two.totals.ref.chunks == 0);
    CHECK(two.totals.raw.chunks == 1 && two.totals.zero == one.totals.zero);
    // The other kind of memory as well; and no reference leads to a reference.
    const WriteResult three = dump.add(8, third, MemoryKind::cpu);
    CHECK(three.totals.raw.chunks + three.totals.lz4.chunks == 0);
    const ImageReader image = open(place, 8, MemoryKind::cpu);
    CHECK(image.info().sources.size() == 2 && image.info().parent_id == Id{});
    CHECK(image.info().sources[0].pid == 7 && image.info().sources[0].digest == one.digest);
    CHECK(image.info().sources[1].pid == 8 && image.info().sources[1].digest == two.digest);
    for (const Source& source : image.info().sources)
        CHECK(source.depth == 0 && source.checkpoint_id == kOwnId);
    CHECK(image.totals() == three.totals);
    check_holds(place, 7, first);
    check_holds(place, 8, second);
    check_holds(place, 8, third, MemoryKind::cpu);
}

void many_chunks_are_found_again() {
    const sample::TempDir place;
    Dump dump(place);
    constexpr int kTasks = 5; // the table grows several times
    std::vector<Memory> memories;
    for (std::uint32_t task = 0; task < kTasks; ++task) {
        memories.push_back(noise(100, task));
        CHECK(dump.add(task + 1, memories.back()).totals.raw.chunks == 100);
    }
    CHECK(dump.index().size() == 100 * kTasks);
    Memory all;
    for (std::uint32_t task = 0; task < kTasks; ++task)
        all.map(0x5000000 + task * 0x1000000, sample::random_bytes(100 * kChunk, task));
    CHECK(dump.add(99, all).totals.alike.chunks == 100 * kTasks);
    check_holds(place, 99, all);
    CHECK(open(place, 99).info().sources.size() == kTasks);
}

void a_parent_comes_first_and_a_child_needs_who_holds_the_bytes() {
    const sample::TempDir root;
    const sample::TempDir one;
    const sample::TempDir two;
    const sample::TempDir three;
    Memory common = noise(8, 1);
    Dump first(one, sample::id_of(1));
    first.add(7, common);
    first.add(8, common);

    // What the parent has is the parent's; what is new is stored once.
    Memory changed = common;
    set_byte(changed, kBase, std::byte{1});
    set_byte(changed, kBase + 1, std::byte{2});
    Memory other = changed;
    Dump second(two, sample::id_of(2), one.fd());
    const WriteResult a = second.add(7, changed);
    CHECK(a.totals.ref.chunks == 7 && a.totals.raw.chunks == 1);
    const WriteResult b = second.add(8, other);
    CHECK(b.totals.ref.chunks == 7 && b.totals.alike.chunks == 1 && b.totals.raw.chunks == 0);
    const ImageReader image = open(two, 8);
    CHECK(image.info().sources.size() == 2);
    CHECK(image.info().sources[0].depth == 0 && image.info().sources[1].depth == 1);
    CHECK(image.info().sources[1].pid == 7); // the one that holds them
    check_holds(two, 8, other);

    // Of a grandchild, what its parent's task had alike is the parent's.
    Dump third(three, sample::id_of(3), two.fd());
    CHECK(third.add(7, changed).totals.ref.chunks == 8);
    CHECK(third.add(8, other).totals.ref.chunks == 8);
    const ImageReader last = open(three, 8);
    CHECK(last.info().sources.size() == 2);
    CHECK(last.info().sources[0].depth == 1 && last.info().sources[0].pid == 7);
    CHECK(last.info().sources[1].depth == 2 && last.info().sources[1].pid == 7);
    check_holds(three, 8, other);
}

void a_rotten_chunk_is_stored_anew_once() {
    const sample::TempDir place;
    Dump dump(place);
    Memory memory = noise(4, 1);
    dump.add(7, memory);
    Buffer file = sample::read_file(place.fd(), image_name(7));
    file[kChunk + 17] ^= std::byte{1}; // of chunk 0
    sample::write_file(place.fd(), image_name(7), file);
    const WriteResult anew = dump.add(8, memory, MemoryKind::gpu, true);
    CHECK(anew.damaged_in_parent == 1 && has(anew.first_damage, "gpustasis-7.img"));
    CHECK(anew.totals.raw.chunks == 1 && anew.totals.alike.chunks == 3);
    // From now on the sound one is referred to.
    const WriteResult next = dump.add(9, memory, MemoryKind::gpu, true);
    CHECK(next.damaged_in_parent == 0 && next.totals.alike.chunks == 4);
    check_holds(place, 9, memory);
    check_holds(place, 8, memory);
}

void only_what_is_complete_is_known() {
    const sample::TempDir place;
    Dump dump(place);
    Memory memory = noise(4, 1);
    dump.add(7, memory);
    const std::size_t known = dump.index().size();
    const auto refused = [&](Errc code, ManifestTask task, const Id& id = kOwnId) {
        CHECK_THROWS(code, dump.index().add(dump.lineage(), id, task));
        CHECK(dump.index().size() == known);
    };
    refused(Errc::io, {.pid = 8, .externalized = true});           // there is none
    refused(Errc::corrupt_data, {.pid = 7, .externalized = true}); // another digest
    refused(Errc::bad_argument, dump.manifest().tasks[0]);         // twice
    refused(Errc::corrupt_data, dump.manifest().tasks[0], sample::id_of(9));
    // Of chunks of another size.
    ImageInfo info = info_of(memory, 2 * kChunk);
    info.checkpoint_id = kOwnId;
    info.pid = 9;
    const WriteResult larger = write_image(place.fd(), image_name(9), info, memory, {});
    refused(Errc::bad_argument, {.pid = 9, .externalized = true, .digest = larger.digest});
}

void what_another_owner_has_is_not_referred_to() {
    const sample::TempDir place;
    const sample::TempDir child;
    Dump dump(place);
    Memory memory = noise(4, 1);
    dump.index().write_for("root");
    dump.add(7, memory, "root");
    dump.index().write_for("nobody");
    CHECK(dump.add(8, memory, "nobody").totals.raw.chunks == 4);
    CHECK(dump.add(9, memory, "nobody").totals.alike.chunks == 4);
    CHECK(open(place, 9).info().sources[0].pid == 8);
    // What the parent has is everybody's.
    Dump next(child, sample::id_of(2), place.fd());
    next.index().write_for("somebody");
    CHECK(next.add(7, memory, "somebody").totals.ref.chunks == 4);
}

void another_file_is_refused() {
    const sample::TempDir place;
    Dump dump(place);
    Memory memory = noise(4, 1);
    dump.add(7, memory);
    dump.add(8, memory);
    const std::string name = image_name(7);
    const Buffer sound = sample::read_file(place.fd(), name);
    const auto refused = [&](Errc code, const char* why) {
        const std::string what = error_of(code, [&] { open(place, 8); });
        CHECK(
            has(what, "gpustasis-7.img of checkpoint 01010101010101010101010101010101, this one"));
        CHECK(has(what, why));
    };
    sample::write_file(place.fd(), name, Bytes(sound).first(sound.size() - 1));
    refused(Errc::corrupt_data, "another size");
    Buffer replaced = sound;
    replaced.back() ^= std::byte{1};
    sample::write_file(place.fd(), name, replaced);
    refused(Errc::corrupt_data, "another digest");
    CHECK(::unlinkat(place.fd(), name.c_str(), 0) == 0);
    refused(Errc::io, "No such file");
    sample::write_file(place.fd(), name, sound);
    check_holds(place, 8, memory);

    Buffer damaged = sound; // of chunk 0
    damaged[kChunk + 17] ^= std::byte{1};
    sample::write_file(place.fd(), name, damaged);
    const ImageReader image = open(place, 8);
    CHECK(has(error_of(Errc::corrupt_data, [&] { image.verify(2); }), "chunk 0 at 0x10000"));
}

/// An image of no memory with this one source.
void forge(const sample::TempDir& place, const Source& source, const Id& parent = {}) {
    ImageInfo info;
    info.checkpoint_id = kOwnId;
    info.parent_id = parent;
    info.pid = 8;
    info.chunk_size = kChunk;
    info.sources.push_back(source);
    FileOutput file(place.fd(), image_name(8), IoMode::buffered, 1);
    file.commit(write_frame(file, info, 1, format::kHeaderSize, {}).file_size);
}

void what_an_image_may_say() {
    const sample::TempDir place;
    const Source good{.checkpoint_id = kOwnId, .file_size = 4096, .pid = 7};
    const auto refused = [&](Source source, const char* why) {
        forge(place, source);
        CHECK(
            has(error_of(Errc::corrupt_data, [&] { ImageReader::open(place.fd(), image_name(8)); }),
                why));
    };
    forge(place, good);
    CHECK(ImageReader::open(place.fd(), image_name(8)).info().sources == std::vector{good});
    // A task that is in no manifest, and no file.
    CHECK(has(error_of(Errc::io, [&] { open(place, 8); }), "gpustasis-7.img"));
    Source source = good;
    source.pid = 8;
    refused(source, "is the image itself");
    source.kind = MemoryKind::cpu; // the other memory of the same task
    forge(place, source);
    ImageReader::open(place.fd(), image_name(8));
    source = good;
    source.checkpoint_id = sample::id_of(2);
    refused(source, "is of another checkpoint");
    source = good;
    source.depth = 1;
    refused(source, "there is no parent");
    forge(place, source, sample::id_of(2));
    ImageReader::open(place.fd(), image_name(8));
}

void the_bit_says_that_it_is_there() {
    const sample::TempDir place;
    constexpr std::size_t kFeatures = 16;
    const auto with_features = [&](std::byte bits) {
        Buffer file = sample::read_file(place.fd(), image_name(8));
        file[kFeatures] = bits;
        const Bytes header = Bytes(file).first(240);
        const Id hash = hash128(header);
        std::ranges::copy(hash, file.begin() + 240);
        std::ranges::copy(hash, file.end() - 128 + 64); // the trailer's copy
        const Id digest = hash128(Bytes(file).last(128).first(112));
        std::ranges::copy(digest, file.end() - 16);
        sample::write_file(place.fd(), "changed.img", file);
        ImageReader::open(place.fd(), "changed.img");
    };
    forge(place, {.checkpoint_id = kOwnId, .file_size = 4096, .pid = 7});
    with_features(std::byte{1 << 4});
    CHECK_THROWS(Errc::corrupt_data, with_features(std::byte{0}));
    forge(place, {.checkpoint_id = sample::id_of(2), .file_size = 4096, .pid = 7, .depth = 1},
          sample::id_of(2));
    with_features(std::byte{1});
    CHECK_THROWS(Errc::corrupt_data, with_features(std::byte{1 | 1 << 4}));
}

void a_flat_copy_holds_all_itself() {
    const sample::TempDir place;
    const sample::TempDir full;
    Memory memory;
    map_mixture(memory);
    Dump dump(place);
    dump.add(7, memory);
    dump.add(8, memory);
    ImageInfo info = info_of(memory, kChunk);
    info.checkpoint_id = kOwnId;
    info.pid = 8;
    const WriteResult whole = write_image(full.fd(), "full.img", info, memory, {});
    const WriteResult flat = flatten_image(open(place, 8), full.fd(), "flat.img", 2);
    CHECK(flat.digest == whole.digest && flat.totals == whole.totals);
    CHECK(ImageReader::open(full.fd(), "flat.img").info().sources.empty());
}

} // namespace

int main() {
    what_is_alike_is_stored_once();
    many_chunks_are_found_again();
    a_parent_comes_first_and_a_child_needs_who_holds_the_bytes();
    a_rotten_chunk_is_stored_anew_once();
    only_what_is_complete_is_known();
    what_another_owner_has_is_not_referred_to();
    another_file_is_refused();
    what_an_image_may_say();
    the_bit_says_that_it_is_there();
    a_flat_copy_holds_all_itself();
}
