#include "check.hpp"

#include "cuda_plugin/driver_facts.hpp"

using namespace gpustasis;

namespace {

GpuInfo gpu(int number, const char* name = "model A") {
    GpuInfo info;
    info.uuid[0] = static_cast<std::byte>(number);
    info.name = name;
    info.memory_size = 1000;
    return info;
}

Manifest manifest(std::vector<GpuInfo> gpus) {
    Manifest made;
    made.driver_api_version = 13000;
    made.gpus = std::move(gpus);
    return made;
}

DriverFacts machine(const std::vector<GpuInfo>& gpus, std::uint64_t free_size = 1000) {
    DriverFacts facts{false, 13000, "580.1", std::vector<GpuStatus>{}};
    for (const GpuInfo& info : gpus)
        facts.gpus->push_back({info, free_size});
    return facts;
}

void the_same_machine_needs_no_moves() {
    CHECK(require_restorable(manifest({gpu(1), gpu(2)}), 2000, machine({gpu(1), gpu(2)})).empty());
    CHECK(require_restorable(manifest({gpu(1)}), 10, machine({gpu(3), gpu(1)})).empty());
}

void another_gpu_of_the_same_model_is_moved_to() {
    const auto moves =
        require_restorable(manifest({gpu(1), gpu(2)}), 10, machine({gpu(3), gpu(1)}));
    CHECK(moves.size() == 2); // all of them, as the driver demands
    CHECK(moves[0].from == gpu(1).uuid && moves[0].to == gpu(1).uuid);
    CHECK(moves[1].from == gpu(2).uuid && moves[1].to == gpu(3).uuid);
}

void what_cannot_be_restored_is_refused() {
    const auto refuse = [](const Manifest& what, std::uint64_t staged, const DriverFacts& where) {
        CHECK_THROWS(Errc::unsupported, require_restorable(what, staged, where));
    };
    refuse(manifest({gpu(1), gpu(2)}), 10, machine({gpu(1)}));
    refuse(manifest({gpu(1)}), 1001, machine({gpu(1)}));
    refuse(manifest({gpu(1)}), 10, machine({gpu(2, "model B")}));
    DriverFacts older = machine({gpu(1)});
    older.api_version = 12090;
    refuse(manifest({gpu(1)}), 10, older);
    // Two of the checkpoint's GPUs cannot both move onto the one that is left.
    refuse(manifest({gpu(1), gpu(2)}), 10, machine({gpu(3), gpu(4, "model B")}));
    DriverFacts no_moves = machine({gpu(9)});
    no_moves.api_version = 12080;
    Manifest old = manifest({gpu(1)});
    old.driver_api_version = 12080;
    refuse(old, 10, no_moves);
}

void what_nvml_does_not_say_is_not_checked() {
    DriverFacts blind{false, 13000, "", std::nullopt};
    CHECK(require_restorable(manifest({gpu(1)}), 1 << 30, blind).empty());
    CHECK(require_restorable(manifest({}), 1 << 30, machine({gpu(1)})).empty());
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
    what_cannot_be_restored_is_refused();
    what_nvml_does_not_say_is_not_checked();
    the_emulator_is_called_by_its_name();
}
