"""What /proc says about a process."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from gpustasis.errors import CheckpointError

PROC = Path("/proc")
Seen = TypeVar("Seen")
_STATE, _START_TIME = 0, 19  # fields of /proc/PID/stat after the name: 3 and 22 of proc(5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A live process.

    pid: as this process sees it; inner_pid: in the task's own innermost pid namespace.
    state: as in /proc/PID/stat, "T": stopped, "t": traced and stopped.
    start_time: clock ticks from boot to its start; with the boot, this tells it from all others.
    tracer: the process that traces it; 0: none.
    """

    pid: int
    inner_pid: int
    state: str
    start_time: int
    tracer: int


def read_task(pid: int) -> Task:
    """Raises CheckpointError if there is no such process, or only a dead one."""
    try:
        stat = (PROC / str(pid) / "stat").read_text(errors="replace")
        status = (PROC / str(pid) / "status").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError) as exc:
        raise CheckpointError(f"there is no process {pid}") from exc
    fields = stat[stat.rindex(")") + 2 :].split()
    if fields[_STATE] in ("Z", "X"):
        raise CheckpointError(f"process {pid} is dead")
    values = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return Task(
        pid=pid,
        inner_pid=int(values.get("NSpid", str(pid)).split()[-1]),
        state=fields[_STATE],
        start_time=int(fields[_START_TIME]),
        tracer=int(values["TracerPid"]),
    )


def boot_id() -> bytes:
    """16 bytes that name this boot of this machine."""
    return uuid.UUID((PROC / "sys/kernel/random/boot_id").read_text().strip()).bytes


def find_users(directory: Path, comm: str) -> list[int]:
    """Processes of that name that have `directory` open, as far as this process may see."""
    wanted = directory.stat()
    found = []
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if (entry / "comm").read_text().rstrip("\n") == comm and _holds(entry, wanted):
                found.append(int(entry.name))
        except OSError:  # it has ended, or is not ours to look at
            continue
    return found


def find_openers(part: str, comm: str) -> list[int]:
    """Processes of that name that have a file open whose path holds `part`, as far as this process
    may see."""
    found = []
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if (entry / "comm").read_text().rstrip("\n") == comm and any(
                part in name for name in _each(entry, os.readlink)
            ):
                found.append(int(entry.name))
        except OSError:  # it has ended, or is not ours to look at
            continue
    return found


def _holds(process: Path, wanted: os.stat_result) -> bool:
    return any(os.path.samestat(found, wanted) for found in _each(process, os.stat))


def _each(process: Path, look: Callable[[Path], Seen]) -> Iterator[Seen]:
    """`look` at each open file of a process that runs on: it may close one of them meanwhile, and
    that must hide no other. Raises OSError if the process has ended."""
    for fd in (process / "fd").iterdir():
        try:
            yield look(fd)
        except FileNotFoundError:
            continue
