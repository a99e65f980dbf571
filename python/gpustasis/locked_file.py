# SPDX-License-Identifier: Apache-2.0
"""What a program that looks after a job says of itself, in a file that it holds locked: to whoever
asks it for a checkpoint (`gpustasis preempt`), and to the next one."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from typing import Any

SUPERVISOR_NAME = "gpustasis-jit.lock"  # of `python -m gpustasis.jit`
KEEPER_NAME = "keeper"  # of `gpustasis job run`
_SIZE = 1 << 16  # bytes: always written whole, so that no part of an older text shows
_BECAUSE_LIMIT = 2000  # characters; with a path of the longest, and escapes, it fits


def tell(fd: int, facts: Mapping[str, object]) -> None:
    """What stands there from now on: all of it, in one step. because: if it is too long, its
    beginning. Raises OSError."""
    because = facts.get("because")
    if isinstance(because, str):
        facts = {**facts, "because": because[:_BECAUSE_LIMIT]}
    raw = json.dumps(facts).encode()
    if os.pwrite(fd, raw.ljust(_SIZE), 0) < _SIZE:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(fd, _SIZE)  # of what another program left there


def told(fd: int) -> dict[str, Any]:
    """Nothing if it is no such file."""
    try:
        found = json.loads(os.pread(fd, _SIZE, 0) or b"{}")
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
