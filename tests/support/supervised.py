# SPDX-License-Identifier: Apache-2.0
"""A supervisor of a job, `python -m gpustasis.jit`, as a test starts it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

TIMEOUT_S = 120.0
POLL_S = 0.02


class Supervised:
    """One run of it. Its stdout, which is the job's, is in `out`; what it says itself in `err`."""

    def __init__(self, place: Path, *words: object, environ: Mapping[str, str]) -> None:
        self.out = place / f"out-{time.monotonic_ns()}"
        self.err = self.out.with_name(self.out.name.replace("out", "err"))
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gpustasis.jit", *map(str, words)],
                cwd=place,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def said(self) -> str:
        return self.err.read_text()

    def wrote(self) -> list[str]:
        """The lines of the job, as far as they are complete."""
        return self.out.read_text().split("\n")[:-1]

    def wait_for(self, text: str) -> None:
        """Until one of them has said it. Fails if the supervisor ends before."""
        deadline = time.monotonic() + TIMEOUT_S
        while text not in self.out.read_text() + self.said():
            ended = self.process.poll() is not None
            if ended and text not in self.out.read_text() + self.said():
                raise AssertionError(
                    f"ended without {text!r}:\n{self.said()}{self.out.read_text()}"
                )
            if time.monotonic() > deadline:
                raise AssertionError(f"no {text!r}:\n{self.said()}{self.out.read_text()}")
            time.sleep(POLL_S)

    def tell_to_end(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        return self.process.wait(TIMEOUT_S)

    def root(self) -> int:
        """The pid of the job's root, as the supervisor says it."""
        self.wait_for("gpustasis.jit: process ")
        line = next(
            line for line in self.said().splitlines() if line.startswith("gpustasis.jit: process ")
        )
        return int(line.split()[2])

    def close(self) -> None:
        """Kill what is left of it and of its job."""
        if self.process.poll() is None:
            pids = [int(pid) for pid in children(self.pid)]
            self.process.kill()
            self.process.wait()
            for pid in pids:
                end_session(pid)


def soon(wrote: list[str]) -> str:
    """A line of tests/programs/pair.py that comes a little later than all that was written. Of one
    that was cut in two by a dump it counts neither part."""
    whole = [line for line in wrote if re.fullmatch(r"\d+ \d+", line)]
    return f"\n{int(whole[-1].split()[0]) + 5} "


def children(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []


def end_session(pid: int) -> None:
    """Kill the processes of the group that `pid` leads, and collect it if it has come to us."""
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            if os.waitpid(pid, os.WNOHANG)[0]:
                return
        except ChildProcessError:
            if not Path(f"/proc/{pid}").exists():
                return
        time.sleep(POLL_S)
