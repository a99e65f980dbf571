// SPDX-License-Identifier: Apache-2.0
/// What every API call passes through, and what Lock closes.
#pragma once

#include <atomic>
#include <cstdint>

namespace gpustasis::emulator {

/// Calls that arrive while it is closed wait; they never fail. All state is in two words, so a gate
/// that was closed when the process was checkpointed is closed, with the same waiters, after it was
/// restored.
class Gate {
public:
    /// Waits until the gate is open, then counts the caller in.
    void enter() noexcept;
    void leave() noexcept;

    /// Keeps new calls out. The caller then waits for is_empty().
    void close() noexcept { closed_.store(1); }
    void open() noexcept;

    [[nodiscard]] bool is_empty() const noexcept { return inside_.load() == 0; }

    /// Sleeps until somebody leaves, or 10 ms.
    void wait_for_leave() noexcept;

private:
    std::atomic<std::uint32_t> inside_{0};
    std::atomic<std::uint32_t> closed_{0};
};

/// One call's stay behind the gate.
class GatePass {
public:
    explicit GatePass(Gate& gate) noexcept : gate_(gate) { gate_.enter(); }
    ~GatePass() { gate_.leave(); }
    GatePass(const GatePass&) = delete;
    GatePass& operator=(const GatePass&) = delete;

private:
    Gate& gate_;
};

} // namespace gpustasis::emulator
