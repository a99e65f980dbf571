# SPDX-License-Identifier: Apache-2.0
"""What the kill campaigns take for CRIU's own loss: nothing but what is proved to be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from campaigns import criu_code, losses
from campaigns.steady_job import exit_status, process_state
from campaigns.tally import Tally

ROOT, CHILD, OTHER = 0, 1, 2
TRAP, SEGV, KILL = signal.SIGTRAP, signal.SIGSEGV, signal.SIGKILL
WAIT_S = 60.0  # a busy machine takes long to start a program
SLEEPS = {"35", "230", "270"}  # numbers of system calls on x86-64: whatever sleep() uses
# In memory of CRIU's name: wait for a signal, again and again.
_WAITS_IN_BLOB = """
import ctypes, mmap, os
code = bytes.fromhex("b8220000000f05ebf7")  # again: mov $34 (pause), %eax; syscall; jmp again
file = os.memfd_create("CRIUMFD" if {named} else "other")
os.write(file, code.ljust(4096))
memory = mmap.mmap(file, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
enter = ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
enter() if {enters} else __import__("time").sleep(60)
"""


class Tree:
    """Three processes. late: one that ends, of a signal, only when it is asked to run on."""

    def __init__(self, late: Mapping[int, int], hangs: bool) -> None:
        self._processes = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
        self.pids = tuple(process.pid for process in self._processes)
        self._late, self._hangs = dict(late), hangs

    def kill(self, which: int, number: int) -> None:
        pid = self.pids[which]
        os.kill(pid, number)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    def ended(self) -> dict[int, int | None]:
        return {pid: exit_status(pid) for pid in self.pids if process_state(pid) == "Z"}

    def run_on(self, *, without: Collection[int]) -> None:
        while self._late:
            self.kill(*self._late.popitem())
        gone = self.ended().keys() - set(without)
        assert not gone and not self._hangs, f"{gone} do not run on"

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


@contextmanager
def tree_of(late: Mapping[int, int], hangs: bool) -> Iterator[Tree]:
    tree = Tree(late, hangs)
    try:
        yield tree
    finally:
        tree.close()


def judged(
    deaths: Mapping[int, int],
    stood: Collection[int],
    phase: str = losses.CRIUS_PHASE,
    late: Mapping[int, int] | None = None,
    hangs: bool = False,
) -> losses.Loss:
    """Of a tree in which these died of these signals, and in which CRIU's code stood there."""
    with tree_of(late or {}, hangs) as tree:
        for which, number in deaths.items():
            tree.kill(which, number)
        return losses.judge_in(phase, tree, {tree.pids[which]: "it stood there" for which in stood})


@pytest.mark.parametrize(
    ("deaths", "stood"),
    [
        ({CHILD: TRAP}, [CHILD]),
        ({CHILD: SEGV}, [CHILD, OTHER]),
        ({CHILD: TRAP, OTHER: SEGV}, [CHILD, OTHER]),
        ({ROOT: TRAP, CHILD: KILL, OTHER: KILL}, [ROOT]),
        ({ROOT: TRAP, CHILD: SEGV, OTHER: KILL}, [ROOT, CHILD]),
    ],
)
def test_a_loss_of_crius(deaths: dict[int, int], stood: list[int]) -> None:
    assert judged(deaths, stood).lacks == ""


@pytest.mark.parametrize(
    ("deaths", "stood", "lacks"),
    [
        ({}, [CHILD], "the job hangs"),
        ({CHILD: TRAP}, [], "no code of CRIU's was seen in pid"),
        ({CHILD: TRAP}, [OTHER], "no code of CRIU's was seen in pid"),
        # Somebody else killed another one beside CRIU's victim.
        ({CHILD: TRAP, OTHER: KILL}, [CHILD], "not how CRIU's code in a task ends"),
        ({CHILD: TRAP, OTHER: KILL}, [CHILD, OTHER], "not how CRIU's code in a task ends"),
        ({CHILD: TRAP, OTHER: SEGV}, [CHILD], "no code of CRIU's was seen in pid"),
        ({CHILD: KILL}, [CHILD], "not how CRIU's code in a task ends"),
        ({ROOT: KILL, CHILD: KILL, OTHER: KILL}, [ROOT], "not how CRIU's code in a task ends"),
        ({ROOT: TRAP, CHILD: TRAP, OTHER: KILL}, [ROOT], "no code of CRIU's was seen in pid"),
        ({CHILD: signal.SIGABRT}, [CHILD], "not how CRIU's code in a task ends"),
    ],
)
def test_a_loss_that_may_be_ours(deaths: dict[int, int], stood: list[int], lacks: str) -> None:
    loss = judged(deaths, stood)
    assert lacks in loss.lacks
    assert len(loss.deaths) == len(deaths)


@pytest.mark.parametrize("phase", ["start", "collect", "refill", "end"])
def test_no_loss_in_another_phase_is_crius(phase: str) -> None:
    assert "in this phase no code of CRIU's" in judged({CHILD: TRAP}, [CHILD], phase).lacks


def test_who_is_left_must_run_on() -> None:
    assert "the others do not run on" in judged({CHILD: TRAP}, [CHILD], hangs=True).lacks


def test_what_another_death_has_suspended_need_not_run_on() -> None:
    """As a task that the driver has given up, when the worker died after criu."""
    with tree_of({}, hangs=False) as tree:
        tree.kill(CHILD, TRAP)
        asked: list[set[int]] = []
        tree.run_on = lambda *, without: asked.append(set(without))  # type: ignore[method-assign]
        child, other = tree.pids[CHILD], tree.pids[OTHER]
        loss = losses.judge_in(losses.CRIUS_PHASE, tree, {child: "it stands there"}, {other})
        assert loss.lacks == "" and set(loss.deaths) == {child}
        assert asked == [{child, other}]
        assert losses.judge_in(losses.CRIUS_PHASE, tree, {}, {child}).lacks


def test_what_dies_later_is_judged_as_well() -> None:
    late = {OTHER: TRAP}
    assert judged({CHILD: TRAP}, [CHILD, OTHER], late=late).lacks == ""
    assert "no code of CRIU's was seen" in judged({CHILD: TRAP}, [CHILD], late=late).lacks
    killed = judged({CHILD: TRAP}, [CHILD], late={OTHER: KILL})
    assert "not how CRIU's code in a task ends" in killed.lacks


def test_children_that_outlive_their_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "_END_S", 0.1)
    assert "outlive their root" in judged({ROOT: TRAP, CHILD: KILL}, [ROOT]).lacks


def test_of_what_a_job_was_lost() -> None:
    assert losses.Loss({}, "").of_what == "a hang"
    assert losses.Loss({1: "SIGTRAP", 2: "SIGKILL"}, "").of_what == "SIGTRAP"
    assert losses.Loss({1: "SIGKILL"}, "").of_what == "SIGKILL"


@pytest.mark.parametrize("phase", ["in dump tasks", "the dump in dump tasks"])
@pytest.mark.parametrize(
    ("lost", "tried", "few"),
    [
        *((1, 1, True), (2, 5, False), (2, 6, True), (4, 10, False)),
        *((1, 22, True), (2, 10, True), (4, 62, True), (21, 62, False)),
        *((14, 62, True), (15, 62, False), (9, 30, True), (10, 30, False), (1, 0, True)),
    ],
)
def test_many_proofs_are_none(phase: str, lost: int, tried: int, few: bool) -> None:
    """Of those that were hit where CRIU's code can stand in a task: many others were hit, too."""
    counts = {"trials": 200 + tried, phase: tried, "LOST to SIGTRAP, CRIU's": lost}
    tally = Tally(Counter(counts))
    losses.limit(tally)
    assert (tally.failures == []) == few


def test_the_bound_is_what_chance_leaves() -> None:
    """By a table of the binomial distribution, p = 0.1: so many at most in 999 of 1000 cases. Of a
    few, a third is less."""
    assert [losses.most(tried) for tried in (0, 1, 3, 6, 10, 20)] == [1, 1, 1, 2, 3, 6]
    assert [losses.most(tried) for tried in (30, 50, 100)] == [9, 13, 20]


@contextmanager
def waiting(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(words)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def place_of(pid: int, numbers: Collection[str]) -> int:
    """The instruction pointer of one that waits in such a system call, when it has come there."""
    deadline = time.monotonic() + WAIT_S
    while (words := Path(f"/proc/{pid}/syscall").read_text().split())[0] not in numbers:
        assert time.monotonic() < deadline, words
        time.sleep(0.01)
    return int(words[-1], 16)


@pytest.mark.parametrize(
    ("named", "enters", "found"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_who_stands_in_crius_blob(named: bool, enters: bool, found: bool) -> None:
    code = _WAITS_IN_BLOB.format(named=named, enters=enters)
    with waiting(sys.executable, "-c", code) as process:
        place_of(process.pid, {"34"} if enters else SLEEPS)  # pause
        assert ("stands in CRIUMFD" in criu_code.proof(process.pid)) == found
        assert list(criu_code.proofs((process.pid, os.getpid()))) == [process.pid] * found


def test_who_stands_at_a_breakpoint_that_is_not_of_its_file() -> None:
    with waiting("sleep", "60") as process:
        place = place_of(process.pid, SLEEPS)
        assert criu_code.proof(process.pid) == ""
        with open(f"/proc/{process.pid}/mem", "r+b", buffering=0) as memory:
            memory.seek(place)
            memory.write(b"\xcc")
        assert "stands at a breakpoint" in criu_code.proof(process.pid)
