# SPDX-License-Identifier: Apache-2.0
"""Whether a rank still makes progress: by a file that it names for this; or by its log, and by what
it does with CPU and GPU."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpustasis import nvml
from gpustasis.errors import CheckpointError
from gpustasis.jobs.stopping import tree_pids

_IDLE = 0.01  # of one CPU, or of the time of a GPU: less is none
_LOOKS = 20  # in the time after which a rank hangs
_MOST_S = 5.0  # between two looks
_GAP = 4  # looks: after a longer pause the tasks may have been held by an epoch
_WORK_S = 2.0  # CPU is looked at over so long at least, where the time to a hang allows it
_UTIME = 11  # field of /proc/PID/stat after the name: 14 of proc(5)


@dataclass(frozen=True, slots=True)
class _Signs:
    files: tuple[tuple[int, int], ...]
    cpu_s: float
    gpu: float


class Watcher:
    """after_s: without any sign of progress. log: of the rank. progress: a file that it writes;
    None: there is none, and then a log that is silent is no sign as long as CPU or GPU are busy.
    reason: why it hangs; empty: it does not."""

    def __init__(
        self,
        after_s: float,
        log: Path,
        progress: Path | None,
        gpu_busy: Callable[[], float] | None = None,
    ) -> None:
        self._after_s = after_s
        self._file = progress or log
        self._heeds_work = progress is None
        self._gpu_busy = gpu_busy or _gpu_busy
        self._between_s = min(_MOST_S, after_s / _LOOKS)
        self._looked = -1e9
        self._pid = 0
        self._moved = 0.0
        self._before: _Signs | None = None
        self._held = False
        self._held_s = 0.0  # since it has moved
        self._all_held_s = 0.0
        self._work_s = max(self._between_s, min(_WORK_S, after_s / 3))
        self._used_s = self._free_s = 0.0  # of CPU, in the time in which no epoch held it
        self._used_at = self._held_then = 0.0  # when it last used some, and _held_s then
        self.reason = ""

    @property
    def silent_s(self) -> float:
        """Since it was seen to make progress, by the clock."""
        return time.monotonic() - self._moved

    @property
    def held_s(self) -> float:
        """How much of that epochs held it, up to the last look."""
        return self._held_s

    def _idle_s(self) -> float:
        """Silent, without the time in which epochs held it."""
        return self._now() - self._moved - self._held_s

    def _now(self) -> float:
        """Stands from when an epoch begins to hold the tasks until the next look at them."""
        return self._looked if self._held else time.monotonic()

    @property
    def is_quiet(self) -> bool:
        """Whether it has made no progress for half of the time after which it hangs."""
        return self._pid != 0 and self._idle_s() >= self._after_s / 2

    @property
    def noticed_after_s(self) -> float:
        """Seconds of free_s() in which a hang that is there now is noticed, on any rank."""
        return 1.5 * self._after_s + 3 * self._between_s + self._work_s + 5

    def free_s(self) -> float:
        """A clock that stands while epochs hold the tasks."""
        return self._now() - self._all_held_s

    def is_held(self, pid: int) -> None:
        """An epoch begins to hold the tasks below `pid`. It takes time on CPU and GPU in their
        name, which is no progress; nor is the time that it takes one without. What they have
        written is theirs."""
        self.look(pid, at_once=True)
        self._held = True

    def forget(self) -> None:
        """What comes now are other tasks."""
        self._pid, self.reason = 0, ""

    def look(self, pid: int, *, at_once: bool = False) -> str:
        """At the tasks below `pid`, if it is time to; the reason."""
        now = time.monotonic()
        if now - self._looked < self._between_s and not (self._held or at_once):
            return self.reason
        gap = now - self._looked > _GAP * self._between_s + 1
        elapsed_s, self._looked = now - self._looked, now
        signs = self._signs(pid)
        before, self._before = self._before, signs
        held, self._held = self._held, False
        self._all_held_s += elapsed_s if held else 0.0
        if before is None or pid != self._pid:
            self._pid = pid
            self._moves(now)
        elif held:
            self._held_s += elapsed_s
            if before.files != signs.files:  # by the time it was held: it may hang since
                self._moves(now - elapsed_s, held_s=elapsed_s)
        elif gap or before.files != signs.files:
            self._moves(now)
        else:
            self._look_at_work(before, signs, elapsed_s)
            works = self._used_s > _IDLE * self._work_s  # what has been looked at so far shows it
            if self._idle_s() >= self._after_s and not works:
                what = (
                    "CPU and GPU are idle and its log is silent"
                    if self._heeds_work
                    else f"{self._file} has not changed"
                )
                self.reason = f"hangs: {what} for {self._after_s:g} s"
        return self.reason

    def _moves(self, at: float, held_s: float = 0.0) -> None:
        self._moved, self._held_s, self.reason = at, held_s, ""
        self._used_s = self._free_s = 0.0

    def _look_at_work(self, before: _Signs, now: _Signs, elapsed_s: float) -> None:
        """CPU is looked at over so long that the ticks of a process that only waits are none, and
        over times between epochs together."""
        if not self._heeds_work:
            return
        if now.gpu > _IDLE:
            self._moves(self._looked)
            return
        used_s = max(0.0, now.cpu_s - before.cpu_s)
        if used_s:
            self._used_at, self._held_then = self._looked, self._held_s
        self._used_s += used_s
        self._free_s += elapsed_s
        if self._free_s < self._work_s:
            return
        if self._used_s > _IDLE * self._free_s:
            self._moves(self._used_at, self._held_s - self._held_then)
        self._used_s = self._free_s = 0.0

    def _signs(self, pid: int) -> _Signs:
        files = []
        with suppress(OSError):
            found = self._file.stat()
            files.append((found.st_size, found.st_mtime_ns))
        if not self._heeds_work:
            return _Signs(tuple(files), 0.0, 0.0)
        return _Signs(tuple(files), _cpu_s(pid), self._gpu_busy())


def _cpu_s(root: int) -> float:
    ticks = 0
    for pid in tree_pids(root):
        with suppress(OSError):
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
            fields = stat.rpartition(")")[2].split()
            ticks += int(fields[_UTIME]) + int(fields[_UTIME + 1])
    return ticks / os.sysconf("SC_CLK_TCK")


def _gpu_busy() -> float:
    """Of the busiest GPU of this host; 0 where that cannot be told."""
    try:
        return nvml.busiest()
    except CheckpointError:
        return 0.0
