# SPDX-License-Identifier: Apache-2.0
"""Does CRIU's own code stand in a task? Asked at the moment in which criu is killed.

During "dump tasks" CRIU runs code of its own in each task: first single system calls, written over
the task's text and ended by a breakpoint, then a blob from a memfd named CRIUMFD. A task that
stands there when criu dies has no way back, with any plugin or none. Only what is seen here proves
it.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_BLOB = "CRIUMFD"  # compel's name for the memory of its code (criu: compel/src/lib/infect.c)
_BREAKPOINT = 0xCC  # int3
_ARRIVAL_S = 2.0
_AROUND = 8  # bytes on each side of a thread's place that are compared with the file


@dataclass(frozen=True, slots=True)
class _Mapping:
    start: int
    end: int
    offset: int
    path: str


def proof(pid: int) -> str:
    """What shows that CRIU's code stands in the task; empty: nothing does. The task may run."""
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        mappings = _mappings(pid)
        blobs = [mapping for mapping in mappings if _BLOB in mapping.path]
        for task in Path(f"/proc/{pid}/task").iterdir():
            place = _place(task)
            # One that runs while CRIU's code is mapped is led by CRIU: all others are stopped.
            if any(place is None or blob.start <= place < blob.end for blob in blobs):
                return f"thread {task.name} stands in {_BLOB}"
            if place is not None and _is_breakpoint_of_another(pid, place, mappings):
                return f"thread {task.name} stands at a breakpoint at {place:#x}, not of its file"
    return ""


def proofs(pids: tuple[int, ...]) -> dict[int, str]:
    """Of those tasks for which there is one."""
    found = {pid: proof(pid) for pid in pids}
    return {pid: text for pid, text in found.items() if text}


def _mappings(pid: int) -> list[_Mapping]:
    found = []
    for line in Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape").splitlines():
        words = line.split(maxsplit=5)
        start, end = (int(number, 16) for number in words[0].split("-"))
        found.append(_Mapping(start, end, int(words[2], 16), words[5] if len(words) > 5 else ""))
    return found


def _place(task: Path) -> int | None:
    """The instruction pointer of a thread that does not run (proc(5): /proc/PID/syscall). One that
    is traced and runs is led by CRIU, which stands still: it is on its way to a breakpoint, and on
    a busy machine that takes a while."""
    deadline = time.monotonic() + _ARRIVAL_S
    while True:
        words = (task / "syscall").read_text().split()
        if words[0] != "running":
            return int(words[-1], 16)
        if "TracerPid:\t0\n" in (task / "status").read_text() or time.monotonic() > deadline:
            return None
        time.sleep(0.001)


def _is_breakpoint_of_another(pid: int, place: int, mappings: list[_Mapping]) -> bool:
    """There is a breakpoint around `place`, and the mapped file has other bytes there."""
    for mapping in mappings:
        if not mapping.start <= place < mapping.end or not mapping.path.startswith("/"):
            continue
        low = max(mapping.start, place - _AROUND)
        high = min(mapping.end, place + _AROUND)
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            memory.seek(low)
            there = memory.read(high - low)
        with open(f"/proc/{pid}/map_files/{mapping.start:x}-{mapping.end:x}", "rb") as file:
            file.seek(mapping.offset + low - mapping.start)
            wanted = file.read(high - low)
        return there != wanted and _BREAKPOINT in there
    return False
