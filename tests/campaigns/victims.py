# SPDX-License-Identifier: Apache-2.0
"""Who is killed of a dump, criu and the plugin's worker, and how: with SIGKILL, while both stand
still."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

from campaigns.rig import CRIU_TIMEOUT_S

WATCH_S = 0.0005
LATER_S = 0.1  # at most so long after the first of two dies the second


class Victims(StrEnum):
    CRIU = "criu"
    WORKER = "the worker"
    BOTH = "both at once"
    WORKER_FIRST = "the worker, then criu"
    CRIU_FIRST = "criu, then the worker"


def strike(
    criu: subprocess.Popen[bytes],
    found: Sequence[int],
    victim: Victims,
    later_s: float,
    note: Callable[[], None],
) -> Victims:
    """Kill the victims; criu and the processes `found` stand still. note: looks again, before the
    second dies. Returns who died of it: the second may have ended by itself."""
    died = victim
    if victim in (Victims.WORKER, Victims.WORKER_FIRST, Victims.BOTH):
        signal_all(found, signal.SIGKILL)
    if victim in (Victims.CRIU, Victims.BOTH, Victims.CRIU_FIRST):
        criu.kill()
        criu.wait()
    if victim is Victims.CRIU:  # what it has begun goes on from where it stood
        signal_all(found, signal.SIGCONT)
    if victim is Victims.CRIU_FIRST:
        signal_all(found, signal.SIGCONT)
        time.sleep(later_s)
        signal_all(found, signal.SIGSTOP)
        note()
        if not any(_is_there(pid) for pid in found):
            died = Victims.CRIU
        signal_all(found, signal.SIGKILL)
    if victim in (Victims.WORKER, Victims.WORKER_FIRST):
        criu.send_signal(signal.SIGCONT)
    if victim is Victims.WORKER:
        criu.wait(CRIU_TIMEOUT_S)
    if victim is Victims.WORKER_FIRST:
        time.sleep(later_s)
        if stop(criu):
            note()
            criu.kill()
            criu.wait()
        else:
            died = Victims.WORKER
    return died


def stop(criu: subprocess.Popen[bytes]) -> bool:
    """Returns when it stands still; False: it had ended."""
    if criu.poll() is not None:
        return False
    criu.send_signal(signal.SIGSTOP)
    events = os.WSTOPPED | os.WEXITED | os.WNOWAIT
    found = os.waitid(os.P_PID, criu.pid, events)
    return found is not None and found.si_code == os.CLD_STOPPED


def signal_all(pids: Sequence[int], number: signal.Signals) -> None:
    """SIGSTOP: returns when all their threads stand still."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    deadline = time.monotonic() + CRIU_TIMEOUT_S
    while number is signal.SIGSTOP and any(_runs(pid) for pid in pids):
        assert time.monotonic() < deadline, f"do not stop: {[*map(_states, pids)]}"
        time.sleep(WATCH_S)


def _is_there(pid: int) -> bool:
    """And has not ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat[stat.rindex(")") + 2] not in "ZX"
    return False


def _states(pid: int) -> list[str]:
    """Of each thread of a process: its number and name, its state, and what it waits for."""
    found = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in sorted(Path(f"/proc/{pid}/task").iterdir()):
            stat, waits = (task / "stat").read_text(), (task / "wchan").read_text()
            found.append(f"{stat[: stat.rindex(')') + 3]} in {waits}")
    return found


def _runs(pid: int) -> bool:
    """Some thread of it does."""
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            stat = (task / "stat").read_text()
            if stat[stat.rindex(")") + 2] not in "TtZX":
                return True
    return False


def kill_one(process: subprocess.Popen[bytes]) -> bool:
    """Whether it died of it, and had not ended before."""
    process.kill()
    return process.wait(CRIU_TIMEOUT_S) == -signal.SIGKILL


def kill_or_done(process: subprocess.Popen[bytes], what: str) -> bool:
    """The same of one that succeeds if nobody kills it. Raises AssertionError."""
    died = kill_one(process)
    assert died or process.returncode == 0, (
        f"nobody had killed {what}, and it ended with {process.returncode}"
    )
    return died
