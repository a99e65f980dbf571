# SPDX-License-Identifier: Apache-2.0
"""Who has died of those that the kill campaigns were to kill."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from campaigns import victims
from campaigns.victims import Victims, signal_all, stop, strike

LIVES = "echo; exec sleep 60"
ENDS = "trap 'exit 0' CONT; echo; while :; do sleep 0.05; done"  # as soon as it goes on
SOON_S, LATER_S = 0.01, 2.0
KILLED = -signal.SIGKILL


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def struck(
    started: list[subprocess.Popen[bytes]],
    victim: Victims,
    later_s: float,
    scripts: tuple[str, str],
) -> tuple[Victims, int, int, int]:
    """scripts: of what stands for criu and for its worker. Who died; how each of them ended; how
    often it was looked again."""
    for script in scripts:
        started.append(subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE))
        output = started[-1].stdout
        assert output is not None
        assert output.readline() == b"\n"
    criu, worker = started
    assert stop(criu)
    signal_all([worker.pid], signal.SIGSTOP)
    looks: list[int] = []
    died = strike(criu, [worker.pid], victim, later_s, lambda: looks.append(1))
    return died, criu.wait(), worker.wait(), len(looks)


@pytest.mark.parametrize(
    ("victim", "looks"), [(Victims.BOTH, 0), (Victims.WORKER_FIRST, 1), (Victims.CRIU_FIRST, 1)]
)
def test_both_die(started: list[subprocess.Popen[bytes]], victim: Victims, looks: int) -> None:
    found = struck(started, victim, SOON_S, (LIVES, LIVES))
    assert found == (victim, KILLED, KILLED, looks)


def test_criu_alone_dies(started: list[subprocess.Popen[bytes]]) -> None:
    found = struck(started, Victims.CRIU, SOON_S, (LIVES, ENDS))
    assert found == (Victims.CRIU, KILLED, 0, 0)


def test_the_worker_alone_dies(started: list[subprocess.Popen[bytes]]) -> None:
    found = struck(started, Victims.WORKER, SOON_S, (ENDS, LIVES))
    assert found == (Victims.WORKER, 0, KILLED, 0)


@pytest.fixture
def until_it_has_ended(
    started: list[subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """LATER_S last until that one of the two has, however late it is."""

    def sleep(seconds: float) -> None:
        if seconds == LATER_S:
            deadline = time.monotonic() + 60
            look = os.WEXITED | os.WNOWAIT | os.WNOHANG
            while os.waitid(os.P_PID, started[request.param].pid, look) is None:
                assert time.monotonic() < deadline, "it does not end"
                time.sleep(0.01)
        else:
            time.sleep(seconds)

    clock = SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
    monkeypatch.setattr(victims, "time", clock)


@pytest.mark.parametrize("until_it_has_ended", [1], indirect=True, ids=["worker"])
@pytest.mark.usefixtures("until_it_has_ended")
def test_a_worker_that_ends_by_itself_has_not_died_of_it(
    started: list[subprocess.Popen[bytes]],
) -> None:
    found = struck(started, Victims.CRIU_FIRST, LATER_S, (LIVES, ENDS))
    assert found == (Victims.CRIU, KILLED, 0, 1)


@pytest.mark.parametrize("until_it_has_ended", [0], indirect=True, ids=["criu"])
@pytest.mark.usefixtures("until_it_has_ended")
def test_a_criu_that_ends_by_itself_has_not_died_of_it(
    started: list[subprocess.Popen[bytes]],
) -> None:
    found = struck(started, Victims.WORKER_FIRST, LATER_S, (ENDS, LIVES))
    assert found == (Victims.WORKER, 0, KILLED, 0)
