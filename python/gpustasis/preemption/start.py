# SPDX-License-Identifier: Apache-2.0
"""A job begins: from a checkpoint, or afresh."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from gpustasis.criu import run
from gpustasis.criu.find import Criu
from gpustasis.criu.images import read_pstree
from gpustasis.errors import CheckpointError
from gpustasis.image.checkpoint import is_sealed
from gpustasis.image.directory import share
from gpustasis.image.verification import verify_directory
from gpustasis.preemption.dumping import OPTIONS
from gpustasis.preemption.records import Record
from gpustasis.preemption.streams import Outlet
from gpustasis.preemption.tree import describe, taken

PATIENCE_S = 10.0  # waited for pids of the job that others have
FIRST_PID = 10000
_POLL_S = 0.05
_LAST_PID = Path("/proc/sys/kernel/ns_last_pid")
_PID_MAX = Path("/proc/sys/kernel/pid_max")


class ToldToEnd(Exception):
    """Told to end while nothing of the job ran."""


class PidTakenError(CheckpointError):
    """A pid of the job is another's, who may be the job itself: nothing may be started."""


def verify(directory: Path, told_to_end: Callable[[], bool]) -> None:
    """Check every byte of the checkpoint; a sealed one is checked when it is restored.

    Raises CheckpointError that says what is wrong, ToldToEnd.
    """
    if is_sealed(directory):
        return

    def look(*progress: object) -> None:
        if told_to_end():
            raise ToldToEnd

    found = verify_directory(directory, 0, look)
    look()
    if found.problems:
        raise CheckpointError(f"it is damaged: {found.problems[0]}")


def restore(
    criu: Criu,
    directory: Path,
    record: Record,
    outlets: Sequence[Outlet],
    words: Sequence[str],
) -> int:
    """The root's pid: it runs, and writes to `outlets`. Raises CheckpointError: nothing runs;
    PidTakenError.

    criu has a lock on `directory` as long as it is at work, even if this process is killed.
    """
    await_pids(directory)
    extra = list(words)
    for outlet, number in zip(outlets, record.pipes, strict=True):
        extra += ["--inherit-fd", f"fd[{outlet.writing}]:pipe:[{number}]"]
    with share(directory) as lock:
        passed = [lock.fd, *(outlet.writing for outlet in outlets)]
        settings = run.Settings(options=OPTIONS, extra=extra, pass_fds=passed)
        try:
            return run.restore(criu, directory, settings).pid
        except CheckpointError:
            await_pids(directory)  # was that why?
            raise


def await_pids(directory: Path) -> None:
    """A job has the pids that it had. Those that are taken by what ends in a moment come free.
    Raises PidTakenError if they do not."""
    pids = [task.pid for task in read_pstree(directory)]
    end = time.monotonic() + PATIENCE_S
    while others := taken(pids):
        for pid in others:  # of a restore that has failed
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() >= end:
            raise PidTakenError(f"process {describe(others[0])} has a pid of the job")
        time.sleep(_POLL_S)


def start(command: Sequence[str], outlets: Sequence[Outlet]) -> int:
    """Start the job in a session of its own: its pid. Raises CheckpointError."""
    _leave_low_pids()
    try:
        return os.posix_spawn(
            command[0],
            list(command),
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, outlets[0].writing, 1),
                (os.POSIX_SPAWN_DUP2, outlets[1].writing, 2),
            ],
            setsid=True,
            setsigmask=[],
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # which Python ignores
        )
    except OSError as exc:
        raise CheckpointError(f"cannot run {command[0]}: {exc.strerror}") from exc


def _leave_low_pids() -> None:
    """In a new container pids begin at 1: the next one's supervisor and criu would have those that
    this job is about to get. Where the kernel's counter cannot be set, it stays."""
    with suppress(OSError, ValueError):
        if int(_LAST_PID.read_text()) < FIRST_PID < int(_PID_MAX.read_text()) // 2:
            _LAST_PID.write_text(str(FIRST_PID))


def keep_descriptors() -> None:
    """What was left open by whoever started us is not for the job."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with suppress(OSError):  # listdir's own, closed by now
                os.set_inheritable(int(name), False)


def prctl(option: int, value: int) -> None:
    """Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
