// SPDX-License-Identifier: Apache-2.0
/// What this process has read, by the kernel's count.
#pragma once

#include "check.hpp"

#include <cstdint>
#include <fstream>
#include <string>

/// "syscr": calls of read() and the like. "rchar": bytes that they gave.
inline std::uint64_t own_reads(const std::string& key) {
    std::ifstream file("/proc/self/io");
    std::string name;
    for (std::uint64_t value = 0; file >> name >> value;)
        if (name == key + ":")
            return value;
    CHECK(false && "no such line in /proc/self/io");
    return 0;
}
