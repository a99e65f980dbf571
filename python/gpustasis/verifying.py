# SPDX-License-Identifier: Apache-2.0
"""The command that has to succeed after a restore, before what was restored counts as back.

It is a list of words, run without a shell; what it is about reaches it in its environment.
"""

from __future__ import annotations

import os
import select
import shlex
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from gpustasis.errors import VerificationError

_POLL_S = 0.05
_GROUP_S = 10.0  # for the end of those that were killed
# Python ignores the first two; a supervisor may have inherited the others as ignored.
_DEFAULTS = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """words: a program and its arguments. seconds: after which it has failed."""

    words: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        return shlex.join(self.words)


def require_verified(
    check: Check, facts: Mapping[str, str], look: Callable[[], None] = lambda: None
) -> None:
    """Run the command, with `facts` added to this process's environment, and wait for its end.

    What it prints goes to stderr. It leads a session of its own, and nothing of its process group
    outlives it. look: called many times a second; what it raises ends the command.

    Raises VerificationError unless it ends in time with status 0.
    """
    words = check.words
    try:
        pid = os.posix_spawnp(
            words[0],
            list(words),
            {**os.environ, **facts},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, 2, 1),
            ],
            setsid=True,
            setsigmask=[],
            setsigdef=_DEFAULTS,
        )
    except (OSError, ValueError) as exc:  # ValueError: a word with a NUL
        text = exc.strerror if isinstance(exc, OSError) else exc
        raise VerificationError(f"cannot run {words[0]}: {text}") from exc
    end = time.monotonic() + check.seconds
    handle = os.pidfd_open(pid)
    try:
        while not select.select([handle], [], [], _POLL_S)[0]:
            look()
            if time.monotonic() >= end:
                raise VerificationError(f"`{check}` has not ended after {check.seconds:g} s")
    finally:
        try:
            status = _end_group(pid, handle)
        finally:
            os.close(handle)
    if status is None:  # as one that waits in the kernel for a disk or a GPU
        raise VerificationError(f"`{check}` was killed, and has not ended after {_GROUP_S:g} s")
    if status != 0:
        how = f"status {status}" if status > 0 else f"signal {-status}"
        raise VerificationError(f"`{check}` has ended with {how}")


def _end_group(leader: int, handle: int) -> int | None:
    """Kill what is left of the group; the leader's status; None: it does not end. Those that it has
    started come to this process, where that is a subreaper, and would be taken for a part of what
    was restored."""
    with suppress(ProcessLookupError):  # the leader was not collected yet: the group is its own
        os.killpg(leader, signal.SIGKILL)
    if not select.select([handle], [], [], _GROUP_S)[0]:
        return None
    status = os.waitstatus_to_exitcode(os.waitpid(leader, 0)[1])
    end = time.monotonic() + _GROUP_S
    while time.monotonic() < end:
        try:
            os.killpg(leader, 0)
        except (ProcessLookupError, PermissionError):  # of another user: its number was given anew
            break
        with suppress(ChildProcessError):
            os.waitpid(-leader, os.WNOHANG)
        time.sleep(_POLL_S / 10)
    return status
