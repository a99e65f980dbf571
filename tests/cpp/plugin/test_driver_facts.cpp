// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"

#include "cuda_plugin/driver_facts.hpp"
#include "cuda_plugin/nvml.hpp"

#include <string>

using namespace gpustasis;

namespace {

using Map = std::vector<GpuMapEntry>;

GpuInfo gpu(int number, const char* name = "model A") {
    GpuInfo info;
    info.uuid[0] = static_cast<std::byte>(number);
    info.name = name;
    info.memory_size = 1000;
    return info;
}

std::string uuid(int number) {
    return gpu_uuid_text(gpu(number).uuid);
}

/// With one task of which nothing is known about its GPUs.
Manifest manifest(std::vector<GpuInfo> gpus) {
    Manifest made;
    made.driver_api_version = 13000;
    made.gpus = std::move(gpus);
    made.tasks = {{.pid = 7, .externalized = true}};
    return made;
}

/// The same with one task that uses so much of these of them.
Manifest manifest(std::vector<GpuInfo> gpus, std::vector<TaskGpu> seen) {
    Manifest made = manifest(std::move(gpus));
    made.tasks[0].gpu_source = GpuSource::nvml;
    made.tasks[0].gpus = std::move(seen);
    return made;
}

DriverFacts machine(const std::vector<GpuInfo>& gpus, std::uint64_t free_size = 1000) {
    DriverFacts facts{false, 13000, "580.1", std::vector<GpuStatus>{}};
    for (const GpuInfo& info : gpus)
        facts.gpus->push_back({info, free_size});
    return facts;
}

std::vector<GpuMove> moves(const Manifest& what, const DriverFacts& where, const Map& map = {},
                           std::uint64_t staged = 10) {
    return place_gpus(what, {{7, staged}}, map, where).moves_of(what, what.tasks[0]);
}

bool is(const std::vector<GpuMove>& found, std::vector<std::pair<int, int>> wanted) {
    if (found.size() != wanted.size())
        return false;
    for (std::size_t i = 0; i < found.size(); ++i)
        if (found[i].from != gpu(wanted[i].first).uuid || found[i].to != gpu(wanted[i].second).uuid)
            return false;
    return true;
}

void refused(Errc code, const std::string& why, const Manifest& what, const DriverFacts& where,
             const Map& map = {}, std::uint64_t staged = 10) {
    try {
        moves(what, where, map, staged);
        CHECK(false && "nothing was thrown");
    } catch (const Error& e) {
        CHECK(e.code() == code);
        CHECK(std::string(e.what()).find(why) != std::string::npos);
    }
}

void the_same_machine_needs_no_moves() {
    CHECK(moves(manifest({gpu(1), gpu(2)}), machine({gpu(1), gpu(2)}), {}, 2000).empty());
    CHECK(moves(manifest({gpu(1)}), machine({gpu(3), gpu(1)})).empty());
}

void another_gpu_of_the_same_model_is_moved_to() {
    // All of them are listed, as the driver demands.
    CHECK(is(moves(manifest({gpu(1), gpu(2)}), machine({gpu(3), gpu(1)})), {{1, 1}, {2, 3}}));
}

void only_gpus_that_the_task_can_see_count() {
    const Manifest one_of_three =
        manifest({gpu(1), gpu(2), gpu(3, "model B")}, {{.gpu = 1, .memory_size = 10}});
    CHECK(is(moves(one_of_three, machine({gpu(8)})), {{2, 8}}));
    CHECK(moves(one_of_three, machine({gpu(2)})).empty());
    // Of two tasks each is told of its own.
    Manifest two = manifest({gpu(1), gpu(2)}, {{.gpu = 0, .memory_size = 10}});
    two.tasks.push_back({.pid = 9, .gpu_source = GpuSource::device_files, .gpus = {{.gpu = 1}}});
    const Placement placed = place_gpus(two, {}, {}, machine({gpu(1), gpu(8)}));
    CHECK(placed.moves_of(two, two.tasks[0]).empty());
    CHECK(is(placed.moves_of(two, two.tasks[1]), {{2, 8}}));
}

void a_process_that_sees_a_gpu_of_another_list_has_no_places() {
    ProcessGpus seen{GpuSource::nvml, {{gpu(2).uuid, 5}, {gpu(3).uuid, 0}}, ""};
    const std::vector<GpuInfo> listed = {gpu(1), gpu(2), gpu(3)};
    CHECK(places_of(seen, listed) == std::vector<TaskGpu>({{1, 5}, {2, 0}}));
    CHECK(places_of(seen, {gpu(1), gpu(2)}).empty());
    CHECK(seen.memory_size() == 5);
}

void memory_counts_for_each_gpu() {
    const Manifest what =
        manifest({gpu(1), gpu(2)}, {{.gpu = 0, .memory_size = 600}, {.gpu = 1, .memory_size = 0}});
    DriverFacts here = machine({gpu(1), gpu(2)});
    CHECK(moves(what, here).empty());
    (*here.gpus)[0].free_size = 599; // that the other has 1000 does not help
    refused(Errc::unsupported, uuid(1), what, here);
    (*here.gpus)[0].free_size = std::nullopt; // NVML cannot say: no refusal
    CHECK(moves(what, here).empty());

    // A GPU that is new gets what it has room for.
    DriverFacts elsewhere = machine({gpu(5), gpu(6)});
    (*elsewhere.gpus)[0].free_size = 599;
    CHECK(is(moves(what, elsewhere), {{1, 6}, {2, 5}}));
    // Without sizes by GPU, the sum counts.
    refused(Errc::unsupported, "free for it", manifest({gpu(1)}), machine({gpu(1)}), {}, 1001);
    Manifest files = what;
    files.tasks[0].gpu_source = GpuSource::device_files;
    files.tasks[0].gpus = {{.gpu = 0}};
    refused(Errc::unsupported, "free for it", files, machine({gpu(1)}), {}, 1001);
    CHECK(moves(files, machine({gpu(1)}), {}, 1000).empty());
}

void a_map_is_followed() {
    const Manifest what =
        manifest({gpu(1), gpu(2)}, {{.gpu = 0, .memory_size = 10}, {.gpu = 1, .memory_size = 10}});
    const DriverFacts here = machine({gpu(1), gpu(2), gpu(3)});
    CHECK(is(moves(what, here, {{"0", "2"}}), {{1, 3}, {2, 2}}));
    CHECK(is(moves(what, here, {{uuid(1), uuid(2)}, {"1", "0"}}), {{1, 2}, {2, 1}}));
    CHECK(moves(what, here, {{"0", uuid(1)}}).empty());
}

void a_map_that_cannot_hold_is_refused() {
    const Manifest what = manifest({gpu(1), gpu(2), gpu(9)},
                                   {{.gpu = 0, .memory_size = 500}, {.gpu = 1, .memory_size = 10}});
    DriverFacts here = machine({gpu(1), gpu(2), gpu(3), gpu(4, "model B")});
    const auto bad = [&](const std::string& why, const Map& map) {
        refused(Errc::bad_argument, why, what, here, map);
    };
    bad("the checkpoint has no GPU 3", {{"3", "0"}});
    bad("the checkpoint has no GPU " + uuid(7), {{uuid(7), "0"}});
    bad("no process of the checkpoint can see GPU 2", {{"2", "2"}});
    bad("this machine has no GPU 4", {{"0", "4"}});
    bad("this machine has no GPU " + uuid(7), {{"0", uuid(7)}});
    bad("the same model", {{"0", "3"}});
    bad("named twice", {{"0", "1"}, {uuid(1), "2"}});
    bad("goes to " + uuid(3) + " already", {{"0", "2"}, {"1", uuid(3)}});
    bad("name a place for it as well", {{"0", "1"}});
    (*here.gpus)[2].free_size = 499;
    refused(Errc::unsupported, "for " + uuid(3), what, here, {{"0", "2"}});
    here.gpus = std::nullopt;
    refused(Errc::unsupported, "without NVML", what, here, {{"0", "2"}});
    refused(Errc::unsupported, "does not say which GPUs", manifest({}), machine({gpu(1)}),
            {{"0", "0"}});
    Manifest old = what;
    old.driver_api_version = 12080;
    DriverFacts no_moves = machine({gpu(1), gpu(2), gpu(3)});
    no_moves.api_version = 12080;
    refused(Errc::unsupported, "580 or newer", old, no_moves, {{"0", "2"}});
}

void what_cannot_be_restored_is_refused() {
    refused(Errc::unsupported, "2 GPU(s), this machine has 1", manifest({gpu(1), gpu(2)}),
            machine({gpu(1)}));
    refused(Errc::unsupported, "model A", manifest({gpu(1)}), machine({gpu(2, "model B")}));
    DriverFacts older = machine({gpu(1)});
    older.api_version = 12090;
    refused(Errc::unsupported, "CUDA 13.0", manifest({gpu(1)}), older);
    // Two of the checkpoint's GPUs cannot both move onto the one that is left.
    refused(Errc::unsupported, "model A", manifest({gpu(1), gpu(2)}),
            machine({gpu(3), gpu(4, "model B")}));
    DriverFacts no_moves = machine({gpu(9)});
    no_moves.api_version = 12080;
    Manifest old = manifest({gpu(1)});
    old.driver_api_version = 12080;
    refused(Errc::unsupported, "580 or newer", old, no_moves);
}

// What the driver itself may still refuse is told; what it cannot be told to do is refused.
void what_is_lacking_can_be_ignored() {
    const Manifest what = manifest({gpu(1)}, {{.gpu = 0, .memory_size = 600}});
    DriverFacts here = machine({gpu(1)});
    here.api_version = 12090;
    (*here.gpus)[0].free_size = 500;
    const Placement placement = place_gpus(what, {{7, 600}}, {}, here, true);
    CHECK(placement.moves.size() == 1 && placement.ignored.size() == 2);
    CHECK(placement.ignored[0].find("CUDA 13.0") != std::string::npos);
    CHECK(placement.ignored[1].find("GPU memory for " + uuid(1)) != std::string::npos);
    CHECK(place_gpus(what, {{7, 600}}, {}, machine({gpu(1)}), true).ignored.empty());
    here.gpus = std::nullopt;
    CHECK(place_gpus(what, {{7, 600}}, {}, here, true).ignored.size() == 1);
    try {
        place_gpus(what, {{7, 600}}, {}, machine({gpu(2, "model B")}), true);
        CHECK(false && "nothing was thrown");
    } catch (const Error& e) {
        CHECK(e.code() == Errc::unsupported);
    }
}

void what_nvml_does_not_say_is_not_checked() {
    DriverFacts blind{false, 13000, "", std::nullopt};
    CHECK(moves(manifest({gpu(1)}), blind, {}, 1 << 30).empty());
    CHECK(moves(manifest({}), machine({gpu(1)}), {}, 1 << 30).empty());
}

void the_emulator_is_called_by_its_name() {
    DriverFacts facts = machine({gpu(1)});
    CHECK(std::string(facts.backend()) == "driver");
    facts.is_emulator = true;
    CHECK(std::string(facts.backend()) == "emulator");
}

} // namespace

int main() {
    the_same_machine_needs_no_moves();
    another_gpu_of_the_same_model_is_moved_to();
    only_gpus_that_the_task_can_see_count();
    a_process_that_sees_a_gpu_of_another_list_has_no_places();
    memory_counts_for_each_gpu();
    a_map_is_followed();
    a_map_that_cannot_hold_is_refused();
    what_cannot_be_restored_is_refused();
    what_is_lacking_can_be_ignored();
    what_nvml_does_not_say_is_not_checked();
    the_emulator_is_called_by_its_name();
}
