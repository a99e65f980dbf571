# SPDX-License-Identifier: Apache-2.0
"""Trackers that are killed, or stop, while they have a process make a userfaultfd, and what they
leave there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

TIMEOUT_S = 60
CompileC = Callable[..., Path]

_SOURCE = Path(__file__).resolve().parent.parent / "programs" / "broken_off_tracker.c"
_TRACK = """
import sys
from gpustasis._core import DirtyTracker
DirtyTracker(int(sys.argv[1]), "write-protect").close()
"""


def tracker_words(pid: int) -> list[str]:
    """A program that attaches to the process and lets go of it."""
    return [sys.executable, "-c", _TRACK, str(pid)]


def break_off(compile_c: CompileC, pid: int, where: str) -> None:
    """Attach with a tracker that is killed there. where: begun, its record is written and nothing
    made; made, the process has the descriptor."""
    with _start(compile_c, pid, f"{where} kill") as tracker:
        assert tracker.wait(TIMEOUT_S) == -signal.SIGKILL


@contextmanager
def stopped(
    compile_c: CompileC, pid: int, where: str, prefix: Sequence[str] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """A tracker that has stopped there, until it gets a SIGCONT. prefix: a program that runs it."""
    with _start(compile_c, pid, f"{where} stop", prefix) as tracker:
        seen = os.waitid(os.P_PID, tracker.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert seen is not None
        assert seen.si_code == os.CLD_STOPPED
        yield tracker


@contextmanager
def _start(
    compile_c: CompileC, pid: int, break_off: str, prefix: Sequence[str] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    preloaded = compile_c(_SOURCE, "-shared", "-fPIC")
    environ = os.environ | {"LD_PRELOAD": str(preloaded), "BREAK_OFF": break_off}
    tracker = subprocess.Popen([*prefix, *tracker_words(pid)], env=environ)
    try:
        yield tracker
    finally:
        tracker.kill()
        tracker.wait()


def userfaultfds(pid: int) -> list[int]:
    """Descriptors of the process that are userfaultfds."""
    descriptors = Path(f"/proc/{pid}/fd").iterdir()
    return [int(fd.name) for fd in descriptors if os.readlink(fd) == "anon_inode:[userfaultfd]"]


def record_of(pid: int) -> Path:
    """Where a tracker, or a dump, notes down that it makes a userfaultfd in the process."""
    process = Path(f"/proc/{pid}")
    lines = (process / "status").read_text().splitlines()
    inner = next(line for line in lines if line.startswith("NSpid:")).split()[-1]
    start = (process / "stat").read_text().rpartition(")")[2].split()[19]
    user = os.geteuid()
    run = Path("/run") if user == 0 else Path(f"/run/user/{user}")
    name = f"{(process / 'ns/pid').stat().st_ino}-{inner}-{start}"
    return run / "gpustasis" / "userfaultfd" / name
