# SPDX-License-Identifier: Apache-2.0
"""tests/programs/steady_job.c under way: a tree that says at every step that its memory is
right."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from support.job import POLL_S, TIMEOUT_S, Job

_STEP = re.compile(r"(\d+) step \d+ ok\n")
_RESTORE_THREAD = re.compile(r"cuda[0-9a-f]{11}")
# Names of its processes, whichever program it is, and of one that criu, perhaps on a loader, has
# only begun to make.
_NAMES = (
    "steady_job",
    "memory_job",
    "shared_job",
    "marked_job",
    "tiny_job",
    "criu",
    "ld-linux-x86-64",
)
_EMULATOR = "gpustasis driver emulator: "  # what the emulator says of itself on stderr


@dataclass(frozen=True, slots=True)
class Thread:
    """What a checkpoint must leave as it was: name and blocked signals of one thread."""

    name: str
    blocked: str


class SteadyJob(Job):
    """pids: every process of the tree, the root first."""

    def __init__(
        self,
        program: Path,
        log: Path,
        environ: Mapping[str, str],
        **options: int | str | Path,
    ) -> None:
        """Start it and wait until each of its processes has made two steps.

        options: the program's, with "_" for "-": mib, pinned_kib, registered_kib, children,
        plain_children, plain_threads, seed, cuda, module, streams, late_children, forked_children,
        alike, shared_mib, gpus.
        """
        words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        argv = [str(program), *(part for word in words for part in word.split("="))]
        super().__init__(argv, log, environ)
        self.pids: tuple[int, ...] = (self.pid,)
        self._ends: dict[int, int] = {}  # of those that were waited for
        kinds = ("children", "plain_children", "late_children", "forked_children")
        processes = 1 + sum(int(str(options.get(kind, 0))) for kind in kinds)
        deadline = time.monotonic() + TIMEOUT_S
        while len(steps := self.steps()) < processes or min(steps.values()) < 2:
            if not self.alive() or time.monotonic() > deadline:
                self.end()
                raise AssertionError(f"the job does not start:\n{self.output()}")
            time.sleep(POLL_S)
        self.pids = (self.pid, *sorted(pid for pid in steps if pid != self.pid))

    def steps(self) -> Counter[int]:
        """Steps said to be right, by process. Fails if the job has said anything else."""
        found: Counter[int] = Counter()
        for line in self.output().splitlines(keepends=True):
            # The last may still be on its way into the file: a write is seen page by page.
            if line.startswith(_EMULATOR) or not line.endswith("\n"):
                continue
            step = _STEP.fullmatch(line)
            assert step is not None, f"the job says {line!r}"
            found[int(step[1])] += 1
        return found

    def run_on(
        self, steps: int = 3, timeout_s: float = 20.0, without: Collection[int] = ()
    ) -> None:
        """Wait until each process, but those in `without`, has made that many steps more, each of
        them right."""
        pids = [pid for pid in self.pids if pid not in without]
        before = self.steps()
        deadline = time.monotonic() + timeout_s
        while True:
            now = self.steps()
            behind = [pid for pid in pids if now[pid] < before[pid] + steps]
            if not behind:
                return
            gone = set(pids) - set(self.alive_pids())
            if gone or time.monotonic() > deadline:
                raise AssertionError(
                    "the job does not run on: " + "; ".join(describe(pid) for pid in behind)
                )
            time.sleep(POLL_S)

    def run_on_elsewhere(self, steps: int = 3, timeout_s: float = 20.0) -> None:
        """The same of one that was restored in another pid namespace, under the same pids."""
        before = self.steps()
        deadline = time.monotonic() + timeout_s
        while any(self.steps()[pid] < before[pid] + steps for pid in self.pids):
            assert time.monotonic() < deadline, "the job makes no steps where it was restored"
            time.sleep(POLL_S)

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """As of a Job; the rest of the tree, which has come to us, is waited for as well."""
        status = super().wait(timeout_s)
        self._ends[self.pid] = status
        self.reap()
        return status

    def reap(self) -> None:
        """Wait for the zombies of the tree, so that its pids are free for a restore."""
        for pid in self.pids:
            try:
                while process_state(pid) in ("Z", "X"):
                    found, status = os.waitpid(pid, os.WNOHANG)
                    if found:
                        self._ends[pid] = os.waitstatus_to_exitcode(status)
                        break
                    time.sleep(POLL_S)
            except ChildProcessError:  # its parent's, which is about to go
                continue

    def end(self) -> None:
        """As of a Job; what a restore has half made, in no session yet, is ended as well."""
        for pid in self.pids:
            try:
                if Path(f"/proc/{pid}/comm").read_text().strip() in _NAMES:
                    os.kill(pid, signal.SIGKILL)
            except (FileNotFoundError, ProcessLookupError):
                continue
        super().end()
        deadline = time.monotonic() + TIMEOUT_S
        while left := [pid for pid in self.pids if process_state(pid)]:
            assert time.monotonic() < deadline, "; ".join(describe(pid) for pid in left)
            self.reap()
            time.sleep(POLL_S)

    def ended(self) -> dict[int, int | None]:
        """Of the tree, those that have: the exit status, or minus the signal that killed it; None:
        nobody knows, as somebody else has waited for it."""
        found: dict[int, int | None] = {}
        for pid in self.pids:
            if not is_alive(pid):
                found[pid] = self._ends.get(pid)
                with suppress(FileNotFoundError, ProcessLookupError):
                    found[pid] = exit_status(pid)
        return found

    def alive_pids(self) -> list[int]:
        return [pid for pid in self.pids if is_alive(pid)]

    def threads(self) -> dict[int, Thread]:
        """Every thread of the tree. Fails if one of them is traced."""
        found = {}
        for pid in self.pids:
            for task in Path(f"/proc/{pid}/task").iterdir():
                try:
                    status = (task / "status").read_text()
                except (FileNotFoundError, ProcessLookupError):
                    continue  # a helper thread that has ended meanwhile
                values = dict(re.findall(r"^(\w+):\s*(.*)$", status, re.MULTILINE))
                assert values["TracerPid"] == "0", f"thread {task.name} is traced"
                found[int(task.name)] = Thread(name=values["Name"], blocked=values["SigBlk"])
        return found


def process_state(pid: int) -> str:
    """As in /proc/PID/stat; "" if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return stat[stat.rindex(")") + 2]


def is_alive(pid: int) -> bool:
    """It runs, sleeps or stands; a zombie does not count."""
    return process_state(pid) not in ("", "Z", "X")


def restore_thread(pid: int) -> Path | None:
    """The /proc directory of the thread through which the driver checkpoints a process; None
    before cuInit."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            if _RESTORE_THREAD.fullmatch((task / "comm").read_text().strip()):
                return task
    return None


def exit_status(pid: int) -> int:
    """Of a zombie: its exit status, or minus the signal that killed it."""
    code = int(Path(f"/proc/{pid}/stat").read_text().split()[-1])  # exit_code, proc(5)
    return os.waitstatus_to_exitcode(code)


def describe(pid: int) -> str:
    """State, tracer and place of each thread, and how it ended if it has, for a message."""
    parts = []
    try:
        if process_state(pid) in ("Z", "X"):
            return f"pid {pid}: ended, {exit_status(pid)}"
        for task in Path(f"/proc/{pid}/task").iterdir():
            status = (task / "status").read_text()
            state, tracer = (
                re.search(rf"^{key}:\s*(\S+)", status, re.MULTILINE)
                for key in ("State", "TracerPid")
            )
            assert state is not None and tracer is not None
            place = (task / "wchan").read_text()
            name = (task / "comm").read_text().strip()
            parts.append(f"{task.name} {name} {state[1]} traced by {tracer[1]} in {place}")
    except (FileNotFoundError, ProcessLookupError):
        parts.append("gone")
    return f"pid {pid}: " + ", ".join(parts)
