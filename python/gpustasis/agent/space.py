# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint will need of memory and disk, looked up before it begins, and what there is."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gpustasis import nvml
from gpustasis._core import require_arena
from gpustasis.agent.config import Config
from gpustasis.agent.subjects import tree_pids
from gpustasis.criu.plugin import driver_libraries, run_settings
from gpustasis.draining.recycle import POOL, size_of
from gpustasis.draining.room import ARENA
from gpustasis.errors import AgentError, CheckpointError, DriverError
from gpustasis.files import changeable_by_others
from gpustasis.task import PROC, has_driver_thread
from gpustasis.text import mib

log = logging.getLogger(__name__)

# What CRIU and the plugin take besides: images of descriptors and the like, buffers, threads.
_DISK_BESIDES = 16 << 20
_MEMORY_BESIDES = 64 << 20
# Memory that is in a checkpoint: not that of files, which is on a disk already.
_DUMPED = ("RssAnon", "RssShmem", "VmSwap")


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes. disk: at most; compression and an earlier checkpoint make it less. arena: of `memory`,
    what goes into an arena."""

    memory: int
    disk: int
    arena: int = 0


# What is put into memory first: nothing, memory of GPUs, or the processes' own too.
InArena = Literal["", "gpu", "all"]


def estimate(root: int, measured_gpu: int | None, in_arena: InArena = "") -> Need:
    """Of the tree below `root`. measured_gpu: what its last checkpoint has held of GPUs' memory;
    None: there is none: then all that is in use on this node's GPUs, if it uses any."""
    pids = tree_pids(root)
    plain = sum(map(_plain_bytes, pids))
    gpu = measured_gpu
    if gpu is None:
        gpu = _gpu_bytes() if any(map(_uses_gpu, pids)) else 0
    # The driver puts the GPUs' memory into the host's before it is stored.
    arena = {"": 0, "gpu": gpu, "all": gpu + plain}[in_arena]
    return Need(gpu + arena + _MEMORY_BESIDES, plain + gpu + _DISK_BESIDES, arena)


def _plain_bytes(pid: int) -> int:
    total = 0
    with suppress(OSError, ValueError):  # it has ended
        for line in (PROC / str(pid) / "status").read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name in _DUMPED:
                total += int(value.split()[0]) << 10
    return total


def _uses_gpu(pid: int) -> bool:
    try:
        return has_driver_thread(pid)
    except CheckpointError:
        return False


def _gpu_bytes() -> int:
    try:
        return nvml.memory_used(driver_libraries(os.environ)[1])
    except DriverError as exc:
        log.warning("memory of GPUs is left out of an estimate: %s", exc)
        return 0


def available_memory() -> int:
    """Bytes that can be had without swapping."""
    for line in (PROC / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise AgentError("/proc/meminfo names no MemAvailable")


def _pool_bytes() -> int:
    """Bytes of memory that the pool of the arena holds for the next dump."""
    try:
        arena = Path(str(run_settings(os.environ).get("arena") or ARENA))
        require_arena(arena)
        return size_of(arena / POOL)
    except (CheckpointError, OSError, ValueError):  # the dump tells: it has no arena either
        return 0


def free_disk(place: Path) -> int:
    """Bytes that are free where `place` lies."""
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize


def disk_used(place: Path) -> int:
    """Bytes that all below `place` takes on the disk; what vanishes meanwhile counts 0."""
    total = 0
    for above, _, names in os.walk(place):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(above, name)).st_blocks * 512
    return total


def require_own_way(place: Path) -> None:
    """Raise AgentError if others than root, or this user, could put something else at `place`, or
    at what is there already of the way to it."""
    there = place.parent
    while not os.path.lexists(there):
        there = there.parent
    try:
        wrong = next(changeable_by_others(str(there), owners=(0, os.geteuid())), None)
    except OSError as exc:
        raise AgentError(f"cannot look at {exc.filename or there}: {exc.strerror}") from exc
    if wrong is not None:
        raise AgentError(f"{place} is refused: others could replace it: {wrong}")


def why_not(need: Need, claimed: Need, config: Config) -> str:
    """Why it does not fit beside what has been claimed: by those at work, and of the disk by what
    is to be drained; "": it fits."""
    memory = available_memory() - claimed.memory - config.memory_reserve
    if need.arena and not claimed.arena:  # two cannot both have it
        memory += min(_pool_bytes(), need.arena)
    if need.memory > memory:
        return (
            f"it needs up to {mib(need.memory)} of memory, and {mib(max(memory, 0))} are there "
            f"beyond memory_reserve ({mib(config.memory_reserve)}) and what is at work"
        )
    disk = free_disk(config.store) - claimed.disk - config.disk_reserve
    if need.disk > disk:
        return (
            f"it needs up to {mib(need.disk)} in {config.store}, and {mib(max(disk, 0))} are free "
            f"beyond disk_reserve ({mib(config.disk_reserve)}), what is at work and what is to be "
            "drained"
        )
    return ""
