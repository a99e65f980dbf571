# SPDX-License-Identifier: Apache-2.0
"""The pages that a process, or a tree of them, writes, once per interval; and what they mean for
its checkpoints: rates, sizes, intervals.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from gpustasis._core import DirtyTracker
from gpustasis.errors import CheckpointError, UnsupportedError
from gpustasis.planning.interval import young

MIB = 1 << 20

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One interval of watching.

    seconds: how long it was. dirty_bytes: of pages written at least once in it. tracked_bytes,
    untracked_bytes: as in gpustasis._core.DirtyPages, at its end.
    """

    seconds: float
    dirty_bytes: int
    tracked_bytes: int
    untracked_bytes: int = 0

    @property
    def rate(self) -> float:
        """Bytes of different pages written per second."""
        return self.dirty_bytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def share(self) -> float:
        """Of the tracked memory, 0 to 1."""
        return self.dirty_bytes / self.tracked_bytes if self.tracked_bytes else 0.0


@dataclass(slots=True)
class Meter:
    """The samples so far, summed up."""

    seconds: float = 0.0
    dirty_bytes: int = 0
    peak_rate: float = 0.0
    count: int = 0
    last: Sample = field(
        default_factory=lambda: Sample(seconds=0.0, dirty_bytes=0, tracked_bytes=0)
    )

    def add(self, sample: Sample) -> None:
        self.seconds += sample.seconds
        self.dirty_bytes += sample.dirty_bytes
        self.peak_rate = max(self.peak_rate, sample.rate)
        self.count += 1
        self.last = sample

    @property
    def mean_rate(self) -> float:
        """Bytes per second over the whole time."""
        return self.dirty_bytes / self.seconds if self.seconds > 0 else 0.0


def incremental_bytes(rate: float, tracked_bytes: int, interval_s: float) -> float:
    """At most so many bytes differ after interval_s seconds: a page that is written twice counts
    once in a checkpoint, and twice in a rate measured over shorter times."""
    return min(rate * interval_s, float(tracked_bytes))


def best_incremental_interval(
    rate: float, tracked_bytes: int, bandwidth: float, mtbf_s: float
) -> tuple[float, float]:
    """(interval, cost), both in seconds, where the cost is that of writing what has changed.

    rate and bandwidth in bytes per second. What has changed grows with the interval: with
    cost = rate x interval / bandwidth, young() has one fixed point, 2 rate MTBF /
    bandwidth; where all memory has changed by then, the cost is that of all. (0, 0) if nothing is
    written. Raises ValueError unless bandwidth and mtbf_s are positive.
    """
    if bandwidth <= 0 or mtbf_s <= 0:
        raise ValueError(f"bandwidth {bandwidth} B/s and MTBF {mtbf_s} s must be positive")
    if rate <= 0 or tracked_bytes <= 0:
        return 0.0, 0.0
    growing = 2 * rate * mtbf_s / bandwidth
    full = young(tracked_bytes / bandwidth, mtbf_s)
    interval = min(growing, full)
    return interval, incremental_bytes(rate, tracked_bytes, interval) / bandwidth


class Watch:
    """Trackers of a process and, with tree, of its descendants. A context manager."""

    def __init__(self, pid: int, *, backend: str = "auto", tree: bool = False) -> None:
        """backend: as of DirtyTracker.

        Raises UnsupportedError if writes cannot be seen here or of that process, CheckpointError if
        there is no such process or it may not be looked at.
        """
        self._pid = pid
        self._tree = tree
        try:
            root = DirtyTracker(pid, backend)
        except NotImplementedError as exc:
            raise UnsupportedError(f"cannot watch process {pid}: {exc}") from exc
        except OSError as exc:
            raise CheckpointError(f"cannot watch process {pid}: {exc}") from exc
        self.backend = root.backend
        self._trackers = {pid: root}
        self._refused: set[int] = set()
        self._look_for_children()
        for each in list(self._trackers):
            self._scan(each)
        self._since = time.monotonic()

    @property
    def processes(self) -> int:
        return len(self._trackers)

    def sample(self) -> Sample | None:
        """What was written since the last call; None: the process has ended.

        A process that came since then counts from the next call on.
        """
        dirty = tracked = untracked = 0
        for pid in list(self._trackers):
            if (found := self._scan(pid)) is None:
                continue
            dirty += found.dirty_bytes
            tracked += found.tracked_bytes
            untracked += found.untracked_bytes
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        if self._pid not in self._trackers:
            return None
        self._look_for_children()
        return Sample(
            seconds=seconds,
            dirty_bytes=dirty,
            tracked_bytes=tracked,
            untracked_bytes=untracked,
        )

    def close(self) -> None:
        with ExitStack() as stack:
            for tracker in self._trackers.values():
                stack.callback(tracker.close)
        self._trackers.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _scan(self, pid: int) -> Sample | None:
        """None: it has ended, and is no longer tracked."""
        begin = time.monotonic()
        try:
            pages = self._trackers[pid].scan(remark=True)
        except ProcessLookupError as exc:
            log.info("%s", exc)
            self._trackers.pop(pid).close()
            return None
        except OSError as exc:
            raise CheckpointError(f"cannot watch process {pid} any longer: {exc}") from exc
        return Sample(
            seconds=time.monotonic() - begin,
            dirty_bytes=pages.dirty_bytes,
            tracked_bytes=pages.tracked_bytes,
            untracked_bytes=pages.untracked_bytes,
        )

    def _look_for_children(self) -> None:
        if not self._tree:
            return
        for pid in _descendants(self._pid):
            if pid in self._trackers or pid in self._refused:
                continue
            try:
                tracker = DirtyTracker(pid, self.backend)
                tracker.mark()
            except ProcessLookupError:
                continue  # it has ended already
            except (NotImplementedError, OSError) as exc:
                self._refused.add(pid)
                log.warning("process %s is not watched: %s", pid, exc)
                continue
            self._trackers[pid] = tracker


def _descendants(pid: int) -> Iterator[int]:
    """Children of all threads of the process, and theirs."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return  # it has ended
    for task in tasks:
        try:
            children = (task / "children").read_text().split()
        except OSError:
            continue
        for child in map(int, children):
            yield child
            yield from _descendants(child)
