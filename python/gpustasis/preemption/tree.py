# SPDX-License-Identifier: Apache-2.0
"""The processes of a job."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpustasis.errors import CheckpointError, DriverError
from gpustasis.nvml import memory_used
from gpustasis.recovery import GUARDIAN_COMM, WORKER_COMM
from gpustasis.task import has_driver_thread

PROC = Path("/proc")
# Shared by several processes of the tree, it counts once.
_COUNTED = re.compile(r"^(?:Pss_Anon|Pss_Shmem|SwapPss):\s+([0-9]+) kB$", re.MULTILINE)
_OURS = (WORKER_COMM, GUARDIAN_COMM)
_POLL_S = 0.02


def children_of(pid: int) -> Iterator[int]:
    """Of all its threads; zombies too."""
    try:
        threads = list((PROC / str(pid) / "task").iterdir())
    except OSError:
        return  # it has ended
    for thread in threads:
        with suppress(OSError):
            yield from map(int, (thread / "children").read_text().split())


def tree_of(pid: int) -> list[int]:
    """It and all below it."""
    found = [pid]
    for each in found:  # grows meanwhile
        found += children_of(each)
    return found


def strays(root: int) -> list[int]:
    """Live processes that came to us from the job: what started them has ended, so they are no
    longer below its root, and a dump would miss them."""
    return [
        pid
        for pid in children_of(os.getpid())
        if pid != root and _comm(pid) not in _OURS and _lives(pid)
    ]


def end_job(root: int, patience_s: float) -> None:
    """Kill the job, with all that has left its tree, and collect what comes to us of it. Raises
    CheckpointError if something of it is still there then."""
    end = time.monotonic() + patience_s
    while left := [pid for one in (root, *strays(root)) for pid in tree_of(one) if _lives(pid)]:
        if time.monotonic() >= end:
            raise CheckpointError(
                f"process {describe(left[0])} of the job was killed, and is there"
            )
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of a tree. gpu_bytes: of all GPUs here, whoever uses them, if the tree uses any.
    unknown: why they are not known; "": they are."""

    cpu_bytes: int
    gpu_bytes: int
    unknown: str = ""

    @property
    def total(self) -> int:
        return self.cpu_bytes + self.gpu_bytes


def memory_of(pid: int) -> Memory:
    """Of the tree below it, as far as it is in memory or swapped out; files count where they are
    only in memory."""
    cpu = 0
    uses_gpu = False
    for each in tree_of(pid):
        try:
            text = (PROC / str(each) / "smaps_rollup").read_text()
            uses_gpu = uses_gpu or has_driver_thread(each)
        except (OSError, CheckpointError):
            continue  # it has ended
        cpu += sum(map(int, _COUNTED.findall(text))) << 10
    if not uses_gpu:
        return Memory(cpu_bytes=cpu, gpu_bytes=0)
    try:
        return Memory(cpu_bytes=cpu, gpu_bytes=memory_used())
    except DriverError as exc:
        return Memory(cpu_bytes=cpu, gpu_bytes=0, unknown=str(exc))


def taken(pids: list[int]) -> list[int]:
    """Those that something has now, a thread or the id of a group or session."""
    return [pid for pid in pids if (PROC / str(pid)).exists()]


def describe(pid: int) -> str:
    """The process and what runs in it."""
    return f"{pid} ({_comm(pid) or 'ended meanwhile'})"


def _comm(pid: int) -> str:
    try:
        return (PROC / str(pid) / "comm").read_text(errors="replace").rstrip("\n")
    except OSError:
        return ""


def _lives(pid: int) -> bool:
    try:
        stat = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return False
    return stat[stat.rindex(")") + 2] not in "ZX"
