# SPDX-License-Identifier: Apache-2.0
"""Have a supervisor checkpoint its job, from outside: `gpustasis preempt`."""

from __future__ import annotations

import os
import select
import signal
from dataclasses import dataclass
from pathlib import Path

from gpustasis.errors import CheckpointError
from gpustasis.preemption.store import LOCK_NAME, read_state

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """supervisor: its pid. checkpoint: where it is, in the supervisor's file system; "": there is
    none, for the reason `because`."""

    supervisor: int
    checkpoint: str
    because: str


def preempt(pid: int, timeout_s: float) -> Answer:
    """Tell the supervisor that is process `pid`, or above it, to checkpoint its job now; wait until
    it has ended.

    Raises CheckpointError if there is none, or it has not ended in time: it is still at it then.
    """
    supervisor, handle, state = _find_supervisor(pid)
    try:
        try:
            signal.pidfd_send_signal(handle, signal.SIGTERM)
            if not select.select([handle], [], [], timeout_s)[0]:
                raise CheckpointError(
                    f"supervisor {supervisor} has not ended in {timeout_s:g} s; it is still at work"
                )
        finally:
            os.close(handle)
        said = read_state(state)
    except ProcessLookupError as exc:
        raise CheckpointError(f"supervisor {supervisor} ended before it was asked") from exc
    except PermissionError as exc:
        raise CheckpointError(f"supervisor {supervisor} belongs to another user") from exc
    finally:
        os.close(state)
    checkpoint, because = said.get("checkpoint"), said.get("because")
    return Answer(
        supervisor=supervisor,
        checkpoint=checkpoint if isinstance(checkpoint, str) else "",
        because=because if isinstance(because, str) else "it was killed, or says nothing",
    )


def _find_supervisor(pid: int) -> tuple[int, int, int]:
    """Its pid, a pidfd of it, and a descriptor of its lock file."""
    at = pid
    while at > 0:
        try:
            handle = os.pidfd_open(at)  # before the look: of what was looked at, and no later one
        except ProcessLookupError as exc:
            raise CheckpointError(f"there is no process {at}") from exc
        except OSError as exc:
            raise CheckpointError(f"{at} is no process, but a thread of one") from exc
        try:
            state = _lock_of(at)
            above = 0 if state is not None else _parent(at)
        except BaseException:
            os.close(handle)
            raise
        if state is not None:
            return at, handle, state
        os.close(handle)
        at = above
    raise CheckpointError(
        f"process {pid} runs under no `python -m gpustasis.jit`; `gpustasis checkpoint` dumps any "
        "process tree"
    )


def _lock_of(pid: int) -> int | None:
    """What is told there has to name this very process: other programs may have the file open."""
    try:
        entries = list((_PROC / str(pid) / "fd").iterdir())
    except OSError:
        return None
    for entry in entries:
        try:
            if os.path.basename(os.readlink(entry)) != LOCK_NAME:
                continue
            found = os.open(entry, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            continue
        if read_state(found).get("supervisor") in (pid, _inner_pid(pid)):
            return found
        os.close(found)
    return None


def _status(pid: int, name: str) -> str:
    try:
        text = (_PROC / str(pid) / "status").read_text(errors="replace")
    except OSError as exc:
        raise CheckpointError(f"there is no process {pid}") from exc
    values = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return values.get(name, "0")


def _parent(pid: int) -> int:
    return int(_status(pid, "PPid"))


def _inner_pid(pid: int) -> int:
    """In its own pid namespace: that of a container has other numbers."""
    return int(_status(pid, "NSpid").split()[-1])
