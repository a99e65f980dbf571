// SPDX-License-Identifier: Apache-2.0
/// The faults that were asked for, and which operation meets which.
#pragma once

#include "driver_emulator/wire.hpp"

#include <string>
#include <string_view>
#include <sys/types.h>
#include <vector>

namespace gpustasis::emulator {

class FaultTable {
public:
    /// Adds a fault described by words: "OP ACTION [code=N] [count=N] [delay_ms=N] [pid=P]". OP is
    /// an operation's name or "any"; count 0 means every time; pid as the daemon sees it, 0 = any.
    /// Throws std::invalid_argument. Returns the fault's number.
    unsigned add(const std::vector<std::string_view>& words);

    void clear() noexcept { faults_.clear(); }

    /// Writes the first fault that matches into `plan`, and counts it.
    void apply(Operation operation, pid_t pid, OperationPlan& plan);

    /// A JSON array.
    [[nodiscard]] std::string json() const;

private:
    struct Fault {
        unsigned number;
        bool any;
        Operation operation; ///< unless `any`
        bool delay_only;
        FaultAction action;
        int code;
        unsigned count;
        bool endless;
        unsigned delay_ms;
        pid_t pid;
    };
    std::vector<Fault> faults_;
    unsigned last_number_ = 0;
};

} // namespace gpustasis::emulator
