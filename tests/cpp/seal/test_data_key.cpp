// SPDX-License-Identifier: Apache-2.0
// The data key: its record, the keys made of it, and the memory that holds them.
#include "check.hpp"

#include "core/error.hpp"
#include "seal/content_hash.hpp"
#include "seal/data_key.hpp"
#include "seal/frame_cipher.hpp"

#include <algorithm>
#include <array>
#include <fstream>
#include <sstream>
#include <string>
#include <sys/mman.h>
#include <sys/wait.h>
#include <vector>

using namespace gpustasis;
using seal::DataKey;
using seal::Secret;

namespace {

bool same(Bytes one, Bytes other) {
    return std::ranges::equal(one, other);
}

std::string hex(Bytes bytes) {
    constexpr std::string_view digits = "0123456789abcdef";
    std::string text;
    for (const std::byte byte : bytes) {
        text += digits[std::to_integer<unsigned>(byte) >> 4U];
        text += digits[std::to_integer<unsigned>(byte) & 15U];
    }
    return text;
}

Bytes bytes_of(std::string_view text) {
    return std::as_bytes(std::span(text));
}

/// sealed_id a0 a1 ..., data key 00 01 02 ...
std::array<std::byte, DataKey::kRecordSize> counting_record() {
    std::array<std::byte, DataKey::kRecordSize> record{};
    std::ranges::copy(bytes_of("GPUSKEY\n\1"), record.begin());
    for (unsigned i = 0; i < 16; ++i)
        record[16 + i] = static_cast<std::byte>(0xa0 + i);
    for (unsigned i = 0; i < 32; ++i)
        record[32 + i] = static_cast<std::byte>(i);
    return record;
}

// Both values were made with Python: cryptography's HKDF, and hmac.
void keys_and_hashes_are_as_the_format_says() {
    const DataKey key = DataKey::from_record(counting_record());
    CHECK(hex(key.subkey("label", bytes_of("context")).bytes()) ==
          "799a0157acb5a74c594a6a9a116ad0789eb9d2d30ff6fb64dc53343e07d2fdcc");
    CHECK(hex(seal::ContentHash(key)(bytes_of("content"))) == "bd910e7435847c3c2353c0fe2e1b0032");
    CHECK(same(key.record().bytes(), counting_record()));
}

void content_hashes_differ_between_checkpoints() {
    const DataKey one = DataKey::random();
    const seal::ContentHash hash(one);
    const Bytes content = bytes_of("content");
    CHECK(hash(content) == seal::ContentHash(one)(content));
    CHECK(hash(content) != hash(bytes_of("Content")));
    CHECK(hash(content) != seal::ContentHash(DataKey::random())(content));
}

void records_that_are_none_are_refused() {
    const DataKey key = DataKey::random();
    const Secret record = key.record();
    CHECK(DataKey::from_record(record.bytes()).sealed_id() == key.sealed_id());
    std::vector<std::byte> changed(record.bytes().begin(), record.bytes().end());
    for (const std::size_t size : {0U, 1U, 63U})
        CHECK_THROWS(Errc::corrupt_data, DataKey::from_record(Bytes(changed).first(size)));
    changed[8] = std::byte{3};
    CHECK_THROWS(Errc::unsupported, DataKey::from_record(changed));
    changed[8] = std::byte{2}; // with the keys of earlier checkpoints, and there are none
    CHECK_THROWS(Errc::corrupt_data, DataKey::from_record(changed));
    changed[8] = std::byte{1};
    changed[12] = std::byte{1};
    CHECK_THROWS(Errc::corrupt_data, DataKey::from_record(changed));
    changed[12] = std::byte{0};
    changed[0] ^= std::byte{1};
    CHECK_THROWS(Errc::corrupt_data, DataKey::from_record(changed));
}

// A checkpoint that is built on another, which is built on a third.
void a_record_holds_the_keys_of_the_whole_chain() {
    const DataKey first = DataKey::random();
    const DataKey second = DataKey::random().built_on(first);
    const DataKey third = DataKey::random().built_on(second);
    const Secret record = third.record();
    CHECK(record.size() == DataKey::kRecordSize + 2 * DataKey::kAncestorSize);
    const DataKey read = DataKey::from_record(record.bytes());
    CHECK(same(read.record().bytes(), record.bytes()));
    CHECK(read.ancestor_count() == 2 && read.sealed_id() == third.sealed_id());
    CHECK(same(read.at_depth(0).record().bytes(), record.bytes()));
    CHECK(same(read.at_depth(1).record().bytes(), second.record().bytes()));
    CHECK(same(read.at_depth(2).record().bytes(), first.record().bytes()));
    CHECK_THROWS(Errc::corrupt_data, read.at_depth(3));
    CHECK(same(read.subkey("a", {}).bytes(), third.subkey("a", {}).bytes()));
    CHECK(DataKey::random().built_on(third).built_on(first).ancestor_count() == 1); // anew
    CHECK_THROWS(Errc::corrupt_data, first.built_on(third));                        // a circle
}

void records_of_a_chain_that_are_none_are_refused() {
    const DataKey first = DataKey::random();
    const DataKey third = DataKey::random().built_on(DataKey::random().built_on(first));
    const Secret record = third.record();
    const std::vector<std::byte> whole(record.bytes().begin(), record.bytes().end());
    for (std::size_t size = 0; size < whole.size(); ++size)
        CHECK_THROWS(Errc::corrupt_data, DataKey::from_record(Bytes(whole).first(size)));
    std::vector<std::byte> changed = whole;
    changed[8] = std::byte{1};
    CHECK_THROWS(Errc::corrupt_data, DataKey::from_record(changed));
    changed = whole;
    changed[12] = std::byte{1};
    CHECK_THROWS(Errc::corrupt_data, DataKey::from_record(changed));
    changed = whole; // the parent's parent is the parent
    std::copy_n(whole.begin() + DataKey::kRecordSize, sizeof(Id),
                changed.begin() + DataKey::kRecordSize + DataKey::kAncestorSize);
    CHECK_THROWS(Errc::corrupt_data, DataKey::from_record(changed));
}

void a_chain_of_keys_has_an_end() {
    DataKey last = DataKey::random();
    for (std::size_t i = 0; i < DataKey::kMaxAncestors; ++i)
        last = DataKey::random().built_on(last);
    CHECK(last.ancestor_count() == DataKey::kMaxAncestors);
    const Secret record = last.record();
    CHECK(record.size() == DataKey::kMaxRecordSize);
    CHECK(same(DataKey::from_record(record.bytes()).record().bytes(), record.bytes()));
    CHECK_THROWS(Errc::bad_argument, DataKey::random().built_on(last));
}

// What a dump does when its parent cannot be used after all.
void a_fresh_key_is_built_on_what_is_said_last() {
    seal::FreshKey key;
    const Secret frames = seal::frame_key(key.key(), 1, {});
    const DataKey one = DataKey::random();
    const DataKey other = DataKey::random();
    key.build_on(one);
    key.build_on(other);
    CHECK(key.key().ancestor_count() == 1);
    CHECK(key.key().at_depth(1).sealed_id() == other.sealed_id());
    key.build_on_nothing();
    CHECK(key.key().ancestor_count() == 0);
    CHECK(same(frames.bytes(), seal::frame_key(key.key(), 1, {}).bytes()));
}

void keys_differ_by_all_that_they_are_made_of() {
    const DataKey key = DataKey::random();
    const std::array<std::byte, 1> one{std::byte{1}};
    const Secret plain = key.subkey("a", {});
    CHECK(same(plain.bytes(), key.subkey("a", {}).bytes()));
    CHECK(!same(plain.bytes(), key.subkey("b", {}).bytes()));
    CHECK(!same(plain.bytes(), key.subkey("a", one).bytes()));
    CHECK(!same(plain.bytes(), DataKey::random().subkey("a", {}).bytes()));
    CHECK(!same(seal::frame_key(key, 1, one).bytes(), seal::frame_key(key, 2, one).bytes()));
    CHECK(!same(seal::frame_key(key, 1, one).bytes(), seal::frame_key(key, 1, {}).bytes()));
}

/// The lines of smaps for the mapping that holds `address`.
std::string mapping_of(const void* address) {
    std::ifstream smaps("/proc/self/smaps");
    const auto wanted = reinterpret_cast<std::uintptr_t>(address);
    std::string line;
    std::string found;
    bool inside = false;
    while (std::getline(smaps, line)) {
        std::istringstream words(line);
        std::uintptr_t begin = 0;
        std::uintptr_t end = 0;
        char dash = 0;
        if (words >> std::hex >> begin >> dash >> end && dash == '-')
            inside = wanted >= begin && wanted < end;
        if (inside)
            found += line + "\n";
    }
    return found;
}

void secrets_are_locked_in_no_dump_and_in_no_child() {
    const Secret secret(32);
    const std::string mapping = mapping_of(secret.bytes().data());
    const std::string flags = mapping.substr(mapping.find("VmFlags:"));
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) // they make mlock do nothing
    CHECK(flags.find(" lo") != std::string::npos);                  // locked
#endif
    CHECK(flags.find(" dd") != std::string::npos); // not dumped
    CHECK(flags.find(" dc") != std::string::npos); // not copied on fork
    const pid_t child = fork_child();
    if (child == 0) {
        const volatile std::byte* const byte = secret.bytes().data();
        ::_exit(std::to_integer<int>(*byte)); // 0 if it can be read
    }
    int status = 0;
    CHECK(::waitpid(child, &status, 0) == child);
    CHECK(!WIFEXITED(status) || WEXITSTATUS(status) != 0); // a sanitizer exits with 1
}

// As a program does that was forked while a key was open, and unwinds its stack.
void a_child_can_drop_what_it_does_not_have() {
    Secret secret(32);
    const std::byte* const place = secret.bytes().data();
    const pid_t child = fork_child();
    if (child == 0) {
        // Something of the child's own, where the key was for its parent.
        void* const own = ::mmap(const_cast<std::byte*>(place), 32, PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        *static_cast<char*>(own) = 7;
        { const Secret dropped(std::move(secret)); }
        ::_exit(*static_cast<volatile char*>(own) == 7 ? 0 : 1);
    }
    int status = 0;
    CHECK(::waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

void a_secret_moves_with_its_bytes() {
    Secret one(16);
    one.bytes()[0] = std::byte{7};
    Secret other(std::move(one));
    CHECK(other.size() == 16 && other.bytes()[0] == std::byte{7});
    Secret third(1);
    third = std::move(other);
    CHECK(third.size() == 16 && third.bytes()[0] == std::byte{7});
}

} // namespace

int main() {
    keys_and_hashes_are_as_the_format_says();
    content_hashes_differ_between_checkpoints();
    records_that_are_none_are_refused();
    a_record_holds_the_keys_of_the_whole_chain();
    records_of_a_chain_that_are_none_are_refused();
    a_chain_of_keys_has_an_end();
    a_fresh_key_is_built_on_what_is_said_last();
    keys_differ_by_all_that_they_are_made_of();
    secrets_are_locked_in_no_dump_and_in_no_child();
    a_child_can_drop_what_it_does_not_have();
    a_secret_moves_with_its_bytes();
}
