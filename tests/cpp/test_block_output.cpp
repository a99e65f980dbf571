// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"
#include "core/block_output.hpp"
#include "core/error.hpp"
#include "core/file.hpp"
#include "sample.hpp"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

using namespace gpustasis;
using sample::Buffer;

namespace {
bool reserves = true; // space for files, or as a file system that cannot
int refused = 0;      // how often it could not
} // namespace

// In place of the C library's.
extern "C" int fallocate(int fd, int mode, off_t offset, off_t size) {
    if (!reserves) {
        ++refused;
        errno = EOPNOTSUPP;
        return -1;
    }
    return static_cast<int>(::syscall(SYS_fallocate, fd, mode, offset, size));
}

namespace {

constexpr std::size_t kBlock = BlockOutput::kBlockSize;

Buffer noise(std::size_t size) {
    std::mt19937_64 random(size);
    Buffer bytes(size + 8);
    for (std::size_t at = 0; at < size; at += 8) {
        const std::uint64_t word = random();
        std::memcpy(bytes.data() + at, &word, sizeof word);
    }
    bytes.resize(size);
    return bytes;
}

UniqueFd open_new(const sample::TempDir& dir) {
    return UniqueFd(::open(dir.path("file").c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
}

bool takes_direct(const UniqueFd& file) {
    try {
        return static_cast<bool>(open_direct(file.get(), O_WRONLY, IoMode::direct));
    } catch (const Error& e) {
        CHECK(e.code() == Errc::unsupported);
        return false;
    }
}

// An empty file that O_DIRECT opens: in memory, which a tmpfs has since Linux 6.6, or else on a disk.
UniqueFd open_new_for_direct() {
    UniqueFd file(::memfd_create("direct", MFD_CLOEXEC));
    CHECK(file);
    for (const char* place : {"/tmp", "."}) { // which ctest sets to where the tests are built
        if (takes_direct(file))
            return file;
        std::fprintf(stderr, "direct I/O is refused there: a file in %s instead\n", place);
        file = open_new(sample::TempDir(place)); // that goes, and the file has no name any more
        CHECK(file);
    }
    CHECK(takes_direct(file) && "no file here can be written directly: build on another disk");
    return file;
}

struct Piece {
    std::size_t begin;
    std::size_t end;
};

std::vector<Piece> cut(std::size_t size, std::mt19937& random) {
    std::vector<Piece> pieces;
    for (std::size_t at = 0; at < size;) {
        const std::size_t most = random() % 10 == 0 ? 3 * kBlock : 100'000;
        const std::size_t end = std::min(size, at + 1 + random() % most);
        pieces.push_back({at, end});
        at = end;
    }
    std::ranges::shuffle(pieces, random);
    return pieces;
}

void put(BlockOutput& output, const Buffer& wanted, const Piece& piece) {
    const Bytes bytes = Bytes(wanted).subspan(piece.begin, piece.end - piece.begin);
    output.put(piece.begin, bytes.size(), [&](MutBytes to) {
        CHECK(to.size() == bytes.size());
        std::ranges::copy(bytes, to.begin());
    });
}

// Whatever the order, the size and the thread; sizes of a file that end in a block, at its end, and within a block
// of the device.
void pieces_become_the_file() {
    std::mt19937 random(20261125);
    for (const IoMode mode : {IoMode::buffered, IoMode::automatic})
        for (const std::size_t size :
             {std::size_t{0}, std::size_t{1}, std::size_t{4096}, kBlock - 1, kBlock, kBlock + 1,
              9 * kBlock + 12'345, 8 * kBlock}) {
            const sample::TempDir dir;
            const UniqueFd file = open_new(dir);
            const Buffer wanted = noise(size);
            const std::vector<Piece> pieces = cut(size, random);
            BlockOutput output(file.get(), mode);
            {
                std::vector<std::jthread> threads;
                for (std::size_t thread = 0; thread < 4; ++thread)
                    threads.emplace_back([&, thread] {
                        for (std::size_t i = thread; i < pieces.size(); i += 4)
                            put(output, wanted, pieces[i]);
                    });
            }
            output.finish(size);
            CHECK(file_size(file.get()) == size);
            if (size > 8 * kBlock) // only the end of it may have gone through the page cache
                CHECK(is_mostly_cached(file.get(), size) == !output.is_direct());
            CHECK(read_part(file.get(), 0, size) == wanted);
        }
}

// Also a whole block, which nothing was put into.
void a_file_with_a_hole_is_not_finished() {
    const Buffer wanted = noise(3 * kBlock);
    for (const Piece& missing : {Piece{0, 1}, Piece{kBlock + 7, kBlock + 8},
                                 Piece{3 * kBlock - 1, 3 * kBlock}, Piece{kBlock, 2 * kBlock}}) {
        const sample::TempDir dir;
        const UniqueFd file = open_new(dir);
        BlockOutput output(file.get(), IoMode::automatic);
        put(output, wanted, {0, missing.begin});
        put(output, wanted, {missing.end, wanted.size()});
        CHECK_THROWS(Errc::bad_argument, output.finish(wanted.size()));
    }
}

// What a sum of sizes does not show.
void what_is_put_twice_is_refused() {
    const Buffer wanted = noise(3 * kBlock);
    for (const Piece& twice :
         {Piece{0, kBlock}, Piece{kBlock, 3 * kBlock}, Piece{0, kBlock / 2}, Piece{10, 11},
          Piece{kBlock - 1, kBlock + 1}, Piece{3 * kBlock - 1, 3 * kBlock}, Piece{0, 3 * kBlock}}) {
        const sample::TempDir dir;
        const UniqueFd file = open_new(dir);
        BlockOutput output(file.get(), IoMode::automatic);
        put(output, wanted, {kBlock / 2, kBlock});
        put(output, wanted, {2 * kBlock, 3 * kBlock});
        put(output, wanted, {0, kBlock / 2});
        put(output, wanted, {kBlock, 2 * kBlock});
        CHECK_THROWS(Errc::bad_argument, put(output, noise(wanted.size() + 8), twice));
        CHECK_THROWS(Errc::bad_argument, output.finish(wanted.size()));
        CHECK(read_part(file.get(), 0, wanted.size()) == wanted); // nothing of the second one
    }
}

// The sum fits: one block behind the end is whole, and one before it is missing; or one came twice.
void blocks_are_counted_by_their_numbers() {
    const Buffer wanted = noise(3 * kBlock);
    const sample::TempDir dir;
    {
        const UniqueFd file = open_new(dir);
        BlockOutput output(file.get(), IoMode::automatic);
        put(output, wanted, {0, kBlock});
        put(output, wanted, {2 * kBlock, 3 * kBlock});
        CHECK_THROWS(Errc::bad_argument, output.finish(2 * kBlock));
    }
    for (const Piece& twice : {Piece{0, kBlock}, Piece{kBlock, kBlock + kBlock / 2}}) {
        const UniqueFd file = open_new(dir);
        BlockOutput output(file.get(), IoMode::automatic);
        std::size_t sum = 0;
        for (const Piece& piece : {Piece{0, kBlock}, twice, twice}) {
            try {
                put(output, wanted, piece);
            } catch (const Error& e) {
                CHECK(e.code() == Errc::bad_argument);
            }
            sum += piece.end - piece.begin;
        }
        CHECK_THROWS(Errc::bad_argument, output.finish(sum));
    }
}

// As on a disk that is full. Through the page cache: direct writes reserve space first.
void a_block_that_could_not_be_written_is_missed() {
    const Buffer wanted = noise(2 * kBlock);
    const sample::TempDir dir;
    const UniqueFd file = open_new(dir);
    BlockOutput output(file.get(), IoMode::buffered);
    std::signal(SIGXFSZ, SIG_IGN);
    rlimit before{};
    CHECK(::getrlimit(RLIMIT_FSIZE, &before) == 0);
    const rlimit small{4096, before.rlim_max};
    CHECK(::setrlimit(RLIMIT_FSIZE, &small) == 0);
    CHECK_THROWS(Errc::io, put(output, wanted, {0, kBlock}));
    CHECK(::setrlimit(RLIMIT_FSIZE, &before) == 0);
    put(output, wanted, {kBlock, 2 * kBlock});
    CHECK_THROWS(Errc::bad_argument, output.finish(wanted.size()));
}

// Where O_DIRECT opens and no space can be reserved, as over some networks: what is written ends with a block, and
// the file does not.
void a_file_written_directly_has_its_size() {
    reserves = false;
    for (const std::size_t size : {std::size_t{5000}, 2 * kBlock + 100}) {
        const UniqueFd file = open_new_for_direct();
        const Buffer wanted = noise(size);
        refused = 0;
        BlockOutput output(file.get(), IoMode::direct);
        put(output, wanted, {0, size});
        output.finish(size);
        CHECK(refused > 0); // else the C library's was asked, and this has shown nothing
        CHECK(file_size(file.get()) == size);
        CHECK(read_part(file.get(), 0, size) == wanted);
    }
    reserves = true;
}

void what_is_put_behind_the_end_is_refused() {
    const Buffer wanted = noise(kBlock + 10);
    const sample::TempDir dir;
    const UniqueFd file = open_new(dir);
    BlockOutput output(file.get(), IoMode::automatic);
    put(output, wanted, {0, wanted.size()});
    CHECK_THROWS(Errc::bad_argument, output.finish(wanted.size() - 1));
}

void what_cannot_be_made_is_missing() {
    const Buffer wanted = noise(2 * kBlock);
    for (const std::size_t size : {std::size_t{100}, kBlock + 100}) { // in a block, and over two
        const sample::TempDir dir;
        const UniqueFd file = open_new(dir);
        BlockOutput output(file.get(), IoMode::automatic);
        bool thrown = false;
        try {
            output.put(0, size, [](MutBytes) { throw std::runtime_error("cannot"); });
        } catch (const std::runtime_error&) {
            thrown = true;
        }
        CHECK(thrown);
        put(output, wanted, {size, wanted.size()});
        CHECK_THROWS(Errc::bad_argument, output.finish(wanted.size()));
    }
}

} // namespace

int main() {
    pieces_become_the_file();
    a_file_with_a_hole_is_not_finished();
    what_is_put_twice_is_refused();
    blocks_are_counted_by_their_numbers();
    a_block_that_could_not_be_written_is_missed();
    a_file_written_directly_has_its_size();
    what_is_put_behind_the_end_is_refused();
    what_cannot_be_made_is_missing();
}
