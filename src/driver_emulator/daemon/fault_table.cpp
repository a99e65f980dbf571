// SPDX-License-Identifier: Apache-2.0
#include "driver_emulator/daemon/fault_table.hpp"

#include <charconv>
#include <stdexcept>

namespace gpustasis::emulator {
namespace {

constexpr std::string_view kOperations[kOperationCount] = {
    "init", "get_state", "lock", "checkpoint", "restore", "unlock", "complete"};
constexpr std::string_view kActions[] = {
    "none",  "error", "hang",  "die",      "oom",   "failed", "fail_after", "hang_half",
    "state", "lie",   "twice", "nonsense", "wrong", "close",  "race",       "end_thread"};

unsigned parse_number(std::string_view word, std::string_view digits) {
    unsigned value = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (error != std::errc{} || end != digits.data() + digits.size() || value > 0x7fffffff) {
        throw std::invalid_argument("not a number: " + std::string(word));
    }
    return value;
}

} // namespace

unsigned FaultTable::add(const std::vector<std::string_view>& words) {
    if (words.size() < 2) {
        throw std::invalid_argument("a fault needs an operation and an action");
    }
    Fault fault{};
    fault.count = 1;
    fault.code = static_cast<int>(Result::operating_system);
    bool coded = false;
    fault.any = words[0] == "any";
    if (!fault.any) {
        unsigned index = 0;
        while (index < kOperationCount && kOperations[index] != words[0]) {
            ++index;
        }
        if (index == kOperationCount) {
            throw std::invalid_argument("no such operation: " + std::string(words[0]));
        }
        fault.operation = static_cast<Operation>(index);
    }
    fault.delay_only = words[1] == "delay";
    if (!fault.delay_only) {
        unsigned index = 1;
        while (index < std::size(kActions) && kActions[index] != words[1]) {
            ++index;
        }
        if (index == std::size(kActions)) {
            throw std::invalid_argument("no such action: " + std::string(words[1]));
        }
        fault.action = static_cast<FaultAction>(index);
    }
    for (std::size_t i = 2; i < words.size(); ++i) {
        const std::string_view word = words[i];
        const std::size_t equals = word.find('=');
        const std::string_view key = word.substr(0, equals);
        const unsigned value =
            parse_number(word, equals == word.npos ? "" : word.substr(equals + 1));
        if (key == "code") {
            fault.code = static_cast<int>(value);
            coded = true;
        } else if (key == "count") {
            fault.count = value;
        } else if (key == "delay_ms") {
            fault.delay_ms = value;
        } else if (key == "pid") {
            fault.pid = static_cast<pid_t>(value);
        } else {
            throw std::invalid_argument("no such part of a fault: " + std::string(word));
        }
    }
    if (fault.action == FaultAction::die && !coded) {
        fault.code = 0;
    }
    if (fault.action == FaultAction::race && (!coded || fault.any || words[0] != "init")) {
        throw std::invalid_argument("a race is one of init, and needs the pid of another as code");
    }
    if (fault.delay_only && fault.delay_ms == 0) {
        throw std::invalid_argument("a delay needs delay_ms");
    }
    fault.endless = fault.count == 0;
    fault.number = ++last_number_;
    faults_.push_back(fault);
    return fault.number;
}

void FaultTable::apply(Operation operation, pid_t pid, OperationPlan& plan) {
    if (operation == Operation::checkpoint) {
        std::erase_if(faults_, [pid](const Fault& fault) {
            return fault.action == FaultAction::race && fault.code == pid;
        });
    }
    for (auto fault = faults_.begin(); fault != faults_.end(); ++fault) {
        if ((!fault->any && fault->operation != operation) ||
            (fault->pid != 0 && fault->pid != pid)) {
            continue;
        }
        if (fault->action == FaultAction::race && operation == Operation::init) {
            plan.action = FaultAction::race; // asked again and again, until then
            return;
        }
        plan.delay_ms += fault->delay_ms;
        plan.action = fault->action;
        plan.code = fault->code;
        if (!fault->endless && --fault->count == 0) {
            faults_.erase(fault);
        }
        return;
    }
}

std::string FaultTable::json() const {
    std::string text = "[";
    for (const Fault& fault : faults_) {
        const auto action = fault.delay_only ? std::string_view("delay")
                                             : kActions[static_cast<unsigned>(fault.action)];
        text += text.size() > 1 ? ", " : "";
        text += "{\"number\": " + std::to_string(fault.number) + ", \"operation\": \"";
        text += fault.any ? "any" : kOperations[static_cast<unsigned>(fault.operation)];
        text += "\", \"action\": \"" + std::string(action) +
                "\", \"code\": " + std::to_string(fault.code) +
                ", \"count\": " + std::to_string(fault.count) +
                ", \"delay_ms\": " + std::to_string(fault.delay_ms) +
                ", \"pid\": " + std::to_string(fault.pid) + "}";
    }
    return text + "]";
}

} // namespace gpustasis::emulator
