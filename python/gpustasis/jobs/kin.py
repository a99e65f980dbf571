# SPDX-License-Identifier: Apache-2.0
"""The tasks of a rank whose keeper is not the parent of their root.

What a root leaves behind comes to the keeper that has started or restored it. Of a root that was
taken over it goes to init: it is known only by having been seen below the root before.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress

from gpustasis.errors import CheckpointError
from gpustasis.jobs.stopping import children
from gpustasis.streaming.tree import Tree
from gpustasis.task import start_time

_BETWEEN_S = 1.0  # two looks


class Kin:
    """Of one rank. known: processes that are its tasks, and when each was started."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        self._looked = -1e9

    @property
    def known(self) -> Mapping[int, int]:
        return self._known

    def look(self, root: int) -> None:
        """At what is below it, if it is time to."""
        now = time.monotonic()
        if now < self._looked + _BETWEEN_S:
            return
        self._looked = now
        if root in children():
            return
        before = {pid: start for pid, start in self._known.items() if _started(pid) == start}
        self._known = before | _below(root)

    def forget(self) -> None:
        """What comes now are other tasks."""
        self._known, self._looked = {}, -1e9


def _below(root: int) -> dict[int, int]:
    """The process, too."""
    try:
        tree = Tree(root)
    except CheckpointError:  # it has ended
        return {}
    try:
        found = {pid: _started(pid) for pid in tree.pids}
        ended = set(tree.ended())  # afterwards: what has not ended is what was read of
    finally:
        tree.close()
    return {pid: start for pid, start in found.items() if pid not in ended}


def _started(pid: int) -> int:
    """0: there is none."""
    with suppress(CheckpointError, OSError):
        return start_time(pid)
    return 0
