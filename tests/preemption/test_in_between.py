# SPDX-License-Identifier: Apache-2.0
"""Checkpoints at intervals, of a job that runs on, together with those just in time."""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from gpustasis.intervals import FIRST_S, RETRY_S, Periodic, Schedule
from preemption.test_just_in_time import CHECKPOINTED, PAIR, names, sums
from support.criu_roots import newest_criu
from support.supervised import Supervised, children, end_session

Supervise = Callable[..., Supervised]


def is_in_order(wrote: list[str], rounds: int) -> bool:
    """Every line is as of an uninterrupted run, and follows the one before it."""
    expected = sums(rounds)
    at = int(wrote[0].split()[0])
    return wrote == expected[at : at + len(wrote)]


def kill_job(run: Supervised) -> None:
    root = run.root()
    (second,) = map(int, children(root))
    os.kill(root, signal.SIGKILL)  # first: of a connection that has ended it would write a sum
    with suppress(ProcessLookupError):  # it ends with the connection
        os.kill(second, signal.SIGKILL)
    assert run.wait() == 128 + signal.SIGKILL, run.said()
    end_session(second)  # it may have come to the test


def test_a_job_that_is_killed_goes_on_from_the_last_one_in_between(
    supervise: Supervise, tmp_path: Path
) -> None:
    words = ("--interval", "1s", "--keep-last", 2, "--max-chain", 2, PAIR, 100_000, 100, 0.02)
    run = supervise(*words)
    run.wait_for("jit-000006 as well, and runs on")
    kill_job(run)
    assert is_in_order(run.wrote(), 100_000)
    store = tmp_path / "store"
    # Each on top of the one before, but for the first of three; older ones are gone by then.
    assert (store / "jit-000005/gpustasis-parent").exists()
    assert not (store / "jit-000004/gpustasis-parent").exists()
    assert names(store)[0] == "jit-000004"
    newest = names(store)[-1]

    second = supervise(*words)
    second.wait_for(f"goes on, restored from {store}/{newest}")
    second.wait_for("as well, and runs on")
    second.tell_to_end()
    assert second.wait() == CHECKPOINTED, second.said()
    assert is_in_order(second.wrote(), 100_000)
    # What the job had written since that checkpoint, it writes again.
    assert int(second.wrote()[0].split()[0]) <= len(run.wrote())
    last = supervise(*words)
    last.wait_for("\n" + str(len(sums(int(second.wrote()[-1].split()[0]) + 5))) + " ")
    assert is_in_order([*second.wrote(), *last.wrote()], 100_000)  # nothing is lost just in time
    assert len(names(store)) <= 6


def test_told_to_end_while_one_is_at_work(
    supervise: Supervise, slow_criu: Callable[[float, float], Path], tmp_path: Path
) -> None:
    # The next one is due so late that it is told to end before that, on a busy machine as well.
    words = ("--criu", slow_criu(1, 0), "--interval", "5s", PAIR, 100_000, 8, 0.02)
    run = supervise(*words)
    run.wait_for("jit-000001: it is due")
    run.tell_to_end()
    assert run.wait() == CHECKPOINTED, run.said()
    said = run.said()
    assert said.index("the job is in") < said.index("jit-000002: about ")  # one after the other
    assert f"the job is in {tmp_path}/store/jit-000002, " in said
    last = supervise(PAIR, 100_000, 8, 0.02)
    last.wait_for(f"\n{len(run.wrote()) + 5} ")
    assert is_in_order([*run.wrote(), *last.wrote()], 100_000)


def test_one_that_hangs_leaves_the_job_its_time_to_end(
    supervise: Supervise, slow_criu: Callable[[float, float], Path], tmp_path: Path
) -> None:
    # The one at work has 2 s, and is killed after 6. Another one would have to end after 4.
    words = ("--criu", slow_criu(600, 0), "--grace", 20, "--reserve", 16, "--speed", "1T")
    run = supervise(*words, "--interval", "1s", PAIR, 5000, 8, 0.02)
    run.wait_for("jit-000001: it is due")
    time.sleep(1)  # it has no limit yet, and that has been looked at
    begin = time.monotonic()
    run.tell_to_end()
    assert run.wait() == 40, run.said()  # its memory and its connection are as they were
    assert time.monotonic() - begin < 20
    assert "no checkpoint, the job runs on: the dump into " in run.said()
    assert "no checkpoint, the job is told to end: " in run.said()
    assert names(tmp_path / "store") == []


def test_a_failed_one_removes_no_good_one_and_the_job_runs_on(
    supervise: Supervise, tmp_path: Path
) -> None:
    criu = tmp_path / "criu"
    words = shlex.join(newest_criu().command(dict(os.environ)))
    criu.write_text(
        f'#!/bin/sh\n[ $1 != dump ] || [ ! -e {tmp_path}/fail ] || exit 1\nexec {words} "$@"\n'
    )
    criu.chmod(0o755)
    job = ("--criu", criu, "--interval", "1s", "--keep-last", 1, PAIR, 100_000, 8, 0.02)
    run = supervise(*job)
    run.wait_for("the job is in")
    (tmp_path / "fail").touch()
    run.wait_for("no checkpoint, the job runs on: criu ")
    kept = [line.split()[5] for line in run.said().splitlines() if "as well, and" in line]
    assert Path(kept[-1]).is_dir()
    (tmp_path / "fail").unlink()
    before = run.said().count("as well, and runs on")
    run.wait_for("no checkpoint")
    while run.said().count("as well, and runs on") == before:  # the next one is made
        assert run.process.poll() is None, run.said()
        time.sleep(0.05)
    run.tell_to_end()
    assert run.wait() == CHECKPOINTED, run.said()
    assert is_in_order(run.wrote(), 100_000)


def test_a_job_that_was_told_to_end_and_ends_well_goes_on_all_the_same(
    supervise: Supervise,
) -> None:
    job = "trap 'exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    words = ("--interval", "1s", "--speed", "1K", "sh", "-c", job)
    run = supervise(*words)
    run.wait_for("as well, and runs on")
    run.tell_to_end()
    assert run.wait() == 0, run.said()
    second = supervise(*words)
    second.wait_for("goes on, restored from")


def test_the_moment_of_the_next_one() -> None:
    told = Schedule(Periodic(interval_s=100.0, mtbf_s=1e6), begun=1000.0)
    assert told.due == 1100
    told.note(1105.0, 2.0)
    assert told.due == 1205
    for failure, wait in enumerate((RETRY_S, 2 * RETRY_S, 100.0, 100.0)):
        told.note(2000.0 + failure, None)
        assert told.due == 2000 + failure + wait
    told.note(3000.0, 2.0)
    assert told.due == 3100

    auto = Schedule(Periodic(interval_s=None, mtbf_s=1e6), begun=0.0)
    assert auto.due == FIRST_S  # nothing is measured yet
    auto.note(100.0, 2.0)
    assert auto.due == pytest.approx(100 + 2000, rel=0.01)  # the square root of 2 * 2 * 1e6
