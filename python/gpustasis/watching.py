# SPDX-License-Identifier: Apache-2.0
"""Look at the pages that a process, or a tree of them, writes: once per interval."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from gpustasis._core import DirtyTracker
from gpustasis.dirty_rate import Sample
from gpustasis.errors import CheckpointError, UnsupportedError

log = logging.getLogger(__name__)


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
