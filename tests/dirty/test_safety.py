# SPDX-License-Identifier: Apache-2.0
"""A tracker comes and goes, or dies at any moment: the process that it looks at notices nothing."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpustasis._core import DirtyTracker, UnsupportedDataError
from support.dirty_target import PAGE, Target, running

WAIT_MS = 9000
TRACKED_MS = 6000  # of these trackers come and go
LATE_MS = 5000  # of a machine that is busy: less than a wait takes that each tracker begins anew
BEGUN_ANEW = ("epoll", "sigtimedwait")  # as src/dirty_tracker/userfault.cpp does with them
FOREVER = "exec sleep 1000"


@pytest.fixture(scope="session")
def program(compile_c: Callable[..., Path], repository: Path) -> Path:
    return compile_c(repository / "tests/programs/dirty_target.c")


@pytest.fixture
def blocked(
    compile_c: Callable[..., Path], repository: Path
) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """blocked(mode, ms=WAIT_MS) -> the process, which is about to wait."""
    source = compile_c(repository / "tests/programs/blocked_calls.c", "-pthread")
    started: list[subprocess.Popen[str]] = []

    def start(mode: str, ms: int = WAIT_MS) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [source, mode, str(ms)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.02)  # into its call
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def status(pid: int, key: str) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.split(":", 1)[1].strip() for line in lines if line.startswith(key + ":"))


def wait_for_state(pid: int, letter: str) -> None:
    deadline = time.monotonic() + 60
    while not status(pid, "State").startswith(letter):
        assert time.monotonic() < deadline, status(pid, "State")
        time.sleep(0.001)


def registered(pid: int) -> int:
    """How many mappings are registered with a userfaultfd for write-protection."""
    text = Path(f"/proc/{pid}/smaps").read_text()
    flags = [line.split() for line in text.splitlines() if line.startswith("VmFlags:")]
    return sum("uw" in words for words in flags)


@pytest.mark.parametrize(
    "mode", ["sleep", "poll", "epoll", "futex", "sigtimedwait", "compute", "seccomp"]
)
def test_a_waiting_thread_waits_on(
    blocked: Callable[..., subprocess.Popen[str]], mode: str
) -> None:
    begun = time.monotonic()
    process = blocked(mode)
    end = time.monotonic() + TRACKED_MS / 1000
    while time.monotonic() < end:
        try:
            with DirtyTracker(process.pid, "write-protect") as tracker:
                tracker.mark()
                assert tracker.scan(remark=True).tracked_bytes > 0
        except ProcessLookupError:  # so late are we; how it has ended is seen below
            assert time.monotonic() - begun >= WAIT_MS / 1000
            wait_for_state(process.pid, "Z")
            break
        time.sleep(0.01)
    output, _ = process.communicate(timeout=30)
    word, took = output.split()
    assert word == "good", output
    longest = WAIT_MS + LATE_MS + (TRACKED_MS if mode in BEGUN_ANEW else 0)
    assert WAIT_MS - 1 <= int(took) <= longest
    assert process.returncode == 0


def test_a_thread_in_a_read_gets_its_byte(blocked: Callable[..., subprocess.Popen[str]]) -> None:
    process = blocked("read")
    for _ in range(5):
        DirtyTracker(process.pid, "write-protect").close()
    output, _ = process.communicate("x", timeout=30)
    assert output.startswith("good "), output


def test_a_process_without_its_main_thread_is_refused(
    blocked: Callable[..., subprocess.Popen[str]],
) -> None:
    process = blocked("exited")
    wait_for_state(process.pid, "Z")  # its other thread has said "ready"
    with pytest.raises(UnsupportedDataError, match="main thread has ended"):
        DirtyTracker(process.pid)
    output, _ = process.communicate(timeout=30)
    assert output.startswith("good "), output


def test_no_signal_is_lost(blocked: Callable[..., subprocess.Popen[str]]) -> None:
    process = blocked("signals", 120_000)
    sent = 0
    begin = time.monotonic()
    while (sent <= 20 or time.monotonic() < begin + 1) and time.monotonic() < begin + 60:
        os.kill(process.pid, signal.SIGUSR1)
        sent += 1
        DirtyTracker(process.pid, "write-protect").close()
        while int(status(process.pid, "ShdPnd"), 16) | int(status(process.pid, "SigPnd"), 16):
            time.sleep(0.001)  # two pending ones of the same number would be one
    os.kill(process.pid, signal.SIGUSR2)  # it has counted all
    output, _ = process.communicate(timeout=30)
    assert output == f"good {sent}\n"
    assert sent > 20


def wait_until_stopped(pid: int) -> None:
    """Let go of by ptrace, a stopped thread runs into its stop again, and nowhere else."""
    wait_for_state(pid, "T")


def test_a_stopped_process_stays_stopped(program: Path) -> None:
    with running(program) as target:
        assert target.ask("fds")  # it has come to wait for commands
        os.kill(target.pid, signal.SIGSTOP)
        os.waitpid(target.pid, os.WUNTRACED)
        with DirtyTracker(target.pid, "write-protect") as tracker:
            tracker.mark()
            wait_until_stopped(target.pid)
            assert tracker.scan().dirty_bytes == 0
        wait_until_stopped(target.pid)
        time.sleep(0.05)
        assert status(target.pid, "State").startswith("T")
        os.kill(target.pid, signal.SIGCONT)
        assert target.ask("fds")


def test_nothing_is_left_in_the_process(program: Path) -> None:
    with running(program) as target:
        before = target.ask("fds")
        with DirtyTracker(target.pid, "write-protect") as tracker:
            tracker.mark()
            assert target.ask("fds") == before
            assert registered(target.pid) > 3
            assert status(target.pid, "TracerPid") == "0"
        assert registered(target.pid) == 0
        assert target.ask("fds") == before
        assert target.end() == 0


def test_a_second_tracker_is_told_what_it_cannot_see(program: Path) -> None:
    with running(program) as target:
        address = target.number("map", "p", 100)
        target.ask("write", *(address + page * PAGE for page in range(100)))
        with DirtyTracker(target.pid, "write-protect") as first:
            first.mark()
            with DirtyTracker(target.pid, "write-protect") as second:
                pages = second.scan()
                assert pages.dirty_bytes == 0
                assert pages.untracked_bytes >= 100 * PAGE
            target.ask("write", address)
            assert (address, PAGE) in first.scan().ranges


def test_a_process_under_a_debugger_is_refused(program: Path) -> None:
    with running(program) as target:
        source = (
            "import ctypes, sys, time\n"
            f"assert ctypes.CDLL(None).ptrace(0x4206, {target.pid}, None, None) == 0\n"
            "print('seized', flush=True)\ntime.sleep(1000)\n"
        )
        debugger = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE)
        try:
            assert debugger.stdout is not None
            assert debugger.stdout.readline() == b"seized\n"
            with pytest.raises(
                UnsupportedDataError, match=f"traced by process {debugger.pid} already"
            ):
                DirtyTracker(target.pid, "write-protect")
        finally:
            debugger.kill()
            debugger.communicate()
        assert target.ask("fds")


def test_exit_and_exec_have_clear_ends(program: Path) -> None:
    with running(program) as target, DirtyTracker(target.pid) as tracker:
        tracker.mark()
        target.tell("exec", FOREVER)
        deadline = time.monotonic() + 60
        with pytest.raises(ProcessLookupError, match="executed another program"):
            while time.monotonic() < deadline:
                tracker.scan()
        target.process.kill()
        target.process.wait()
        with pytest.raises(ProcessLookupError, match="has ended"):
            tracker.scan()
        with pytest.raises(ProcessLookupError, match="there is no process"):
            DirtyTracker(target.pid)


def test_an_exec_while_tracked_runs(program: Path) -> None:
    with running(program) as target, DirtyTracker(target.pid) as tracker:
        tracker.mark()
        target.tell("exec", "echo it runs")
        assert target.answer() == "it runs"


KILLED_TRACKER = """
import sys
from gpustasis._core import DirtyTracker
print("up", flush=True)
while True:
    with DirtyTracker(int(sys.argv[1]), "write-protect") as tracker:
        tracker.mark()
        tracker.scan(remark=True)
"""
KILLS = 40


def storm(target: Target, address: int, pages: int) -> None:
    """Start 200,000 writes; their sum is known, as each adds one, modulo 256 per byte."""
    target.tell("storm", address, pages * PAGE, 200_000)


def test_a_killed_tracker_harms_nobody(program: Path) -> None:
    """Two processes get the same writes; one of them has trackers that are killed."""
    choice = random.Random(1)
    pages = 512
    with running(program) as target, running(program) as twin:
        before = target.ask("fds")
        addresses = [each.number("map", "p", pages) for each in (target, twin)]
        blocked_before = status(target.pid, "SigBlk")
        for _ in range(KILLS):
            tracker = subprocess.Popen(
                [sys.executable, "-c", KILLED_TRACKER, str(target.pid)], stdout=subprocess.PIPE
            )
            try:
                assert tracker.stdout is not None
                assert tracker.stdout.readline() == b"up\n"
                for each, address in zip((target, twin), addresses, strict=True):
                    storm(each, address, pages)
                time.sleep(choice.uniform(0.0, 0.03))
            finally:
                tracker.kill()
                tracker.communicate()
            for each in (target, twin):
                assert each.answer() == "ok"
            target.ask("fds")  # it has come back from wherever the tracker left it
            assert status(target.pid, "SigBlk") == blocked_before
            assert status(target.pid, "TracerPid") == "0"
        span = [(address, pages * PAGE) for address in addresses]
        assert target.number("sum", *span[0]) == twin.number("sum", *span[1])
        assert registered(target.pid) == 0
        with DirtyTracker(target.pid, "write-protect") as after:
            assert target.ask("fds") == before  # whatever they have left
            after.mark()
            target.ask("write", addresses[0])
            assert (addresses[0], PAGE) in after.scan().ranges
        assert target.end() == 0
