#include "check.hpp"

#include "cuda_plugin/worker.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <string>

using namespace gpustasis;

namespace {

// What a worker does with a driver is tested with the emulator; here it has none.
void a_missing_driver_is_an_error_that_names_it() {
    Config config;
    config.driver = "/nonexistent/libcuda.so.1";
    SharedTaskTable table(OnOrphaned::undo);
    const UniqueFd dir(::open("/tmp", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    Lineage lineage(dir.get());
    Worker worker(config, table, lineage);
    for (int again = 0; again < 2; ++again) {
        try {
            worker.api_version();
            CHECK(false && "nothing was thrown");
        } catch (const Error& e) {
            CHECK(e.code() == Errc::unsupported);
            CHECK(std::string(e.what()).find(config.driver) != std::string::npos);
        }
    }
    worker.stop();
    worker.stop(); // no worker is left to be stopped, and that is fine
}

void records_are_found_by_pid() {
    SharedTaskTable table(OnOrphaned::kill);
    CHECK(table->on_orphaned == OnOrphaned::kill);
    table.add(5).restore_tid = 6;
    table.add(7);
    CHECK(table.find(5)->restore_tid == 6 && table.find(7) != nullptr);
    CHECK(table.find(6) == nullptr);
}

} // namespace

int main() {
    a_missing_driver_is_an_error_that_names_it();
    records_are_found_by_pid();
}
