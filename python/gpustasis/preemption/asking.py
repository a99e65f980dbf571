# SPDX-License-Identifier: Apache-2.0
"""Have a supervisor, or the keeper of a rank, checkpoint its job, from outside: `gpustasis
preempt`."""

from __future__ import annotations

import os
import select
import signal
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpustasis.errors import CheckpointError
from gpustasis.locked_file import KEEPER_NAME, SUPERVISOR_NAME, told

_PROC = Path("/proc")
_LOOK_S = 0.1
_NAMES = {SUPERVISOR_NAME: "supervisor", KEEPER_NAME: "keeper"}
_SILENT = "it was killed, or says nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """supervisor: its pid, or that of the keeper. checkpoint: where it is, in the supervisor's file
    system; "": there is none, for the reason `because`. keeper: it was one of a rank's."""

    supervisor: int
    checkpoint: str
    because: str
    keeper: bool = False


@dataclass(slots=True)
class _Found:
    """A supervisor, or a keeper. handle: a pidfd. lock: a descriptor of the file that it holds
    locked. name: which of the two it is, and the key under which it says its number. numbers: that
    it has, here and in its own pid namespace."""

    pid: int
    handle: int
    lock: int
    name: str
    numbers: tuple[int, ...]

    @property
    def is_keeper(self) -> bool:
        return self.name == "keeper"

    def told(self) -> dict[str, Any]:
        """What it says now; nothing if it does not say it of itself."""
        found = told(self.lock)
        return found if found.get(self.name) in self.numbers else {}

    def has_ended(self, timeout_s: float) -> bool:
        """By then."""
        return bool(select.select([self.handle], [], [], max(timeout_s, 0))[0])

    def close(self) -> None:
        os.close(self.handle)
        os.close(self.lock)


def preempt(pid: int, timeout_s: float) -> Answer:
    """Tell the supervisor or keeper that is process `pid`, or above it, to checkpoint its job now;
    wait until it has ended, or, of a keeper, until there is no checkpoint.

    Raises CheckpointError if there is none, or it has not ended in time: it is still at it then;
    also for a keeper that would not checkpoint its job: it is not told anything.
    """
    found = _find(pid)
    what = f"{'keeper' if found.is_keeper else 'supervisor'} {found.pid}"
    end = time.monotonic() + timeout_s
    try:
        if found.is_keeper:
            _require_listening(found, what, end)
        signal.pidfd_send_signal(found.handle, signal.SIGTERM)
        while not found.has_ended(min(_LOOK_S, end - time.monotonic())):
            if found.is_keeper and found.told().get("gave_up") is True:
                break  # its tasks were told to end, and may take as long as they like
            if time.monotonic() >= end:
                raise CheckpointError(
                    f"{what} has not ended in {timeout_s:g} s; it is still at work"
                )
        said = found.told() if found.is_keeper else told(found.lock)
    except ProcessLookupError as exc:
        raise CheckpointError(f"{what} ended before it was asked") from exc
    except PermissionError as exc:
        raise CheckpointError(f"{what} belongs to another user") from exc
    finally:
        found.close()
    checkpoint, because = said.get("checkpoint"), said.get("because")
    return Answer(
        supervisor=found.pid,
        checkpoint=checkpoint if isinstance(checkpoint, str) else "",
        because=because if isinstance(because, str) else _SILENT,
        keeper=found.is_keeper,
    )


def _require_listening(found: _Found, what: str, end: float) -> None:
    """A keeper that has just begun would die of the signal: wait until it does not. Raises
    CheckpointError."""
    while True:
        said = found.told()
        if found.has_ended(0) or not said:
            raise CheckpointError(f"{what} ended before it was asked")
        if said.get("preemptible") is not True:
            raise CheckpointError(
                f"{what} of a job's rank was started without --checkpoint-on-sigterm, and would "
                "pass the signal on: it was told nothing; `gpustasis job checkpoint` makes a "
                "checkpoint"
            )
        if said.get("listens") is True:
            return
        if time.monotonic() >= end:
            raise CheckpointError(f"{what} is not ready yet: it was told nothing")
        time.sleep(_LOOK_S)


def _find(pid: int) -> _Found:
    at = pid
    while at > 0:
        try:
            handle = os.pidfd_open(at)  # before the look: of what was looked at, and no later one
        except ProcessLookupError as exc:
            raise CheckpointError(f"there is no process {at}") from exc
        except OSError as exc:
            raise CheckpointError(f"{at} is no process, but a thread of one") from exc
        try:
            lock = _lock_of(at)
            above = 0 if lock is not None else _parent(at)
            numbers = (at, _inner_pid(at))
        except BaseException:
            os.close(handle)
            raise
        if lock is not None:
            descriptor, name = lock
            return _Found(at, handle, descriptor, name, numbers)
        os.close(handle)
        at = above
    raise CheckpointError(
        f"process {pid} runs under no `python -m gpustasis.jit` and no `gpustasis job run`; "
        "`gpustasis checkpoint` dumps any process tree"
    )


def _lock_of(pid: int) -> tuple[int, str] | None:
    """What is told there has to name this very process: other programs may have the file open."""
    try:
        entries = list((_PROC / str(pid) / "fd").iterdir())
        owner = (_PROC / str(pid)).stat().st_uid
    except OSError:
        return None
    for entry in entries:
        try:
            name = _NAMES.get(os.path.basename(os.readlink(entry)))
            if name is None:
                continue
            found = os.open(entry, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            continue
        status = os.fstat(found)
        is_its = stat.S_ISREG(status.st_mode) and status.st_uid in (0, owner)
        if is_its and told(found).get(name) in (pid, _inner_pid(pid)):
            return found, name
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
