// SPDX-License-Identifier: Apache-2.0
// Frames of a file that is sealed while it is written: of any size, in runs or by themselves, and opened in
// the reader's memory; and a file is whole or not there.
#include "check.hpp"
#include "sealed_sample.hpp"

#include "seal/sealed_output.hpp"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <random>
#include <string>
#include <thread>
#include <vector>

using namespace gpustasis;
using namespace gpustasis::seal;
using sample::Buffer;
using sample::Directory;

namespace {
std::atomic<std::size_t> largest_allocation = 0;
} // namespace

void* operator new(std::size_t size) {
    std::size_t before = largest_allocation.load();
    while (before < size && !largest_allocation.compare_exchange_weak(before, size)) {
    }
    void* pointer = std::malloc(size);
    if (pointer == nullptr)
        throw std::bad_alloc();
    return pointer;
}

// A sanitizer's would not call the one above.
void* operator new[](std::size_t size) {
    return operator new(size);
}

void operator delete(void* pointer) noexcept {
    std::free(pointer);
}

void operator delete[](void* pointer) noexcept {
    std::free(pointer);
}

void operator delete[](void* pointer, std::size_t) noexcept {
    std::free(pointer);
}

void operator delete(void* pointer, std::size_t) noexcept {
    std::free(pointer);
}

namespace {

SealedOutput::Options options(std::uint32_t frame_size, std::uint32_t file_id = kFirstOther,
                              IoMode io = IoMode::buffered) {
    return {.file_id = file_id, .name = "gpustasis-1.img", .frame_size = frame_size, .io = io};
}

// Whatever the size of frames: puts and reads that begin and end anywhere, of less than a frame and of
// more than is sealed or read with one call; through the page cache and, where the directory's disk offers it, past
// it.
void any_size_of_frames_will_do(IoMode io) {
    std::mt19937 random(20260102);
    for (const std::uint32_t frame :
         {kMinSealedFrame, 32U << 10, 128U << 10, kDefaultSealedFrame, kMaxSealedFrame}) {
        const Buffer wanted = sample::noise((9U << 20) + 12345, frame);
        const Directory dir;
        FreshKey key;
        SealedOutput output(key, dir.fd(), options(frame, kFirstOther, io));
        std::vector<std::size_t> cuts{0, wanted.size(), random() % wanted.size()};
        for (std::size_t at = 0; at < wanted.size(); at += 1 + random() % (6U << 20))
            cuts.push_back(at / frame * frame + (random() % 2 == 0 ? 0 : random() % frame));
        std::ranges::transform(cuts, cuts.begin(),
                               [&](std::size_t at) { return std::min(at, wanted.size()); });
        std::ranges::sort(cuts);
        {
            std::vector<std::jthread> threads;
            for (std::size_t i = 0; i + 1 < cuts.size(); ++i)
                threads.emplace_back([&, i] {
                    output.put(cuts[i], Bytes(wanted).subspan(cuts[i], cuts[i + 1] - cuts[i]));
                });
        }
        output.commit(wanted.size());

        const SealedReader sealed(dir.fd(), sealed_name(kFirstOther), key.key(), kFirstOther, io);
        CHECK(sealed.frame_size() == frame);
        const auto same = [&](std::size_t offset, std::size_t size) {
            Buffer part(size);
            sealed.read(0, offset, part);
            CHECK(size == 0 || std::memcmp(part.data(), wanted.data() + offset, size) == 0);
        };
        same(0, wanted.size());
        same(wanted.size(), 0);
        for (int round = 0; round < 30; ++round) {
            const std::size_t near = random() % (wanted.size() / frame + 1) * frame;
            const std::size_t offset = std::min(near + random() % 3, wanted.size());
            const std::size_t left = wanted.size() - offset;
            same(offset, std::min<std::size_t>(left, frame));
            same(offset, left == 0 ? 0 : random() % left);
        }
    }
}

// A thread that puts a large chunk holds one frame of it besides, sealed: a dump does not take memory of
// the size of its chunks once more for each of its threads.
void a_large_chunk_is_not_held_once_more() {
    for (const std::uint32_t frame : {kMinSealedFrame, kDefaultSealedFrame, kMaxSealedFrame}) {
        const Buffer wanted = sample::noise((3 * std::size_t{kMaxSealedFrame}) + 100, frame);
        const Directory dir;
        FreshKey key;
        SealedOutput output(key, dir.fd(), options(frame));
        largest_allocation = 0;
        output.put(0, wanted);
        CHECK(largest_allocation >= kFrameOverhead + kMinSealedFrame); // it is counted
        CHECK(largest_allocation <= frame + kFrameOverhead);
        output.commit(wanted.size());
        const SealedReader sealed(dir.fd(), sealed_name(kFirstOther), key.key(), kFirstOther);
        Buffer found(wanted.size());
        sealed.read(0, 0, found);
        CHECK(found == wanted);
    }
}

// What is opened in the caller's own memory: what came before the damage, and nothing of the frame that
// has it, be it opened there or beside.
void nothing_is_given_that_is_not_authentic() {
    const Directory dir;
    FreshKey key;
    constexpr std::size_t frame = kMinSealedFrame;
    const Buffer wanted = sample::noise(5 * frame + 100, 1);
    {
        SealedOutput output(key, dir.fd(), options(kMinSealedFrame));
        output.put(0, wanted);
        output.commit(wanted.size());
    }
    const std::string name = sealed_name(kFirstOther);
    Buffer bytes = dir.read(name);
    const std::size_t tag_end = end_of_frames(kSealedHeaderSize, 4 * frame, frame);
    bytes[tag_end - 1] ^= std::byte{1}; // of frame 3
    dir.write(name, bytes);
    const SealedReader sealed(dir.fd(), name, key.key(), kFirstOther);
    struct Case {
        std::size_t begin;
        std::size_t end;
    };
    for (const Case& part : {Case{0, wanted.size()}, Case{frame + 7, 5 * frame},
                             Case{2 * frame, 4 * frame - 1}, Case{3 * frame + 9, 3 * frame + 90}}) {
        constexpr std::byte untouched{0xa5};
        Buffer out(part.end - part.begin, untouched);
        CHECK_THROWS(Errc::corrupt_data, sealed.read(0, part.begin, out));
        for (std::size_t at = part.begin; at < part.end; ++at) {
            const std::byte found = out[at - part.begin];
            if (at < 3 * frame)
                CHECK(found == wanted[at]);
            else
                CHECK(found == untouched || found == std::byte{0});
        }
    }
}

// Also within its last frame, which is then sealed whole, or cut.
void nothing_is_put_behind_the_end() {
    FreshKey key;
    std::uint32_t file_id = kFirstOther;
    for (const std::size_t offset : {std::size_t{0}, 3 * std::size_t{kMinSealedFrame}})
        for (const std::size_t size : {kMinSealedFrame, kMinSealedFrame - 1}) {
            const Directory dir;
            SealedOutput output(key, dir.fd(), options(kMinSealedFrame, file_id++));
            output.put(offset, sample::noise(size, 1));
            CHECK_THROWS(Errc::bad_argument, output.commit(offset + size - 1));
        }
    const Directory dir;
    SealedOutput output(key, dir.fd(), options(kMinSealedFrame, file_id));
    CHECK_THROWS(Errc::bad_argument, output.put(~std::uint64_t{1}, sample::noise(4, 1)));
    CHECK_THROWS(Errc::bad_argument, output.commit(2));
}

// Zeros, or nothing, in the place of bytes that somebody meant to put would be a wrong image.
void what_could_not_be_put_is_not_committed() {
    const Directory dir;
    FreshKey key;
    const Buffer bytes = sample::noise(4 * kMinSealedFrame, 1);
    {
        SealedOutput output(key, dir.fd(), options(kMinSealedFrame));
        output.put(2 * kMinSealedFrame, Bytes(bytes).first(kMinSealedFrame));
        CHECK_THROWS(Errc::bad_argument, output.put(0, bytes)); // two frames, and the third again
        CHECK_THROWS(Errc::bad_argument, output.commit(bytes.size()));
    }
    {
        SealedOutput output(key, dir.fd(), options(kMinSealedFrame, kFirstOther + 1));
        output.put(kMinSealedFrame + 1, Bytes(bytes).first(1));
        CHECK_THROWS(Errc::bad_argument, output.put(0, bytes)); // the second frame has a byte
        CHECK_THROWS(Errc::bad_argument, output.commit(bytes.size()));
    }
    CHECK(dir.names().empty());
}

} // namespace

int main() {
    any_size_of_frames_will_do(IoMode::buffered);
    any_size_of_frames_will_do(IoMode::automatic);
    a_large_chunk_is_not_held_once_more();
    nothing_is_given_that_is_not_authentic();
    nothing_is_put_behind_the_end();
    what_could_not_be_put_is_not_committed();
}
