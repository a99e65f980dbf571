// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"
#include "sample.hpp"

#include "core/container_id.hpp"
#include "cuda_plugin/policy.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <vector>

using namespace gpustasis;

namespace {

const std::string kA(64, 'a');
const std::string kB = std::string(32, '0') + std::string(32, 'b');
using Ids = std::vector<std::string>;

void names_of_every_engine_are_known() {
    for (const std::string& name :
         {"libpod-" + kA + ".scope", "libpod-" + kA, "libpod-payload-" + kA, kA,
          "cri-containerd-" + kA + ".scope", "crio-" + kA + ".scope", "docker-" + kA + ".scope",
          "kubepods-besteffort-pod1.slice:cri-containerd:" + kA}) {
        CHECK(container_ids("0::/machine.slice/" + name + "\n", "0::/\n") == Ids{kA});
        CHECK(container_ids("0::/machine.slice/" + name + "/container\n", "0::/\n") == Ids{kA});
        CHECK(container_ids("0::/" + name, "") == Ids{kA});
    }
    CHECK(container_ids("0::/kubepods/besteffort/pod1234/" + kA + "\n", "0::/\n") == Ids{kA});
}

void other_names_are_none() {
    for (const std::string& path : std::vector<std::string>{
             "", "system.slice/sshd.service", kA.substr(1), kA + "0", std::string(64, 'A'),
             std::string(64, 'g'), kA + kA, "libpod-" + kA.substr(32) + "-" + kA.substr(32)})
        CHECK(container_ids("0::/" + path + "\n", "0::/\n").empty());
    for (const char* text : {"", "\n", ":::", "0::", "no line of a cgroup file", "0::\n\n/\n"})
        CHECK(container_ids(text, text).empty());
    CHECK(container_ids(std::string("0::/\0", 5) + kA, "") == Ids{kA}); // no byte ends the text
}

void every_hierarchy_is_looked_at() {
    const std::string scope = "/libpod-" + kA + ".scope\n";
    CHECK(container_ids("4:memory:/\n3:cpu,cpuacct:" + scope + "1:name=systemd:" + scope + "0::/\n",
                        "4:memory:/\n1:name=systemd:/\n0::/\n") == Ids{kA});
    CHECK(container_ids("2:cpu:/" + kB + "\n1:memory:/" + kA + "\n", "") == (Ids{kB, kA}));
}

void what_a_container_makes_below_itself_does_not_count() {
    CHECK(container_ids("0::/libpod-" + kA + ".scope/" + kB + "\n", "0::/\n") == Ids{kA});
    CHECK(container_ids("0::/libpod-" + kA + ".scope/libpod_pod_" + kB + "/" + kB + "\n", "") ==
          Ids{kA});
}

void a_pod_of_podmans_does_not_count() {
    for (const std::string& pod :
         {"machine.slice/machine-libpod_pod_" + kB + ".slice",
          "user.slice/user-libpod_pod_" + kB + ".slice", "libpod_parent/" + kB})
        for (const std::string& name : {"libpod-" + kA + ".scope", "libpod-" + kA})
            CHECK(container_ids("0::/" + pod + "/" + name + "/container\n", "0::/\n") == Ids{kA});
    CHECK(container_ids("0::/libpod_parent/libpod-" + kA + "\n", "0::/\n") == Ids{kA});
}

void where_criu_is_too_does_not_count() {
    const std::string outer = "0::/docker/" + kB;
    CHECK(container_ids(outer + "/kubepods/" + kA + "\n", outer + "/system.slice\n") == Ids{kA});
    CHECK(container_ids(outer + "/" + kA + "\n", outer + "\n") == Ids{kA});
    CHECK(container_ids(outer + "\n", outer + "\n").empty());
    CHECK(container_ids(outer + "\n", outer + "/system.slice\n").empty());
    // Of another hierarchy criu's place says nothing.
    CHECK(container_ids(outer + "\n", "1:memory:/docker/" + kB + "\n") == Ids{kB});
}

/// A /run of the test's own.
class Run {
public:
    Run() {
        CHECK(::mkdir(at("gpustasis").c_str(), 0700) == 0);
        CHECK(::mkdir(at("gpustasis/policy").c_str(), 0700) == 0);
    }
    std::string at(const std::string& name) const { return directory_.path(name); }
    std::string file(const std::string& id = kA) const {
        return at("gpustasis/policy/" + id + ".toml");
    }
    std::string base() const {
        const std::string path = directory_.path();
        return path.substr(0, path.size() - 1);
    }
    void write(const std::string& text, const std::string& id = kA) const {
        ::unlink(file(id).c_str());
        std::ofstream(file(id)) << text;
        CHECK(::chmod(file(id).c_str(), 0600) == 0);
    }
    std::string apply(Config& config, const Ids& ids = {kA}) const {
        return PolicyDirectory(base()).apply(config, ids);
    }
    /// What it says when the policy cannot be used; the configuration is thrown away then.
    std::string refusal(const Ids& ids = {kA}) const {
        Config config;
        try {
            apply(config, ids);
        } catch (const Error& e) {
            return e.what();
        }
        CHECK(false && "nothing was thrown");
    }

private:
    sample::TempDir directory_;
};

std::string policy(const std::string& keys, const std::string& id = kA) {
    return keys + "\n[container]\nid = \"" + id +
           "\"\nkeep = 3\n[container.annotations]\n\"io.gpustasis.threads\" = \"3\"\n";
}

void keys_are_set_on_top_of_the_hosts() {
    const Run run;
    run.write(policy("compress = \"none\"\nthreads = 3\nlock_timeout_ms = 7\nincremental = true"));
    Config config;
    config.source = "host";
    config.parent = "/host/parent";
    config.max_chain = 9;
    CHECK(run.apply(config) == kA);
    CHECK(!config.compress && config.threads == 3 && config.lock_timeout_ms == 7);
    CHECK(config.incremental && config.parent.empty() && config.max_chain == 9);
    CHECK(config.source == "host, " + run.file());
    run.write(policy("parent = \"/other\"\nexternalize = true"));
    CHECK(run.apply(config) == kA);
    CHECK(config.parent == "/other" && !config.incremental);
    CHECK(config.cpu_memory == CpuMemory::criu);
    run.write(policy("cpu_memory = \"auto\"\nlayout = \"packed\""));
    CHECK(run.apply(config) == kA);
    CHECK(config.layout == Layout::packed);
    CHECK(config.cpu_memory == CpuMemory::automatic);
}

void no_policy_is_none() {
    const sample::TempDir nothing;
    Config config;
    config.source = "host";
    CHECK(PolicyDirectory(nothing.path()).apply(config, {kA}).empty());
    const Run run;
    CHECK(run.apply(config).empty());
    run.write(policy("threads = 3"));
    CHECK(run.apply(config, {}).empty());
    CHECK(run.apply(config, {kB}).empty());
    CHECK(config.threads == 0 && config.source == "host");
    CHECK(run.apply(config, {kB, kA}) == kA);
}

void a_bad_policy_is_named() {
    const Run run;
    for (const std::string& text :
         {std::string(), std::string("threads = 3"), policy("threads = -1"), policy("thread = 3"),
          policy("driver = \"/tmp/libcuda.so\""), policy("nvml = \"/x\""),
          policy("io = \"direct\""), policy("max_chain = 1"), policy("threads = 3", kB),
          policy("threads ="), policy("compress = \"zstd\""), policy("cpu_memory = \"ours \""),
          policy("# " + std::string(70'000, 'x')), std::string(1, '\0'),
          std::string("container = 1"), std::string("[container]\nid = 1"),
          "x = " + std::string(60'000, '[')}) {
        run.write(text);
        CHECK(run.refusal().find(run.file()) != std::string::npos);
    }
    run.write(policy(""), kA);
    run.write(policy("", kB), kB);
    CHECK(run.refusal({kA, kB}).find("both containers") != std::string::npos);
}

void what_others_could_write_is_not_believed() {
    const Run run;
    const auto refused_for = [&](const std::string& path, const std::string& why) {
        const std::string text = run.refusal();
        return text.find(path) != std::string::npos && text.find(why) != std::string::npos;
    };
    run.write(policy(""));
    for (const mode_t mode : {0620U, 0602U, 0666U}) {
        CHECK(::chmod(run.file().c_str(), mode) == 0);
        CHECK(refused_for(run.file(), "others can write"));
    }
    CHECK(::chmod(run.file().c_str(), 0644) == 0);
    for (const char* name : {"gpustasis", "gpustasis/policy"}) {
        CHECK(::chmod(run.at(name).c_str(), 0770) == 0);
        CHECK(refused_for(run.at(name), "others can write"));
        CHECK(::chmod(run.at(name).c_str(), 0700) == 0);
    }
    if (::geteuid() == 0) {
        CHECK(::chown(run.file().c_str(), 1, 1) == 0);
        CHECK(refused_for(run.file(), "belongs to user 1"));
    }
}

void only_a_regular_file_is_read() {
    const Run run;
    run.write(policy(""), kB);
    CHECK(::symlink(run.file(kB).c_str(), run.file().c_str()) == 0);
    CHECK(run.refusal().find("symbolic link") != std::string::npos);
    ::unlink(run.file().c_str());
    CHECK(::mkfifo(run.file().c_str(), 0600) == 0);
    CHECK(run.refusal().find("no regular file") != std::string::npos);
    ::unlink(run.file().c_str());
    CHECK(::mkdir(run.file().c_str(), 0700) == 0);
    CHECK(run.refusal().find("no regular file") != std::string::npos);
    const std::string policies = run.at("gpustasis/policy");
    CHECK(::rename(policies.c_str(), run.at("elsewhere").c_str()) == 0);
    CHECK(::symlink(run.at("elsewhere").c_str(), policies.c_str()) == 0);
    CHECK(run.refusal().find(policies) != std::string::npos);
}

void a_mark_is_left() {
    const Run run;
    PolicyDirectory(run.base()).mark_checkpointed(kA);
    PolicyDirectory(run.base()).mark_checkpointed(kA);
    CHECK(::access(run.at("gpustasis/policy/" + kA + ".checkpointed").c_str(), F_OK) == 0);
}

} // namespace

int main() {
    names_of_every_engine_are_known();
    other_names_are_none();
    every_hierarchy_is_looked_at();
    what_a_container_makes_below_itself_does_not_count();
    a_pod_of_podmans_does_not_count();
    where_criu_is_too_does_not_count();
    keys_are_set_on_top_of_the_hosts();
    no_policy_is_none();
    a_bad_policy_is_named();
    what_others_could_write_is_not_believed();
    only_a_regular_file_is_read();
    a_mark_is_left();
}
