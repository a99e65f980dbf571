# SPDX-License-Identifier: Apache-2.0
"""What /proc says about a process."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from gpustasis.errors import CheckpointError

PROC = Path("/proc")
_DRIVER_THREAD = re.compile(r"cuda([0-9a-f]{11})")
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
    values = dict(line.split(":", 1) for line in status.split("\n") if ":" in line)
    return Task(
        pid=pid,
        inner_pid=int(values.get("NSpid", str(pid)).split()[-1]),
        state=fields[_STATE],
        start_time=int(fields[_START_TIME]),
        tracer=int(values["TracerPid"]),
    )


def start_time(pid: int) -> int:
    """As Task's; also of a dead one that its parent has yet to hear of. Raises CheckpointError."""
    try:
        stat = (PROC / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError) as exc:
        raise CheckpointError(f"there is no process {pid}") from exc
    return int(stat[stat.rindex(")") + 2 :].split()[_START_TIME])


def misleading_thread(pid: int) -> str | None:
    """A thread of `pid` by whose name the driver would open a file, and not a pipe of its own;
    None: there is none.

    The driver finds its thread in a process by its name, "cuda" and 11 hex digits: the numbers of
    two descriptors of that process, 22 bits each. It opens them anew, to write a request to the one
    and read the answer from the other. Whoever may name a thread can so have a root that asks the
    driver write to any file that the process has open, if only for reading.
    """
    place = PROC / str(pid)
    with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        for thread in (place / "task").iterdir():
            name = ""
            with suppress(FileNotFoundError, ProcessLookupError):  # that one has; others follow
                name = (thread / "comm").read_text(errors="replace").rstrip("\n")
            digits = _DRIVER_THREAD.fullmatch(name)
            for number in divmod(int(digits[1], 16), 1 << 22) if digits else ():
                try:
                    target = os.readlink(place / "fd" / str(number))
                except FileNotFoundError:
                    continue  # the driver cannot open it either
                if target.startswith("/"):
                    return (
                        f"thread {thread.name} of process {pid} is named {name} as the driver's "
                        f"are, but leads it to {target} (descriptor {number}), which is no pipe"
                    )
    return None


def restore_pipes(pid: int) -> list[int]:
    """The descriptors of `pid` that the name of its restore thread gives: two pipes, if the driver
    has named it. Empty: it has no such thread, or has ended."""
    with suppress(OSError):
        for thread in (PROC / str(pid) / "task").iterdir():
            with suppress(OSError):  # that one has ended
                name = (thread / "comm").read_text(errors="replace").rstrip("\n")
                if digits := _DRIVER_THREAD.fullmatch(name):
                    return list(divmod(int(digits[1], 16), 1 << 22))
    return []


def has_driver_thread(pid: int) -> bool:
    """Whether a thread of `pid` is named as those that the CUDA driver keeps in a process: without
    one, no call of the driver has done anything to it. Raises CheckpointError if it has ended."""
    try:
        threads = list((PROC / str(pid) / "task").iterdir())
    except (FileNotFoundError, ProcessLookupError) as exc:
        raise CheckpointError(f"there is no process {pid}") from exc
    for thread in threads:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            if (thread / "comm").read_text(errors="replace").startswith("cuda"):
                return True
    return False


def boot_id() -> bytes:
    """16 bytes that name this boot of this machine."""
    return uuid.UUID((PROC / "sys/kernel/random/boot_id").read_text().strip()).bytes


def find_users(directory: Path, *comms: str) -> list[int]:
    """Processes of one of these names and of this user that have `directory` open."""
    wanted = directory.stat()
    return _find(
        comms, lambda entry: any(os.path.samestat(found, wanted) for found in _each(entry, os.stat))
    )


def open_files(*comms: str) -> dict[str, dict[int, list[str]]]:
    """Paths of what processes of these names and of this user, and in no container, have open; by
    name and pid."""
    found: dict[str, dict[int, list[str]]] = {comm: {} for comm in comms}

    def note(entry: Path) -> bool:
        if _is_here(entry):
            name = comm_of(entry.name)
            if name in found:
                found[name][int(entry.name)] = list(_each(entry, os.readlink))
        return False

    _find(comms, note)
    return found


def _find(comms: Collection[str], holds: Callable[[Path], bool]) -> list[int]:
    """Only processes of this user: what another names like that is not believed, and nothing that
    it has open, which may be on a file system of its own that never answers, is looked at."""
    found = []
    for pid in filter(str.isdigit, os.listdir(PROC)):
        try:
            if comm_of(pid) not in comms:
                continue
            entry = PROC / pid
            if _is_ours(entry) and holds(entry):
                found.append(int(pid))
        except OSError:  # it has ended, or is not ours to look at
            continue
    return found


def _is_ours(entry: Path) -> bool:
    """Whether it is this user's, and was started by nobody else through a setuid program, which may
    be called by any name."""
    for line in (entry / "status").read_text(errors="replace").split("\n"):  # not at "\v"
        if line.startswith("Uid:"):
            return set(line.split()[1:4]) == {str(os.geteuid())}  # real, effective, saved
    return False


def is_ours_here(entry: Path) -> bool:
    """Of a directory of /proc: this user's, as _is_ours, and in the pid namespace of this process.
    Raises OSError if it has ended, or is not ours to look at."""
    return _is_ours(entry) and _is_here(entry)


def comm_of(pid: str | int) -> str:
    """The name of a process. A node has thousands, and is asked for all of them again and again, so
    this is done in the shortest way."""
    handle = os.open(f"{PROC}/{pid}/comm", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(handle, 64).decode(errors="replace").rstrip("\n")
    finally:
        os.close(handle)


def _is_here(entry: Path) -> bool:
    """Whether it is in the pid namespace of this process: any root of a container can name its
    processes as it likes."""
    return os.path.samestat((entry / "ns/pid").stat(), os.stat("/proc/self/ns/pid"))


def _each(process: Path, look: Callable[[Path], Seen]) -> Iterator[Seen]:
    """`look` at each open file of a process that runs on: it may close one of them meanwhile, and
    that must hide no other. Raises OSError if the process has ended."""
    for fd in (process / "fd").iterdir():
        try:
            yield look(fd)
        except OSError:  # closed, or of a name too long to be told
            continue


def is_of_ipc_job(pid: int) -> bool:
    """Whether a process belongs to a job of CUDA IPC, for whose processes the driver has to be
    called one after the other: it writes to the job's file. One that has ended does not; of one
    that cannot be told it is assumed."""
    try:
        environ = (PROC / str(pid) / "environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return True
    return any(word.startswith(b"CUDA_CHECKPOINT_JOB_FILE=") for word in environ.split(b"\0"))
