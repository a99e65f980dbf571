// SPDX-License-Identifier: Apache-2.0
// A process whose GPU memory is put back from an image runs on with that memory or not at all: what a GPU, another dump or
// a changed image does wrong is an error, and the process's record says so until every byte is there.
#include "direct_rig.hpp"

#include "dropped_memory/drop_record.hpp"
#include "tracee/proc.hpp"

#include <unistd.h>

#include <atomic>
#include <optional>
#include <string>

using namespace direct_rig;

namespace {

/// A process whose memory was handed over and stored: it is CHECKPOINTED.
struct Stored : Rig {
    Stored() {
        fresh(record, ::getpid());
        storage_driver::have(record.pid, memory);
        work.prepare(driver, record.pid, {uuid(0), uuid(1)}, 2);
        work.checkpoint(driver, record);
        CHECK(record.direct.stored && state.memory[record.pid] != memory);
        note(record.checkpoint_id);
    }
    ~Stored() {
        for (const char* kind : {DropRecords::kCheckpointed, DropRecords::kFilling})
            DropRecords({}, kind).remove(identity_of(record));
    }
    Stored(const Stored&) = delete;
    Stored& operator=(const Stored&) = delete;

    /// What a dump writes before it has the driver checkpoint the process.
    void note(const Id& checkpoint_id) {
        DropRecord known;
        known.task = identity_of(record);
        known.pid = record.pid;
        known.boot_id = proc::boot_id();
        known.checkpoint_id = checkpoint_id;
        DropRecords({}, DropRecords::kCheckpointed).write(known);
    }
    std::optional<DropRecord> filling() const {
        return DropRecords({}, DropRecords::kFilling).find(identity_of(record));
    }
    bool is_back() const { return is_locked(record.pid) && state.memory[record.pid] == memory; }
    /// By a worker that has not stored it, and knows it by its name only.
    void restore_by_name() { DirectWork(config, images, &store).restore(driver, record, {}); }
    std::string refused(const std::function<void()>& call) {
        try {
            call();
        } catch (const Error& e) {
            CHECK(e.code() == Errc::corrupt_data);
            CHECK(!is_locked(record.pid));
            return e.what();
        }
        return "nothing was thrown";
    }

    std::array<Buffer, 2> memory = some_memory(true);
    TaskRecord record;
};

bool has(const std::string& text, const char* words) {
    return text.find(words) != std::string::npos;
}

// Whoever looks at any moment is told that the memory is not whole, or that it is.
void a_process_is_recorded_as_filling_until_every_byte_is_there() {
    Stored rig;
    int restores = 0, completes = 0;
    std::atomic<int> copies = 0; // by several threads
    const auto filled = [&] {
        const auto record = rig.filling();
        CHECK(record && record->checkpoint_id == rig.record.checkpoint_id);
        return record->filled;
    };
    state.on_restore = [&] {
        ++restores;
        CHECK(!filled() && rig.record.direct.filling);
    };
    state.on_copy = [&] {
        ++copies;
        CHECK(!filled() && rig.record.direct.filling);
    };
    state.on_complete = [&] {
        ++completes;
        CHECK(filled() && !rig.record.direct.filling);
        CHECK(state.memory[rig.record.pid] == rig.memory);
    };
    rig.work.restore(rig.driver, rig.record, {});
    state.on_restore = state.on_copy = state.on_complete = nullptr;
    CHECK(restores == 1 && copies >= 2 && completes == 1);
    CHECK(rig.is_back() && !rig.filling());
}

// The last wait of all: everything was begun, and nobody else would be told.
void a_copy_that_fails_on_the_gpu_ends_no_restore() {
    for (const int waits : {0, 1, 3, 4}) { // one for the zeros, one for each of four streams
        Stored rig;
        state.waits_left = waits;
        CHECK_THROWS(Errc::io, rig.work.restore(rig.driver, rig.record, {}));
        state.waits_left = 1'000'000;
        CHECK(rig.record.direct.filling && !is_locked(rig.record.pid));
        CHECK(rig.filling() && !rig.filling()->filled);
        rig.work.restore(rig.driver, rig.record, {});
        CHECK(rig.is_back() && !rig.record.direct.filling && !rig.filling());
    }
}

// Whatever the driver says of it: who was filling it has died.
void a_process_that_was_half_filled_is_not_whole() {
    Stored rig;
    rig.record.direct.filling = true;
    state.states[rig.record.pid] = static_cast<int>(ProcessState::locked);
    DirectWork next(rig.config, rig.images, &rig.store);
    CHECK_THROWS(Errc::corrupt_data, next.restore(rig.driver, rig.record, {}));
}

void memory_of_an_older_checkpoint_is_not_put_back() {
    Stored rig;
    rig.note(sample::id_of(9)); // by a dump that came after
    const int restores = state.restores;
    CHECK(has(rig.refused([&] { rig.work.restore(rig.driver, rig.record, {}); }),
              "was checkpointed again since"));
    CHECK(has(rig.refused([&] { rig.restore_by_name(); }), "was checkpointed again since"));
    CHECK(state.restores == restores && !rig.filling());
    rig.note(rig.record.checkpoint_id);
    rig.restore_by_name();
    CHECK(rig.is_back());
}

void an_image_that_is_not_the_one_that_was_stored_is_not_put_back() {
    Stored rig;
    const int restores = state.restores;
    const char* const words = "is not the image of the GPU memory of process";
    const Id checkpoint_id = rig.record.checkpoint_id;
    rig.record.digest[0] ^= std::byte{1};
    CHECK(has(rig.refused([&] { rig.restore_by_name(); }), words));
    rig.record.digest[0] ^= std::byte{1};
    rig.record.checkpoint_id = sample::id_of(9);
    CHECK(has(rig.refused([&] { rig.restore_by_name(); }), words));
    rig.record.checkpoint_id = checkpoint_id;
    CHECK(state.restores == restores && !rig.filling());
    rig.restore_by_name();
    CHECK(rig.is_back());
}

void a_driver_that_wants_other_memory_than_the_image_holds_is_not_completed() {
    Stored rig;
    state.memory[rig.record.pid][0].resize(rig.memory[0].size() + 4096);
    CHECK(has(rig.refused([&] { rig.work.restore(rig.driver, rig.record, {}); }),
              "the driver wants other memory than the image holds"));
    CHECK(rig.record.direct.filling && rig.filling());
}

} // namespace

int main() {
    const sample::TempDir dir;
    open_gpus(dir);
    a_process_is_recorded_as_filling_until_every_byte_is_there();
    a_copy_that_fails_on_the_gpu_ends_no_restore();
    a_process_that_was_half_filled_is_not_whole();
    memory_of_an_older_checkpoint_is_not_put_back();
    an_image_that_is_not_the_one_that_was_stored_is_not_put_back();
    a_driver_that_wants_other_memory_than_the_image_holds_is_not_completed();
    CHECK(state.races == 0);
}
