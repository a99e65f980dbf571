// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"

#include "cuda_plugin/config.hpp"

#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>

using namespace gpustasis;

namespace {

std::string path;

Config read(const std::string& text) {
    std::ofstream(path) << text;
    return read_config(path);
}

void every_key_is_taken() {
    const Config config =
        read("externalize = \"off\"\ncompress = \"none\"\nthreads = 3\n"
             "chunk_size = 65536\nlock_timeout_ms = 5\ndriver_timeout_ms = 6\nparallel_gpus = 7\n"
             "driver = \"/x/libcuda.so.1\"\nnvml = \"/x/nvml.so\"\n"
             "io = \"direct\"\nhuge_pages = false\nparent = \"../a\"\n"
             "max_chain = 8\nincremental = true\nfound_locked = \"dump\"\nguard = \"require\"\n"
             "parent_check = \"data\"\n"
             "gpu_map = [\"0=GPU-01234567-89ab-cdef-0123-456789abcdef\", \"1=3\"]\n"
             "risk = [\"nccl\", \"memory\"]\nrequirements = \"ignore\"\n");
    CHECK(config.gpu_map.size() == 2 && config.gpu_map[0].from == "0");
    CHECK(config.gpu_map[0].to == "GPU-01234567-89ab-cdef-0123-456789abcdef");
    CHECK(config.gpu_map[1].from == "1" && config.gpu_map[1].to == "3");
    CHECK(config.risk == std::vector<std::string>({"nccl", "memory"}));
    CHECK(!config.externalize && !config.compress && config.threads == 3);
    CHECK(config.chunk_size == 65536 && config.lock_timeout_ms == 5);
    CHECK(config.parallel_gpus == 7 && read("").parallel_gpus == 0);
    CHECK(config.driver_timeout_ms == 6 && config.driver == "/x/libcuda.so.1");
    CHECK(config.nvml == "/x/nvml.so" && config.source == path);
    CHECK(config.io == IoMode::direct && config.huge_pages == HugePages::off);
    CHECK(config.parent == "../a" && config.max_chain == 8 && config.incremental &&
          config.dump_locked);
    CHECK(config.check_parent && !read("parent_check = \"index\"").check_parent);
    CHECK(config.require_guard);
    CHECK(config.ignore_requirements);
    CHECK(!read("requirements = \"check\"").ignore_requirements);
    CHECK(!read("").ignore_requirements);
    CHECK(read("huge_pages = \"on\"").huge_pages == HugePages::on);
    CHECK(read("huge_pages = \"auto\"").huge_pages == HugePages::automatic);
    CHECK(read("io = \"auto\"").io == IoMode::automatic);
    CHECK(read("io = \"buffered\"").io == IoMode::buffered);
    CHECK(read("").staging == Staging::drop);
    CHECK(read("staging = \"drop\"").staging == Staging::drop);
    CHECK(read("staging = \"keep\"").staging == Staging::keep);
    CHECK(read("staging = \"auto\"").staging == Staging::automatic);
    CHECK(read("").cpu_memory == CpuMemory::criu);
    CHECK(read("cpu_memory = \"criu\"").cpu_memory == CpuMemory::criu);
    CHECK(read("cpu_memory = \"ours\"").cpu_memory == CpuMemory::ours);
    CHECK(read("cpu_memory = \"auto\"").cpu_memory == CpuMemory::automatic);
    CHECK(!read("").is_packed() && read("layout = \"criu\"").layout == Layout::criu);
    // What is sealed is sealed as a whole, unless somebody says that it need not be.
    const std::string sealed = "recipients = [\"/me.pem\"]\n";
    CHECK(read(sealed).is_packed() && !read(sealed + "layout = \"criu\"").is_packed());
    CHECK(!read(sealed + "risk = [\"clear-images\"]").is_packed());
    CHECK(read("layout = \"packed\"").layout == Layout::packed);
}

void memory_first() {
    const Config config = read("tier = \"ram\"\narena = \"/run/x\"\narena_limit = 8589934592\n"
                               "arena_pool = 3\nwhen_full = \"wait\"\nwhen_full_timeout_s = 5\n");
    CHECK(config.arena.is_used && config.arena.path == "/run/x" && config.arena.pool == 3);
    CHECK(config.arena.limit == 8589934592 && config.arena.waits && config.arena.wait_s == 5);
    CHECK(!read("").arena.is_used && !read("tier = \"disk\"").arena.is_used);
    CHECK(read("").arena.path == "/run/gpustasis/arena" && read("").arena.limit == 0);
    CHECK(!read("when_full = \"refuse\"").arena.waits);
}

void an_empty_file_is_the_defaults() {
    const Config config = read("");
    CHECK(config.externalize && config.compress && config.threads == 0);
    CHECK(config.driver == "libcuda.so.1");
}

void bad_values_are_named() {
    for (const char* text : {"threads = -1",
                             "threads = 1025",
                             "threads = \"two\"",
                             "chunk_size = 5000",
                             "chunk_size = 1024",
                             "externalize = 1",
                             "externalize = \"yes\"",
                             "compress = \"zstd\"",
                             "cpu_memory = \"Ours\"",
                             "cpu_memory = \"\"",
                             "cpu_memory = true",
                             "layout = \"Packed\"",
                             "layout = 1",
                             "tier = \"memory\"",
                             "tier = true",
                             "arena = \"run/x\"",
                             "arena = \"\"",
                             "arena_limit = -1",
                             "arena_pool = \"much\"",
                             "when_full = \"never\"",
                             "when_full_timeout_s = 0",
                             "when_full_timeout_s = 86401",
                             "io = \"mmap\"",
                             "io = 1",
                             "huge_pages = \"maybe\"",
                             "staging = \"hide\"",
                             "staging = true",
                             "parent = \"\"",
                             "parent_check = \"all\"",
                             "parent_check = true",
                             "max_chain = 0",
                             "found_locked = \"yes\"",
                             "guard = true",
                             "max_chain = 65536",
                             "incremental = 1",
                             "lock_timeout_ms = 0",
                             "parallel_gpus = 257",
                             "parallel_gpus = -1",
                             "gpu_map = [\"0\"]",
                             "gpu_map = [\"0=\"]",
                             "gpu_map = [\"0=GPU-12\"]",
                             "gpu_map = [\"-1=0\"]",
                             "gpu_map = [0]",
                             "gpu_map = 0",
                             "risk = [\"everything\"]",
                             "risk = true",
                             "requirements = \"yes\"",
                             "requirements = false",
                             "driver = \"\"",
                             "thread = 1",
                             "[threads]",
                             "threads ="}) {
        try {
            read(text);
            CHECK(false && "nothing was thrown");
        } catch (const Error& e) {
            CHECK(e.code() == Errc::bad_argument);
            CHECK(std::string(e.what()).find(path) == 0);
        }
    }
}

void a_file_that_was_named_must_be_there() {
    CHECK_THROWS(Errc::io, read_config("/nonexistent/config.toml"));
    ::setenv("GPUSTASIS_CONFIG", "/nonexistent/config.toml", 1);
    CHECK_THROWS(Errc::io, find_config({}));
    read("threads = 7");
    ::setenv("GPUSTASIS_CONFIG", path.c_str(), 1);
    CHECK(find_config({}).threads == 7 && find_config({}).source == path);
}

void of_parent_and_incremental_the_later_holds() {
    Config config = read("parent = \"/a\"\nthreads = 2");
    std::ofstream(path) << "incremental = true";
    set_from_file(config, path);
    CHECK(config.incremental && config.parent.empty() && config.threads == 2);
    CHECK(config.source == path + ", " + path);
    set_options(config, {{"parent", "/b"}});
    CHECK(!config.incremental && config.parent == "/b");
    set_options(config, {{"incremental", "true"}});
    CHECK(config.incremental && config.parent.empty());
    set_options(config, {{"cpu_memory", "ours"}});
    CHECK(config.cpu_memory == CpuMemory::ours);
}

void a_policy_has_its_place_in_the_order() {
    const auto policy = [](Config& config) {
        CHECK(config.threads == 0); // what is named for this run comes later
        config.threads = 2;
        config.lock_timeout_ms = 4;
        config.compress = false;
        config.incremental = true;
    };
    read("threads = 7\ncompress = \"lz4\"");
    const std::string overrides = path + ".overrides";
    std::ofstream(overrides) << "threads = 8\nparent = \"/p\"";
    ::unsetenv("GPUSTASIS_CONFIG");
    ::setenv("GPUSTASIS_OVERRIDES", overrides.c_str(), 1);
    Config config = find_config({}, policy);
    CHECK(config.threads == 8 && config.lock_timeout_ms == 4 && !config.compress);
    CHECK(config.parent == "/p" && !config.incremental);
    CHECK(config.source.ends_with(", " + overrides));
    config = find_config({{"config", path}, {"threads", "9"}}, policy);
    CHECK(config.threads == 9 && config.lock_timeout_ms == 4 && config.compress);
    CHECK(config.source == "defaults, " + path + ", " + overrides);
    ::setenv("GPUSTASIS_OVERRIDES", "/nonexistent", 1);
    CHECK_THROWS(Errc::io, find_config({}));
    ::unsetenv("GPUSTASIS_OVERRIDES");
    ::unlink(overrides.c_str());
}

void options_of_criu_win_over_the_file() {
    ::unsetenv("GPUSTASIS_CONFIG");
    read("threads = 7\nlock_timeout_ms = 9");
    const Config config = find_config({{"config", path}, {"threads", "3"}, {"externalize", "off"}});
    CHECK(config.threads == 3 && !config.externalize && config.lock_timeout_ms == 9);
    const Config lists = find_config({{"gpu_map", "0=1,1=0"}, {"risk", "ipc,memory"}});
    CHECK(lists.gpu_map.size() == 2 && lists.gpu_map[1].from == "1" && lists.gpu_map[1].to == "0");
    CHECK(lists.risk == std::vector<std::string>({"ipc", "memory"}));
    CHECK_THROWS(Errc::bad_argument, find_config({{"threads", "many"}}));
    CHECK_THROWS(Errc::bad_argument, find_config({{"thread", "3"}}));
    CHECK_THROWS(Errc::io, find_config({{"config", "/nonexistent"}}));
}

} // namespace

int main() {
    char name[] = "/tmp/gpustasis-config-XXXXXX";
    CHECK(::mkstemp(name) >= 0);
    path = name;
    every_key_is_taken();
    memory_first();
    an_empty_file_is_the_defaults();
    bad_values_are_named();
    a_file_that_was_named_must_be_there();
    of_parent_and_incremental_the_later_holds();
    options_of_criu_win_over_the_file();
    a_policy_has_its_place_in_the_order();
    ::unlink(name);
}
