#include "check.hpp"
#include "sample.hpp"

#include "core/image_flatten.hpp"
#include "core/image_metadata.hpp"
#include "core/image_reader.hpp"
#include "core/image_writer.hpp"
#include "core/stripe_file.hpp"
#include "core/striped_output.hpp"

#include <sys/resource.h>
#include <sys/wait.h>

#include <csignal>
#include <functional>
#include <optional>

using namespace gpustasis;
using sample::Buffer;
using sample::Memory;

namespace {

const std::string kName = image_name(4242);

void map_memory(Memory& memory) {
    map_mixture(memory);
    memory.map(0x7f2000000000, sample::random_bytes(21 * 4096, 3));
    memory.map(0x7f3000000000, sample::pattern_bytes(10 * 4096));
}

void check_holds(const ImageReader& image, const Memory& memory) {
    image.verify(2);
    for (const unsigned threads : {1U, 3U}) {
        Memory restored;
        restored.map_like(memory, std::byte{0xaa});
        image.restore(restored, threads, false);
        CHECK(restored == memory);
    }
}

std::vector<Buffer> files_of(const sample::TempDir& dir, unsigned files) {
    std::vector<Buffer> all;
    for (unsigned i = 0; i < files; ++i)
        all.push_back(sample::read_file(dir.fd(), stripe_name(kName, i)));
    return all;
}

/// That `body` fails, and says so of `file`.
template <class Body>
void check_blames(const std::string& file, Errc code, const Body& body) {
    try {
        body();
    } catch (const Error& e) {
        CHECK(e.code() == code);
        CHECK(std::string(e.what()).find(file) != std::string::npos);
        return;
    }
    CHECK(false && "nothing was thrown");
}

void names_follow_from_the_image() {
    CHECK(image_name(7) == "gpustasis-7.img");
    CHECK(image_name(7, 2) == "gpustasis-7.2.img");
    CHECK(stripe_name("other", 15) == "other.15");
}

void what_was_written_is_read(unsigned stripes, std::uint32_t chunk_size, std::uint32_t alignment) {
    const sample::TempDir dir;
    Memory memory;
    map_memory(memory);
    std::vector<Buffer> first;
    for (const unsigned threads : {1U, 2U, 7U}) {
        const WriteResult written =
            write_image(dir.fd(), kName, info_of(memory, chunk_size), memory,
                        {.threads = threads, .alignment = alignment, .stripes = stripes});
        const ImageReader image = ImageReader::open(dir.fd(), kName);
        CHECK(image.totals() == written.totals && image.totals().ref.chunks == 0);
        CHECK(image.digest() == written.digest && image.file_size() == written.file_size);
        CHECK(image.info().sources.size() == stripes - 1);
        check_holds(image, memory);

        const std::vector<Buffer> files = files_of(dir, stripes);
        CHECK(!dir.has(stripe_name(kName, stripes)));
        std::uint64_t total = 0;
        for (const Buffer& file : files)
            total += file.size();
        CHECK(total == written.total_size && total == image.total_size());
        if (first.empty())
            first = files;
        CHECK(files == first);
    }
}

void one_file_is_what_it_always_was() {
    const sample::TempDir dir;
    Memory memory;
    map_memory(memory);
    write_image(dir.fd(), "default", info_of(memory), memory, {});
    write_image(dir.fd(), "one", info_of(memory), memory, {.stripes = 1});
    write_image(dir.fd(), "chosen", info_of(memory), memory, {.stripes = 0}); // too small for more
    CHECK(sample::read_file(dir.fd(), "default") == sample::read_file(dir.fd(), "one"));
    CHECK(sample::read_file(dir.fd(), "default") == sample::read_file(dir.fd(), "chosen"));
}

void chunks_are_spread_evenly() {
    const sample::TempDir dir;
    Memory memory;
    memory.map(0x10000, sample::random_bytes(40 * 4096, 1));
    write_image(dir.fd(), kName, info_of(memory), memory, {.stripes = 4});
    const ImageReader image = ImageReader::open(dir.fd(), kName);
    std::array<unsigned, 4> counts{};
    for (std::uint64_t i = 0; i < image.chunk_count(); ++i)
        ++counts.at(image.chunk(i).source);
    CHECK((counts == std::array{10U, 10U, 10U, 10U}));
}

void no_damage_goes_unnoticed() {
    const sample::TempDir dir;
    Memory memory;
    memory.map(0x10000, sample::pattern_bytes(3 * 4096));
    memory.map(0x20000, sample::pattern_bytes(3 * 4096));
    write_image(dir.fd(), kName, info_of(memory), memory, {.alignment = 256, .stripes = 3});
    const std::string name = stripe_name(kName, 2);
    const Buffer sound = sample::read_file(dir.fd(), name);
    CHECK(sound.size() < 4096);
    const std::size_t data_begin = 256;
    for (std::size_t at = 0; at < sound.size(); ++at) {
        Buffer damaged = sound;
        damaged[at] ^= std::byte{0x10};
        sample::write_file(dir.fd(), name, damaged);
        if (at < data_begin || at >= sound.size() - kStripeTrailerSize) // without reading a chunk
            check_blames(name, Errc::corrupt_data, [&] { ImageReader::open(dir.fd(), kName); });
        else
            CHECK_THROWS(Errc::corrupt_data, ImageReader::open(dir.fd(), kName).verify(1));
    }
    for (std::size_t size = 0; size < sound.size(); size += 7) {
        sample::write_file(dir.fd(), name, Bytes(sound).first(size));
        check_blames(name, Errc::corrupt_data, [&] { ImageReader::open(dir.fd(), kName); });
    }
    Buffer longer = sound;
    longer.push_back(std::byte{0});
    sample::write_file(dir.fd(), name, longer);
    check_blames(name, Errc::corrupt_data, [&] { ImageReader::open(dir.fd(), kName); });
    CHECK(::unlinkat(dir.fd(), name.c_str(), 0) == 0);
    check_blames(name, Errc::io, [&] { ImageReader::open(dir.fd(), kName); });
    CHECK(::mkdirat(dir.fd(), name.c_str(), 0700) == 0);
    check_blames(name, Errc::corrupt_data, [&] { ImageReader::open(dir.fd(), kName); });
}

void another_stripe_is_not_taken_for_the_right_one() {
    const sample::TempDir dir;
    Memory memory;
    const Buffer content = sample::random_bytes(12 * 4096, 1);
    memory.map(0x10000, content);
    const WriteOptions options{.stripes = 3};
    write_image(dir.fd(), kName, info_of(memory), memory, options);
    const std::string name = stripe_name(kName, 1);
    const Buffer right = sample::read_file(dir.fd(), name);
    const auto check_refused = [&](const std::function<void(ImageInfo&, Memory&)>& change) {
        const sample::TempDir other;
        Memory changed;
        changed.map(0x10000, content);
        ImageInfo info = info_of(memory);
        change(info, changed);
        write_image(other.fd(), kName, info, changed, options);
        const Buffer wrong = sample::read_file(other.fd(), name);
        CHECK(wrong.size() == right.size() && wrong != right);
        sample::write_file(dir.fd(), name, wrong);
        check_blames(name, Errc::corrupt_data, [&] { ImageReader::open(dir.fd(), kName); });
    };
    check_refused([](ImageInfo& info, Memory&) { info.checkpoint_id = sample::id_of(0x77); });
    check_refused([](ImageInfo& info, Memory&) { info.pid = 4243; });
    check_refused(
        [](ImageInfo&, Memory& changed) { changed.write(0x11000, Buffer(16, std::byte{1})); });
    sample::write_file(dir.fd(), name, sample::read_file(dir.fd(), stripe_name(kName, 2)));
    check_blames(name, Errc::corrupt_data, [&] { ImageReader::open(dir.fd(), kName); });
    sample::write_file(dir.fd(), name, right);
    check_holds(ImageReader::open(dir.fd(), kName), memory);
}

void fewer_stripes_leave_none_of_the_older_image() {
    const sample::TempDir dir;
    Memory memory;
    map_memory(memory);
    write_image(dir.fd(), kName, info_of(memory), memory, {.stripes = 16});
    sample::write_file(dir.fd(), "." + stripe_name(kName, 9) + ".part", {});
    for (const unsigned stripes : {5U, 1U}) {
        write_image(dir.fd(), kName, info_of(memory), memory, {.stripes = stripes});
        for (unsigned number = 1; number < kMaxStripes; ++number)
            CHECK(dir.has(stripe_name(kName, number)) == (number < stripes));
        check_holds(ImageReader::open(dir.fd(), kName), memory);
    }
    CHECK(!dir.has("." + stripe_name(kName, 9) + ".part"));
}

class Failing : public Memory {
public:
    void read(std::uint64_t address, MutBytes out) override {
        if (fails_at != 0 && address >= fails_at)
            throw io_error("the test", EIO);
        Memory::read(address, out);
    }
    std::uint64_t fails_at = 0;
};

void a_failing_source_keeps_the_older_image_and_leaves_nothing_else() {
    for (const unsigned threads : {1U, 4U}) {
        const sample::TempDir dir;
        Failing memory;
        memory.map(0x10000, sample::random_bytes(64 * 4096, 1));
        const WriteOptions options{.threads = threads, .stripes = 3};
        write_image(dir.fd(), kName, info_of(memory), memory, options);
        const std::vector<Buffer> before = files_of(dir, 3);
        memory.fails_at = 0x10000 + 40 * 4096;
        CHECK_THROWS(Errc::io, write_image(dir.fd(), kName, info_of(memory), memory, options));
        CHECK(files_of(dir, 3) == before);
        for (unsigned i = 0; i < 3; ++i)
            CHECK(::unlinkat(dir.fd(), stripe_name(kName, i).c_str(), 0) == 0);
        CHECK(dir.empty());
    }
}

// A limit on the size of a file stands for a full disk.
void a_write_that_fails_leaves_nothing_behind() {
    for (const rlim_t limit : {0U, 50U, 8192U, 90000U}) {
        const sample::TempDir dir;
        Memory memory;
        memory.map(0x10000, sample::random_bytes(64 * 4096, 1));
        const pid_t child = ::fork();
        if (child == 0) {
            const rlimit size{limit, limit};
            ::signal(SIGXFSZ, SIG_IGN);
            ::setrlimit(RLIMIT_FSIZE, &size);
            CHECK_THROWS(Errc::io, write_image(dir.fd(), kName, info_of(memory), memory,
                                               {.threads = 3, .stripes = 2}));
            ::_exit(0);
        }
        int status = 0;
        CHECK(::waitpid(child, &status, 0) == child && status == 0);
        CHECK(dir.empty());
    }
}

// The image's own name cannot be taken: the stripes, which come first, must go again.
void stripes_without_their_image_are_removed() {
    const sample::TempDir dir;
    Memory memory;
    memory.map(0x10000, sample::random_bytes(8 * 4096, 1));
    CHECK(::mkdirat(dir.fd(), kName.c_str(), 0700) == 0);
    CHECK_THROWS(Errc::io, write_image(dir.fd(), kName, info_of(memory), memory, {.stripes = 4}));
    CHECK(::unlinkat(dir.fd(), kName.c_str(), AT_REMOVEDIR) == 0);
    CHECK(dir.empty());
}

/// Write a checkpoint of one task to `dir`, on top of that in `parent` if there is one.
WriteResult write_checkpoint(const sample::TempDir& dir, Memory& memory, unsigned stripes,
                             unsigned char id, const sample::TempDir* parent = nullptr) {
    std::optional<Lineage> lineage;
    std::optional<ParentIndex> index;
    Manifest manifest;
    manifest.checkpoint_id = sample::id_of(id);
    if (parent != nullptr) {
        link_parent(dir.fd(), parent->fd());
        lineage = Lineage::above(parent->fd());
        index = ParentIndex::read(*lineage);
        manifest.parent_id = index->manifest().checkpoint_id;
        manifest.chain_length = index->manifest().chain_length + 1;
    }
    ImageInfo info = info_of(memory);
    info.checkpoint_id = manifest.checkpoint_id;
    const WriteResult written =
        write_image(dir.fd(), kName, info, memory,
                    {.threads = 2, .stripes = stripes, .parent = index ? &*index : nullptr});
    manifest.tasks.push_back({4242, true, written.digest, ProcessState::running});
    write_manifest(dir.fd(), manifest);
    return written;
}

ImageReader open_attached(const sample::TempDir& dir) {
    ImageReader image = ImageReader::open(dir.fd(), kName);
    Lineage lineage(dir.fd());
    image.attach_sources(lineage);
    return image;
}

void chains_lead_through_stripes() {
    const sample::TempDir first;
    const sample::TempDir second;
    const sample::TempDir third;
    Memory memory;
    map_memory(memory);
    write_checkpoint(first, memory, 3, 1);
    memory.write(0x7f2000001000, sample::random_bytes(9 * 4096, 8));
    const WriteResult added = write_checkpoint(second, memory, 4, 2, &first);
    CHECK(added.totals.raw.chunks == 9 && added.totals.ref.chunks > 9);
    check_holds(open_attached(second), memory);
    memory.write(0x7f3000000000, sample::random_bytes(4096, 9));
    const WriteResult last = write_checkpoint(third, memory, 2, 3, &second);
    CHECK(last.totals.raw.chunks == 1 && last.totals.ref.chunks > 18);
    const ImageReader image = open_attached(third);
    check_holds(image, memory);
    bool deep = false; // a stripe of the grandparent's
    for (const Source& source : image.info().sources)
        deep = deep || (source.depth == 2 && source.stripe == 2);
    CHECK(deep);

    const sample::TempDir flat;
    write_image(flat.fd(), kName, info_of(memory), memory, {.stripes = 2}); // to be replaced
    flatten_image(image, flat.fd(), kName, 2, {});
    CHECK(!flat.has(stripe_name(kName, 1)));
    check_holds(ImageReader::open(flat.fd(), kName), memory);

    const std::string lost = stripe_name(kName, 2);
    const Buffer sound = sample::read_file(first.fd(), lost);
    sample::write_file(first.fd(), lost, sample::read_file(first.fd(), stripe_name(kName, 1)));
    check_blames(first.path(lost), Errc::corrupt_data, [&] { open_attached(third); });
    CHECK(::unlinkat(first.fd(), lost.c_str(), 0) == 0);
    check_blames(lost, Errc::io, [&] { open_attached(third); });
    const sample::TempDir fourth; // the parent is looked at before anything is written
    check_blames(lost, Errc::io, [&] { write_checkpoint(fourth, memory, 2, 4, &third); });
    CHECK(!fourth.has(kName));
    sample::write_file(first.fd(), lost, sound);
    check_holds(open_attached(third), memory);
}

void sources_that_contradict_are_refused() {
    Memory memory;
    memory.map(0x10000, Buffer(4096));
    const auto own = [](std::uint32_t stripe) {
        return Source{sample::id_of(0x11), sample::id_of(0x44), 4096, 4242, 0, stripe};
    };
    const auto refused = [&](std::vector<Source> sources) {
        ImageInfo info = info_of(memory);
        info.parent_id = sample::id_of(0x55);
        info.sources = std::move(sources);
        CHECK_THROWS(Errc::corrupt_data, format::check_info(info, Errc::corrupt_data));
    };
    refused({own(0)});
    refused({own(2)});
    refused({own(1), own(1)});
    refused({own(1), own(3)});
    std::vector<Source> all;
    for (std::uint32_t stripe = 1; stripe <= kMaxStripes; ++stripe)
        all.push_back(own(stripe));
    refused(all);
    Source other = own(1);
    other.pid = 4243;
    refused({other});
    other = own(1);
    other.checkpoint_id = sample::id_of(0x12);
    refused({other});
    Source earlier = own(kMaxStripes);
    earlier.depth = 1;
    refused({own(1), earlier});
    earlier.stripe = 1;
    refused({earlier, own(1)});

    ImageInfo info = info_of(memory);
    all.pop_back();
    info.sources = all;
    format::check_info(info, Errc::corrupt_data);
    info.sources.push_back(earlier); // and no parent
    CHECK_THROWS(Errc::corrupt_data, format::check_info(info, Errc::corrupt_data));
}

void how_many_pay_off() {
    const sample::TempDir memory("/dev/shm");
    const UniqueFd fd(::openat(memory.fd(), "file", O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    CHECK(stripe_count(0, fd.get(), 1, 1U << 30) == 1);
    CHECK(stripe_count(0, fd.get(), 4, 1U << 30) == 4);
    CHECK(stripe_count(0, fd.get(), 64, 1U << 30) == 8);
    CHECK(stripe_count(0, fd.get(), 4, 1U << 20) == 1);
    CHECK(stripe_count(11, fd.get(), 1, 1U << 20) == 11);
    CHECK_THROWS(Errc::bad_argument, stripe_count(kMaxStripes + 1, fd.get(), 1, 1U << 20));
    const UniqueFd proc(::open("/proc/self/status", O_RDONLY | O_CLOEXEC)); // no tmpfs
    CHECK(stripe_count(0, proc.get(), 4, 1U << 30) == 1);
}

} // namespace

int main() {
    names_follow_from_the_image();
    for (const unsigned stripes : {1U, 2U, 3U, 16U}) {
        what_was_written_is_read(stripes, 4096, 1);
        what_was_written_is_read(stripes, 8192, 4096);
    }
    one_file_is_what_it_always_was();
    chunks_are_spread_evenly();
    no_damage_goes_unnoticed();
    another_stripe_is_not_taken_for_the_right_one();
    fewer_stripes_leave_none_of_the_older_image();
    a_failing_source_keeps_the_older_image_and_leaves_nothing_else();
    a_write_that_fails_leaves_nothing_behind();
    stripes_without_their_image_are_removed();
    chains_lead_through_stripes();
    sources_that_contradict_are_refused();
    how_many_pay_off();
}
