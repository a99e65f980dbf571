# SPDX-License-Identifier: Apache-2.0
"""The script that criu waits in, called as criu calls it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpustasis.criu.find import Criu
from gpustasis.jobs.gate import Gate, unsignalled
from support.job_ranks import wait_for

START_MS = 30


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    place = tmp_path / "a place with blanks"
    place.mkdir()
    gate = Gate(place, tmp_path / "script")
    gate.prepare("post-dump")
    return gate


@contextmanager
def criu(gate: Gate, action: str) -> Iterator[subprocess.Popen[bytes]]:
    """At its action scripts."""
    environ = {"CRTOOLS_SCRIPT_ACTION": action, "PATH": os.defpath}
    with subprocess.Popen([gate.script], env=environ) as script:
        try:
            yield script
        finally:
            script.kill()


def wait_until_held(gate: Gate) -> None:
    deadline = time.monotonic() + 10
    while not gate.is_held():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("yes", [True, False])
def test_it_waits_for_the_decision_and_passes_it_on(gate: Gate, yes: bool) -> None:
    assert not gate.is_held()
    assert not gate.say(yes=yes)  # nobody hears it, and it is not kept for later
    arrival = gate.listen()
    with criu(gate, "post-dump") as script:
        assert arrival.wait(10)
        arrival.close()  # a keeper that ends changes nothing
        time.sleep(0.1)
        assert script.poll() is None
        assert gate.is_held()
        assert gate.say(yes=yes)
        assert (script.wait(10) == 0) is yes
    assert not gate.is_held()


def test_other_actions_are_none_of_its_business(gate: Gate) -> None:
    with criu(gate, "pre-dump") as script:
        assert script.wait(10) == 0


def test_a_script_that_is_killed_is_a_no(gate: Gate) -> None:
    with criu(gate, "post-dump") as script:
        wait_until_held(gate)
        script.send_signal(signal.SIGKILL)
        assert script.wait(10) != 0
    assert not gate.is_held()


@pytest.mark.parametrize("name", ["HUP", "INT", "QUIT", "ALRM", "TERM", "USR1", "USR2", "PIPE"])
def test_what_ends_a_keeper_ends_no_script_and_no_criu(gate: Gate, name: str) -> None:
    number = signal.Signals[f"SIG{name}"]
    with criu(gate, "post-dump") as script:
        wait_until_held(gate)
        script.send_signal(number)
        time.sleep(0.05)
        assert script.poll() is None
        assert gate.say(yes=True)
        assert script.wait(10) == 0
    sleep = Criu(program=Path("/bin/sleep"), root=None, version=(4, 2), origin="test")
    with subprocess.Popen([*unsignalled(sleep).command(os.environ), "1000"]) as program:
        try:
            comm = Path(f"/proc/{program.pid}/comm")
            wait_for(lambda: comm.read_text() == "sleep\n", "sleep")
            program.send_signal(number)
            time.sleep(0.05)
            assert program.poll() is None
        finally:
            program.kill()


def test_where_nothing_may_be_written_criu_does_not_go_on(gate: Gate, tmp_path: Path) -> None:
    for fifo in (tmp_path / "a place with blanks").iterdir():
        fifo.unlink()
    (tmp_path / "a place with blanks").rmdir()
    with criu(gate, "post-dump") as script:
        assert script.wait(10) != 0


def test_it_is_there_at_once(gate: Gate) -> None:
    """The best of many: what the machine is busy with otherwise is not its time."""
    best = 1e9
    for _ in range(100):
        arrival = gate.listen()
        begin = time.monotonic()
        with criu(gate, "post-dump") as script:
            assert arrival.wait(10)
            best = min(best, time.monotonic() - begin)
            os.read(arrival.fileno(), 100)
            arrival.close()
            gate.say(yes=True)
            script.wait(10)
        if best * 1000 <= START_MS:
            break
    assert best * 1000 <= START_MS
