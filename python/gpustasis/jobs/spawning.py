# SPDX-License-Identifier: Apache-2.0
"""Starting a rank's command."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from gpustasis.errors import JobError
from gpustasis.jobs.ending import FORWARDED

_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW


def spawn(command: Sequence[str], environ: Mapping[str, str], log: Path) -> int:
    """In a session of its own, with nothing open but what it prints to, and with the signals as
    they are without a keeper. Its pid. Raises JobError."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with suppress(OSError):  # listdir's own
                os.set_inheritable(int(name), False)
    try:
        return os.posix_spawnp(
            command[0],
            list(command),
            environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(log), _APPEND, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
            setsigmask=(),
            setsigdef=FORWARDED,
        )
    except OSError as exc:
        raise JobError(f"cannot start {command[0]}: {exc.strerror}") from exc


def make_log(log: Path) -> None:
    """Have the file there that a command prints to, empty if it was not: CRIU opens it again, and
    takes what is only appended to at any size. Raises JobError."""
    try:
        os.close(os.open(log, _APPEND | os.O_CLOEXEC, 0o600))
    except OSError as exc:
        raise JobError(f"cannot make {log}: {exc.strerror}") from exc
