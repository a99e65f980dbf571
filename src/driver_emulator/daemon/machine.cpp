// SPDX-License-Identifier: Apache-2.0
#include "driver_emulator/daemon/machine.hpp"

#include <charconv>
#include <cstdio>
#include <cstring>
#include <random>
#include <stdexcept>

namespace gpustasis::emulator {
namespace {

constexpr std::uint64_t kMaxMemory = std::uint64_t{1} << 40;

[[noreturn]] void refuse(std::string_view what, std::string_view value) {
    throw std::invalid_argument(std::string(what) + ": " + std::string(value));
}

template <typename T>
T parse_number(std::string_view what, std::string_view text, T low, T high) {
    T value{};
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc{} || end != text.data() + text.size() || value < low || value > high) {
        throw std::invalid_argument(std::string(what) + " must be a number from " +
                                    std::to_string(low) + " to " + std::to_string(high) +
                                    ", not: " + std::string(text));
    }
    return value;
}

template <std::size_t N>
void copy_text(std::string_view what, std::string_view text, char (&to)[N]) {
    if (text.empty() || text.size() >= N || text.find_first_of("\"\\\n") != text.npos) {
        refuse(std::string(what) + " is empty, too long or has odd characters", text);
    }
    std::memset(to, 0, N);
    std::memcpy(to, text.data(), text.size());
}

Uuid parse_uuid(std::string_view text) {
    std::string_view digits = text.starts_with("GPU-") ? text.substr(4) : text;
    Uuid uuid{};
    unsigned count = 0;
    for (const char c : digits) {
        if (c == '-') {
            continue;
        }
        unsigned nibble = 0;
        const auto [end, error] = std::from_chars(&c, &c + 1, nibble, 16);
        if (error != std::errc{} || end != &c + 1 || count == 32) {
            refuse("not a GPU UUID", text);
        }
        uuid.bytes[count / 2] =
            static_cast<unsigned char>(unsigned{uuid.bytes[count / 2]} << 4 | nibble);
        ++count;
    }
    if (count != 32) {
        refuse("not a GPU UUID", text);
    }
    return uuid;
}

Uuid random_uuid() {
    std::random_device source;
    Uuid uuid{};
    for (unsigned char& byte : uuid.bytes) {
        byte = static_cast<unsigned char>(source());
    }
    return uuid;
}

int parse_api_version(std::string_view text) {
    const int version = parse_number<int>("--api", text, 12080, 13040);
    for (const int known : {12080, 13000, 13010, 13020, 13030, 13040}) {
        if (version == known) {
            return version;
        }
    }
    refuse("no such CUDA version is emulated (12080, 13000, 13010, 13020, 13030, 13040)", text);
}

std::uint32_t* find_number_knob(Machine& machine, std::string_view key) {
    struct Entry {
        std::string_view name;
        std::uint32_t* value;
    };
    const Entry entries[] = {
        {"persistence", &machine.info.persistence},
        {"cloexec", &machine.info.cloexec},
        {"desync", &machine.info.desync},
        {"init_ms", &machine.info.init_ms},
        {"nvml_processes", &machine.info.nvml_processes},
        {"nvml_memory", &machine.info.nvml_memory},
        {"managed_memory", &machine.info.managed_memory},
        {"nccl", &machine.info.nccl},
        {"cuda_ipc", &machine.info.cuda_ipc},
        {"undefined", &machine.times.undefined},
        {"staging", &machine.times.staging},
        {"lingering_ms", &machine.times.lingering_ms},
        {"leftovers", &machine.times.leftovers},
        {"gaps", &machine.times.gaps},
        {"delay_ms", &machine.times.delay_ms},
        {"lock_drain_ms", &machine.times.lock_drain_ms},
        {"d2h_ms_per_gib", &machine.times.d2h_ms_per_gib},
        {"h2d_ms_per_gib", &machine.times.h2d_ms_per_gib},
        {"direct_d2h_ms_per_gib", &machine.times.direct_d2h_ms_per_gib},
        {"direct_h2d_ms_per_gib", &machine.times.direct_h2d_ms_per_gib},
    };
    for (const Entry& entry : entries) {
        if (entry.name == key) {
            return entry.value;
        }
    }
    return nullptr;
}

} // namespace

std::string format_uuid(const Uuid& uuid) {
    std::string text = "GPU-";
    for (unsigned i = 0; i < 16; ++i) {
        char byte[3];
        std::snprintf(byte, sizeof byte, "%02x", uuid.bytes[i]);
        text += byte;
        if (i == 3 || i == 5 || i == 7 || i == 9) {
            text += '-';
        }
    }
    return text;
}

Machine parse_options(const std::vector<std::string_view>& arguments) {
    Machine machine;
    machine.info.magic = kWireMagic;
    machine.info.api_version = 13000;
    machine.info.cloexec = 1;
    machine.times.undefined = 1;
    machine.times.d2h_ms_per_gib = kD2hMsPerGib;
    machine.times.h2d_ms_per_gib = kH2dMsPerGib;
    machine.times.direct_d2h_ms_per_gib = kDirectD2hMsPerGib;
    machine.times.direct_h2d_ms_per_gib = kDirectH2dMsPerGib;
    copy_text("driver", "580.95.05", machine.info.driver_version);
    std::string_view name = "gpustasis emulated GPU";
    std::uint64_t memory = std::uint64_t{16} << 30;
    std::vector<Uuid> uuids;
    unsigned gpus = 1;
    for (std::size_t i = 0; i < arguments.size(); i += 2) {
        const std::string_view option = arguments[i];
        if (i + 1 == arguments.size()) {
            refuse("option without a value", option);
        }
        const std::string_view value = arguments[i + 1];
        if (option == "--socket") {
            machine.socket_path = value;
        } else if (option == "--ready-fd") {
            machine.ready_fd = parse_number<int>(option, value, 0, 1 << 20);
        } else if (option == "--gpus") {
            gpus = parse_number<unsigned>(option, value, 0, kMaxGpus);
        } else if (option == "--memory") {
            memory = parse_number<std::uint64_t>(option, value, kSegmentSize, kMaxMemory);
        } else if (option == "--uuid") {
            uuids.push_back(parse_uuid(value));
        } else if (option == "--api") {
            machine.info.api_version = parse_api_version(value);
        } else if (option == "--driver") {
            copy_text(option, value, machine.info.driver_version);
        } else if (option == "--name") {
            name = value;
        } else if (option == "--set") {
            const std::size_t equals = value.find('=');
            if (equals == value.npos) {
                refuse("--set wants KEY=VALUE", value);
            }
            set_knob(machine, value.substr(0, equals), value.substr(equals + 1));
        } else {
            refuse("unknown option", option);
        }
    }
    if (machine.socket_path.empty()) {
        throw std::invalid_argument("--socket is missing");
    }
    if (uuids.size() > gpus) {
        throw std::invalid_argument("more --uuid than --gpus");
    }
    machine.info.gpu_count = gpus;
    for (unsigned i = 0; i < gpus; ++i) {
        GpuInfo& gpu = machine.info.gpus[i];
        copy_text("--name", name, gpu.name);
        gpu.minor = i;
        gpu.memory = memory / kSegmentSize * kSegmentSize;
        gpu.uuid = i < uuids.size() ? uuids[i] : random_uuid();
    }
    return machine;
}

void set_knob(Machine& machine, std::string_view key, std::string_view value) {
    if (key == "device_path") {
        if (value == "auto") {
            std::memset(machine.info.device_path, 0, sizeof machine.info.device_path);
        } else {
            copy_text(key, value, machine.info.device_path);
        }
        return;
    }
    std::uint32_t* number = find_number_knob(machine, key);
    if (number == nullptr) {
        refuse("no such setting", key);
    }
    *number = parse_number<std::uint32_t>(key, value, 0, 3'600'000);
}

std::string knobs_json(const Machine& machine) {
    std::string text;
    Machine copy = machine;
    for (const char* key : {"persistence",
                            "cloexec",
                            "desync",
                            "init_ms",
                            "nvml_processes",
                            "nvml_memory",
                            "managed_memory",
                            "nccl",
                            "cuda_ipc",
                            "undefined",
                            "staging",
                            "lingering_ms",
                            "leftovers",
                            "gaps",
                            "delay_ms",
                            "lock_drain_ms",
                            "d2h_ms_per_gib",
                            "h2d_ms_per_gib",
                            "direct_d2h_ms_per_gib",
                            "direct_h2d_ms_per_gib"}) {
        text +=
            '"' + std::string(key) + "\": " + std::to_string(*find_number_knob(copy, key)) + ", ";
    }
    const bool automatic = machine.info.device_path[0] == '\0';
    return text + "\"device_path\": \"" +
           (automatic ? std::string("auto") : std::string(machine.info.device_path)) + '"';
}

} // namespace gpustasis::emulator
