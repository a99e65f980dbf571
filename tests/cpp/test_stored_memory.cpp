// SPDX-License-Identifier: Apache-2.0
// The digest that CRIU's inventory holds: nothing that a restore needs can be left out unseen.
#include "check.hpp"
#include "sample.hpp"

#include "core/lineage.hpp"
#include "core/stored_memory.hpp"

#include <string>
#include <vector>

using namespace gpustasis;

namespace {

struct Entry {
    ManifestTask task;
    std::vector<Region> regions;
};

std::vector<Entry> example() {
    return {{{.pid = 7, .externalized = true, .digest = sample::id_of(1)},
             {{.address = 0x10000, .length = 0x2000}}},
            {{.pid = 7, .externalized = true, .kind = MemoryKind::cpu},
             {{.address = 0x40000, .length = 0x1000}, {.address = 0x50000, .length = 0x1000}}},
            {{.pid = 9}, {}}};
}

Id digest_of(const std::vector<Entry>& entries) {
    StoredMemory stored;
    for (const auto& [task, regions] : entries)
        stored.add(task, regions);
    return stored.digest();
}

void it_is_what_the_format_says() {
    CHECK(id_text(digest_of({})) == "99aa06d3014798d86001c324468d497f"); // hash128 of no byte
    CHECK(id_text(digest_of(example())) == "7bd49bb5d731116f98e0bb27a72995c6");
}

void every_change_is_seen() {
    const Id whole = digest_of(example());
    const auto changed = [&](auto change) {
        std::vector<Entry> entries = example();
        change(entries);
        return digest_of(entries) != whole;
    };
    using Entries = std::vector<Entry>&;
    for (std::size_t i = 0; i < example().size(); ++i)
        CHECK(changed([=](Entries e) { e.erase(e.begin() + static_cast<std::ptrdiff_t>(i)); }));
    CHECK(changed([](Entries e) { e.clear(); }));
    CHECK(changed([](Entries e) { e[0].task.pid = 8; }));
    CHECK(changed([](Entries e) { e[0].task.externalized = false; }));
    CHECK(changed([](Entries e) { e[2].task.externalized = true; }));
    CHECK(changed([](Entries e) { e[2].task.kind = MemoryKind::cpu; }));
    CHECK(changed([](Entries e) { e[0].regions[0].address += 0x1000; }));
    CHECK(changed([](Entries e) { e[0].regions[0].length += 0x1000; }));
    CHECK(changed([](Entries e) { e[1].regions.pop_back(); }));
    CHECK(changed([](Entries e) { e.push_back({{.pid = 10}, {}}); }));
}

// A flattened copy has other files, with other digests, of the same memory.
void how_it_is_stored_does_not_count() {
    std::vector<Entry> entries = example();
    entries[0].task.digest = sample::id_of(2);
    entries[1].task.digest = sample::id_of(3);
    CHECK(digest_of(entries) == digest_of(example()));
    CHECK(digest_of({entries[2], entries[0], entries[1]}) == digest_of(example()));
}

} // namespace

int main() {
    it_is_what_the_format_says();
    every_change_is_seen();
    how_it_is_stored_does_not_count();
}
