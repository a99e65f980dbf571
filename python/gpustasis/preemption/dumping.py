# SPDX-License-Identifier: Apache-2.0
"""A dump that ends in time, or is broken off with the job unharmed.

How it is broken off: criu and its helpers may not write to files any more (RLIMIT_FSIZE), so that
the dump fails as on a full disk, and criu undoes what it did: memory is put back, connections are
opened again, the driver is unlocked. A criu that does not even do that in time is killed.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpustasis.criu import run
from gpustasis.criu.find import Criu
from gpustasis.criu.plugin import Setting
from gpustasis.errors import CheckpointError, CriuError
from gpustasis.preemption.network import unlock
from gpustasis.preemption.tree import tree_of

GHOST_LIMIT = 1 << 30  # bytes: what data loaders share has no name
# All of a checkpoint is then in files of ours, which can be checked before a restore; on the disk,
# whatever the configuration says: the host goes away.
PLUGIN: dict[str, Setting] = {"layout": "packed", "cpu_memory": "auto", "tier": "disk"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Moments, by time.monotonic(). stop: the dump is broken off. kill: criu is killed."""

    stop: float
    kill: float


def criu_words(network_lock: str) -> list[str]:
    """Arguments for criu at a dump and at a restore."""
    return ["--network-lock", network_lock]


OPTIONS: dict[str, bool | int] = {"tcp-established": True, "file-locks": True}


class _Watch:
    """Breaks the dump off; knows whether it did."""

    def __init__(self, limits: Callable[[], Limits]) -> None:
        self._limits = limits
        self.stopped = False
        self.killed = False

    def __call__(self, pid: int) -> None:
        now, limits = time.monotonic(), self._limits()
        if now >= limits.stop and not self.killed:
            self.stopped = True
            for each in tree_of(pid):
                with suppress(OSError):  # it has ended
                    _, hard = resource.prlimit(each, resource.RLIMIT_FSIZE)
                    resource.prlimit(each, resource.RLIMIT_FSIZE, (0, hard))
        if now >= limits.kill and not self.killed:
            self.killed = True
            with suppress(OSError):  # it has ended
                os.kill(pid, signal.SIGKILL)


def dump(
    criu: Criu,
    pid: int,
    images: Path,
    limits: Callable[[], Limits],
    words: Sequence[str],
    *,
    plugin: Mapping[str, Setting] = PLUGIN,
    runs_on: bool = False,
) -> run.Run:
    """Dump the tree below `pid`, which ends with it, or runs on. limits: as they are now.

    Raises CheckpointError if there is no checkpoint: the tree runs on then.
    """
    watch = _Watch(limits)
    begin = time.monotonic()
    settings = run.Settings(
        plugin=plugin,
        options={**OPTIONS, "ghost-limit": GHOST_LIMIT, "link-remap": True},
        extra=words,
        watch=watch,
    )
    try:
        return run.dump(criu, pid, images, settings, leave_running=runs_on)
    except CriuError as exc:
        if not watch.stopped:
            raise
        how = "broken off"
        if watch.killed:
            how = "killed"
            with suppress(CheckpointError):
                unlock(images)  # the job may want its connections to end well
        raise CheckpointError(
            f"the dump into {images} was {how} after {time.monotonic() - begin:.1f} s: it would "
            "have taken too long"
        ) from exc
