# SPDX-License-Identifier: Apache-2.0
"""How much memory the processes at either end of a stream take: gpustasis, criu, the plugin's
worker and what else they start. Not the job, which a restore makes out of children of criu."""

from __future__ import annotations

import os
import re
import secrets
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

_POLL_S = 0.005
_YOUNG_S = 1.0  # a process that is younger may be about to become another program
_MARK = "GPUSTASIS_TESTS_SIDE"  # in the environment of all of one side
_CRIU = ("criu", "ld-linux-x86-64")  # names of it
_OURS = "gpustasis-"  # names of what the plugin starts begin so


@dataclass(slots=True)
class Side:
    """mark: what its first process is given in its environment. peak_kib: the most that the
    processes which were there at one moment have had until then, each for itself and all together.
    names: of all that were seen."""

    mark: str = field(default_factory=lambda: secrets.token_hex(8))
    peak_kib: int = 0
    names: set[str] = field(default_factory=set)

    @property
    def environ(self) -> dict[str, str]:
        return {_MARK: self.mark}


class Watch:
    """Looks at the processes of both sides until the with statement ends."""

    def __init__(self) -> None:
        self.sender, self.receiver = Side(), Side()
        self._strangers: dict[int, float] = {}  # since when they are known to be of no side
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        self._strangers = dict.fromkeys(_processes(), 0.0)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._done.wait(_POLL_S):
                self._look()
        except BaseException as failure:  # noqa: BLE001 - told to who waits for the end
            self._error = failure

    def _look(self) -> None:
        alive = _processes()
        for gone in self._strangers.keys() - set(alive):
            del self._strangers[gone]
        totals = {self.sender.mark: 0, self.receiver.mark: 0}
        for pid in alive:
            with suppress(OSError):
                self._add(pid, totals)
        for side in (self.sender, self.receiver):
            side.peak_kib = max(side.peak_kib, totals[side.mark])

    def _add(self, pid: int, totals: dict[str, int]) -> None:
        now = time.monotonic()
        if now - self._strangers.get(pid, now) > _YOUNG_S:
            return
        side = self._side_of(pid)
        if side is None:
            self._strangers.setdefault(pid, now)
            return
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
        name, parent = _field(status, "Name"), _field(status, "PPid")
        restores = side is self.receiver and _comm(int(parent)) in _CRIU
        if restores and not name.startswith(_OURS):
            return  # a task, or what is about to be one, or a process of ours
        side.names.add(name)
        totals[side.mark] += int(_field(status, "VmHWM").split()[0])

    def _side_of(self, pid: int) -> Side | None:
        """None: of no side, as a task that was restored: it has the environment that it had."""
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return next(
            (
                side
                for side in (self.sender, self.receiver)
                if f"{_MARK}={side.mark}".encode() in words
            ),
            None,
        )


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _comm(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()


def _field(status: str, name: str) -> str:
    """What is not there is "0": a process that has ended has no memory."""
    found = re.search(rf"^{name}:\s*(.*)$", status, re.MULTILINE)
    return found[1] if found else "0"
