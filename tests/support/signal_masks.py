# SPDX-License-Identifier: Apache-2.0
"""Which signals the driver's restore thread of a process blocks."""

from __future__ import annotations

import re

from campaigns.steady_job import restore_thread

NEVER_BLOCKED = 1 << 8 | 1 << 18  # SIGKILL, SIGSTOP, whatever the kernel is told
# As a thread has it that works for the plugin: src/tracee/ptrace.hpp.
ALL_BUT_SIGTRAP = ~(1 << 4) & (1 << 64) - 1
MASK_OF_DUMP = ALL_BUT_SIGTRAP & ~NEVER_BLOCKED


def blocked(pid: int) -> int:
    """By the restore thread of process `pid`."""
    thread = restore_thread(pid)
    assert thread is not None
    (line,) = re.findall(r"^SigBlk:\t(\w+)$", (thread / "status").read_text(), re.MULTILINE)
    return int(line, 16)
