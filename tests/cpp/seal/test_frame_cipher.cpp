// SPDX-License-Identifier: Apache-2.0
// Frames: what is opened is what was sealed under that number, place and key; else nothing is given.
#include "check.hpp"
#include "sealed_sample.hpp"

#include "core/error.hpp"
#include "core/workers.hpp"
#include "seal/frame_cipher.hpp"

#include <algorithm>
#include <mutex>
#include <set>

using namespace gpustasis;
using sample::Buffer;
using sample::noise;

namespace {

const Buffer kHeader = noise(128, 9);
const Buffer kPlace = noise(16, 8);

bool all_zero(Bytes bytes) {
    return std::ranges::all_of(bytes, [](std::byte byte) { return byte == std::byte{0}; });
}

Buffer sealed_by(seal::FrameSealer& sealer, Bytes plain) {
    Buffer sealed(plain.size() + seal::kTagSize);
    sealer.seal(sealer.take(), kPlace, plain, sealed);
    return sealed;
}

void frames_come_back() {
    seal::FreshKey key;
    seal::FrameSealer sealer = key.sealer(1, kHeader);
    const seal::FrameOpener opener(key.key(), 1, kHeader);
    std::uint64_t number = 0;
    for (const std::size_t size : {0U, 1U, 15U, 16U, 17U, 100'000U}) {
        const Buffer plain = noise(size, 1);
        const Buffer sealed = sealed_by(sealer, plain);
        if (size >= 16)
            CHECK(std::ranges::search(sealed, Bytes(plain).first(16)).empty());
        Buffer opened(size);
        opener.open(number++, kPlace, sealed, opened);
        CHECK(opened == plain);
    }
}

// One frame, and every way in which it can be another one.
void nothing_else_opens_and_nothing_is_left() {
    seal::FreshKey key;
    seal::FrameSealer sealer = key.sealer(1, kHeader);
    const Buffer plain = noise(64, 1);
    const Buffer sealed = sealed_by(sealer, plain);
    const auto refused = [&](const seal::FrameOpener& opener, std::uint64_t number, Bytes place,
                             Bytes bytes) {
        Buffer opened = noise(bytes.size() - seal::kTagSize, 5);
        CHECK_THROWS(Errc::corrupt_data, opener.open(number, place, bytes, opened));
        CHECK(all_zero(opened));
    };
    const seal::FrameOpener right(key.key(), 1, kHeader);
    for (std::size_t at = 0; at < sealed.size(); ++at) {
        Buffer changed = sealed;
        changed[at] ^= std::byte{1};
        refused(right, 0, kPlace, changed);
    }
    for (std::size_t at = 0; at < kPlace.size(); ++at) {
        Buffer place = kPlace;
        place[at] ^= std::byte{0x80};
        refused(right, 0, place, sealed);
    }
    refused(right, 1, kPlace, sealed);
    refused(right, std::uint64_t{1} << 63U, kPlace, sealed);
    refused(right, 0, Bytes(kPlace).first(15), sealed);
    refused(right, 0, {}, sealed);
    refused(right, 0, kPlace, Bytes(sealed).first(sealed.size() - 1));
    refused(seal::FrameOpener(key.key(), 2, kHeader), 0, kPlace, sealed);
    refused(seal::FrameOpener(key.key(), 1, noise(128, 10)), 0, kPlace, sealed);
    refused(seal::FrameOpener(seal::FreshKey().key(), 1, kHeader), 0, kPlace, sealed);
}

// A nonce is used once: a number is used up, a file has one sealer, and numbers differ between threads.
void no_number_is_used_twice() {
    seal::FreshKey key;
    seal::FrameSealer sealer = key.sealer(1, kHeader);
    CHECK_THROWS(Errc::bad_argument, key.sealer(1, kHeader));
    CHECK_THROWS(Errc::bad_argument, key.sealer(1, noise(128, 10)));
    static_cast<void>(key.sealer(2, kHeader));

    const Buffer plain = noise(32, 1);
    Buffer sealed(plain.size() + seal::kTagSize);
    seal::FrameNumber number = sealer.take();
    sealer.seal(std::move(number), kPlace, plain, sealed);
    // NOLINTNEXTLINE(bugprone-use-after-move): that is what is tested
    CHECK_THROWS(Errc::bad_argument, sealer.seal(std::move(number), kPlace, plain, sealed));
    // Used up by a call that fails, too: some of it may have been sealed.
    seal::FrameNumber failed = sealer.take();
    CHECK_THROWS(Errc::bad_argument,
                 sealer.seal(std::move(failed), kPlace, plain, MutBytes(sealed).first(8)));
    // NOLINTNEXTLINE(bugprone-use-after-move)
    CHECK_THROWS(Errc::bad_argument, sealer.seal(std::move(failed), kPlace, plain, sealed));

    std::mutex mutex;
    std::set<std::uint64_t> seen{0, 1};
    FirstFailure failure;
    run_workers(4, failure, [&] {
        for (int i = 0; i < 1000; ++i) {
            const seal::FrameNumber next = sealer.take();
            const std::lock_guard lock(mutex);
            CHECK(seen.insert(next.value()).second);
        }
    });
    CHECK(seen.size() >= 1002 && (seen.size() - 2) % 1000 == 0);
}

// What is left to another process is sealed there alone, and nothing else is.
void a_file_is_left_to_one_process() {
    seal::FreshKey key;
    key.leave(2);
    CHECK_THROWS(Errc::bad_argument, key.sealer(2, kHeader));
    CHECK_THROWS(Errc::bad_argument, key.leave(2));
    static_cast<void>(key.sealer(3, kHeader));
    CHECK_THROWS(Errc::bad_argument, key.leave(3));

    const seal::Secret handed = key.key().record();
    const seal::DataKey taken = seal::DataKey::from_record(handed.bytes());
    seal::FreshKey theirs = seal::FreshKey::of_left_file(taken, 2);
    CHECK_THROWS(Errc::bad_argument, theirs.sealer(1, kHeader));
    CHECK_THROWS(Errc::bad_argument, theirs.leave(4));
    seal::FrameSealer sealer = theirs.sealer(2, kHeader);
    CHECK_THROWS(Errc::bad_argument, theirs.sealer(2, kHeader));
    const Buffer plain = noise(100, 1);
    Buffer opened(plain.size());
    seal::FrameOpener(key.key(), 2, kHeader).open(0, kPlace, sealed_by(sealer, plain), opened);
    CHECK(opened == plain);
}

void sizes_that_do_not_fit_are_refused() {
    seal::FreshKey key;
    seal::FrameSealer sealer = key.sealer(1, kHeader);
    const seal::FrameOpener opener(key.key(), 1, kHeader);
    Buffer buffer(100);
    CHECK_THROWS(Errc::bad_argument, opener.open(0, {}, Bytes(buffer).first(15), buffer));
    CHECK_THROWS(Errc::bad_argument, opener.open(0, {}, Bytes(buffer).first(16), buffer));
    Buffer large(seal::kMaxFrameSize + 1);
    Buffer out(large.size() + seal::kTagSize);
    CHECK_THROWS(Errc::bad_argument, sealer.seal(sealer.take(), {}, large, out));
}

} // namespace

int main() {
    frames_come_back();
    nothing_else_opens_and_nothing_is_left();
    no_number_is_used_twice();
    a_file_is_left_to_one_process();
    sizes_that_do_not_fit_are_refused();
}
