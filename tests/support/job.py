# SPDX-License-Identifier: Apache-2.0
"""A program under test: started in a session of its own, dumped, restored, and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from gpustasis.recovery import GUARDIAN_COMM, WORKER_COMM

POLL_S = 0.01
TIMEOUT_S = 30.0


class Job:
    """A program and, after a restore, the process that CRIU made of it: both have the same pid.

    Its stdin is empty; stdout and stderr go to `log`. The test process is its parent before and,
    being a subreaper (tests/conftest.py), after a restore, and so learns how it ended.
    """

    def __init__(self, argv: Sequence[str | Path], log: Path, environ: Mapping[str, str]) -> None:
        """Start argv; argv[0] is a path. log is created; environ is the whole environment."""
        words = [str(word) for word in argv]
        self.log = log
        write = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        self.pid = os.posix_spawn(
            words[0],
            words,
            dict(environ),
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(log), write, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
        )

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, text: str, *, count: int = 1, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until the output holds `text` at least `count` times. Fails if the job ends
        first."""
        deadline = time.monotonic() + timeout_s
        while self.output().count(text) < count:
            if not self.alive() and self.output().count(text) < count:
                raise AssertionError(f"the job ended without {text!r} x{count}:\n{self.output()}")
            if time.monotonic() > deadline:
                raise AssertionError(f"no {text!r} x{count} in {timeout_s} s:\n{self.output()}")
            time.sleep(POLL_S)

    def state(self) -> str:
        """As in /proc/PID/stat: "R", "S", "T" (stopped), "t" (traced), "Z"; "" if it is gone."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return ""
        return stat[stat.rindex(")") + 2]

    def await_stopped(self) -> None:
        """Who sends SIGSTOP is told nothing of when it arrives: a busy machine takes a moment."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.state() != "T":
            assert time.monotonic() < deadline, (
                f"the job does not stop, its state is {self.state()!r}"
            )
            time.sleep(POLL_S)

    def alive(self) -> bool:
        """It runs, sleeps or stands; a zombie does not count."""
        return self.state() not in ("", "Z", "X")

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """Wait for its end: its exit status, or minus the signal that killed it."""
        deadline = time.monotonic() + timeout_s
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > deadline:
                raise AssertionError(f"the job did not end in {timeout_s} s:\n{self.output()}")
            time.sleep(POLL_S)

    def end(self) -> None:
        """Kill it and its session, if there is anything left of it."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with suppress(ChildProcessError):  # reaped already
            self.wait()


def check_memory(job: Job, generation: int) -> None:
    """gpu_generations.c runs, and its GPU memory is what it wrote, to the bit."""
    job.signal(signal.SIGUSR1)
    job.wait_for(f"intact {generation}\n")


@contextmanager
def ended(program: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """The program, which is killed at the end of the with statement: one that a failed test leaves
    hanging would be waited for."""
    with program:
        try:
            yield program
        finally:
            program.kill()


def reap_workers() -> None:
    """Collect the plugin's workers that have ended and come to us as subreaper; nobody else will.
    Other children are left: who started them waits for them."""
    for pid in children_named(WORKER_COMM, GUARDIAN_COMM):
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def pids_by(is_one: Callable[[bytes], bool]) -> list[int]:
    """Of processes with such a command line."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if is_one(Path(f"/proc/{entry}/cmdline").read_bytes()):
                found.append(int(entry))
    return sorted(found)


def children_named(*names: str) -> list[int]:
    """Of this process, zombies as well."""
    found = []
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        with suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{pid}/comm").read_text().strip() in names:
                found.append(int(pid))
    return found
