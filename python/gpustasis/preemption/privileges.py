# SPDX-License-Identifier: Apache-2.0
"""What a supervisor needs of the kernel's privileges, said before a job runs for days."""

from __future__ import annotations

import os
from pathlib import Path

from gpustasis.errors import UnsupportedError

# linux/capability.h. The kernel takes CAP_SYS_ADMIN where it asks for CAP_CHECKPOINT_RESTORE.
_NEEDED = {
    12: "CAP_NET_ADMIN",  # open connections
    19: "CAP_SYS_PTRACE",
    21: "CAP_SYS_ADMIN",  # the file system in memory that a packed checkpoint is made in
}
_STATUS = Path("/proc/self/status")


def require_privileges(user: int, capabilities: int) -> None:
    """user: the effective one; capabilities: the effective ones, a bit for each. Raises
    UnsupportedError that says what is missing."""
    missing = [name for number, name in _NEEDED.items() if not capabilities >> number & 1]
    if user != 0 or missing:
        lacks = ", which lacks " + ", ".join(missing) if missing else ""
        raise UnsupportedError(
            f"a job is checkpointed by root, and this is user {user}{lacks}; run gpustasis.jit as "
            "root, with the capabilities that docs/just-in-time.md names"
        )


def own_privileges() -> tuple[int, int]:
    """User and capabilities of this process."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith("CapEff:"):
            return os.geteuid(), int(line.split()[1], 16)
    raise UnsupportedError(f"{_STATUS} names no capabilities")
