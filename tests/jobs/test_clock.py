# SPDX-License-Identifier: Apache-2.0
"""Checkpoints by the clock of a job that is recovered, where it may hang."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpustasis.errors import JobError
from gpustasis.intervals import Periodic
from gpustasis.jobs import kept, verified
from gpustasis.jobs.clock import Clock
from gpustasis.jobs.hanging import Watcher
from gpustasis.jobs.leading import Leading
from gpustasis.jobs.lives import Failure, Stage
from gpustasis.jobs.rank import Context
from gpustasis.jobs.recovering import Recovering
from gpustasis.jobs.steering import find_life
from gpustasis.jobs.store import Put, Require
from gpustasis.jobs.verified import Mark
from gpustasis.jobs.work import Order
from jobs.test_lives import FAILURE, LIFE
from jobs.test_stopping import committed, recovering, stopped
from jobs.test_undoing import context, server, task  # noqa: F401 - fixtures


@pytest.mark.parametrize("hung", [True, False])
def test_what_the_clock_made_of_a_job_that_hung_is_not_restored(
    hung: bool,
    context: Context,  # noqa: F811
) -> None:
    """Also if it was asked for in between: it cannot be told of what that was made."""
    now, keys = time.time(), context.keys
    for at in (-50, -25):
        committed(context, now + at)
    late = committed(context, now - 21)  # keepers look now and then, and clocks differ
    asked_for = committed(context)
    newest = committed(context, now - 1)
    stopped(context, Failure(rank=0, reason="why", at=now, unnoticed_s=20.0, hung=hung))
    Leading(context.store, keys, 4, print).turn(find_life(context.store, keys))
    life = find_life(context.store, keys)
    assert (life.stage, life.restored) == (Stage.RESTORES, asked_for if hung else newest)
    wrong = kept.unverified(context.store, keys)
    assert set(wrong) == ({late, newest} if hung else set())
    assert not hung or "begun when the job hung already: why" in wrong[newest]
    assert not hung or "begun when the job hung already, or just before: why" in wrong[late]


def test_checkpoints_by_the_clock_wait_while_the_job_does_not_run(
    context: Context,  # noqa: F811
) -> None:
    guard, rank = recovering(context)
    with closing(rank):
        assert rank.begin(new=True, can_start=True)
        life = guard.read()
        assert rank.may_checkpoint() == [Require(context.keys.life, life.revision)]
        guard.report(1, "why", unnoticed_s=0.0)
        guard.read()
        assert guard.life.stage is not Stage.RUNS
        assert rank.may_checkpoint() is None


def test_more_than_one_transaction_holds_is_marked(context: Context) -> None:  # noqa: F811
    now = time.time()
    before = committed(context, now - 5000)
    late = [committed(context, now - 60 + at / 10) for at in range(150)]
    stopped(context, Failure(rank=0, reason="why", at=now, unnoticed_s=100.0, hung=True))
    Leading(context.store, context.keys, 4, print).turn(find_life(context.store, context.keys))
    assert find_life(context.store, context.keys).restored == before
    assert set(kept.unverified(context.store, context.keys)) == set(late)


@pytest.mark.parametrize("has_hung", [True, False], ids=["has hung", "not tried"])
@pytest.mark.parametrize("afresh", [True, False])
def test_a_job_all_of_whose_checkpoints_hang_starts_afresh_if_it_may(
    afresh: bool,
    has_hung: bool,
    context: Context,  # noqa: F811
) -> None:
    """Else it goes back as far as it can; so it does for what was not tried yet."""
    now = time.time()
    oldest, newest = (committed(context, now - at) for at in (3, 2))
    if has_hung:
        mark = Mark("it hung", times=2, is_sure=True)
        puts = [verified.put_mark(context.keys, number, mark) for number in (oldest, newest)]
        context.store.write([], puts)
    failure = Failure(rank=0, reason="why", at=now, unnoticed_s=20.0, hung=True)
    stopped(context, failure, afresh=afresh)
    Leading(context.store, context.keys, 4, print).turn(find_life(context.store, context.keys))
    life = find_life(context.store, context.keys)
    found = (Stage.RUNS, 0) if afresh and has_hung else (Stage.RESTORES, oldest)
    assert (life.stage, life.restored) == found
    assert all(one.is_sure for one in kept.marks(context.store, context.keys).values())


def test_one_begun_just_before_the_last_sign_is_taken_if_there_is_no_older_one(
    context: Context,  # noqa: F811
) -> None:
    now = time.time()
    unsure = committed(context, now - 21)
    late = committed(context, now - 10)
    stopped(context, Failure(rank=0, reason="why", at=now, unnoticed_s=20.0, hung=True))
    Leading(context.store, context.keys, 4, print).turn(find_life(context.store, context.keys))
    assert find_life(context.store, context.keys).restored == unsure
    assert set(kept.unverified(context.store, context.keys)) == {late}


def test_nothing_is_removed_that_a_hang_may_need(context: Context) -> None:  # noqa: F811
    """A keeper that has just begun does not know what was made; a life that has, not whether it
    hangs."""
    guard, rank = recovering(context)
    now = 1000.0
    watcher: Any = SimpleNamespace(free_s=lambda: now, noticed_after_s=20.0, forget=lambda: None)
    rank._watcher = watcher
    with closing(rank):
        assert rank.begin(new=True, can_start=True)

        def least_at(seconds: float, *, is_made: bool = True) -> int:
            nonlocal now
            now = seconds
            return rank.least_kept(is_made=is_made)

        everything = 1 << 20
        assert least_at(1000) > everything
        assert least_at(1019) > everything
        assert least_at(1021) == 3  # those of 1019 and 1021 may be of a job that hangs
        assert least_at(1060) == 2
        assert least_at(1061, is_made=False) == 2  # for want of room, say
        assert least_at(1090, is_made=False) == 1
        life = guard.life
        context.store.write([], [Put(context.keys.life, replace(life, number=2).to_text())])
        guard.read()
        assert least_at(1091, is_made=False) > everything
        assert least_at(1110) > everything
        assert least_at(1120) == 3
        failed = replace(guard.life, terms=replace(life.terms, evidence=True)).failed(FAILURE)
        context.store.write([], [Put(context.keys.life, failed.to_text())])
        guard.read()
        assert least_at(1200) > everything  # and what it has left is not marked yet


@pytest.mark.parametrize(
    ("after", "interval", "dump", "last", "stage"),
    [(60, 10, 3, 120, Stage.LOOKS), (60, 10, 3, 120, Stage.RUNS), (20, 3, 3, 60, Stage.RUNS)],
)
def test_one_from_before_a_hang_stays_however_long_the_last_dump_takes(
    after: float,
    interval: float,
    dump: float,
    last: float,
    stage: Stage,
    context: Context,  # noqa: F811
    task: subprocess.Popen[bytes],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That of evidence, or one by the clock, that ends when nobody has noticed yet."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    progress = tmp_path / "progress"
    watcher = Watcher(after, tmp_path / "output.log", progress)
    guard: Any = SimpleNamespace(life=replace(LIFE, stage=Stage.RUNS))
    rank = Recovering(context, guard, watcher, print)
    context.note(pid=task.pid)

    def goes_on(seconds: float, *, works: bool) -> None:
        nonlocal now
        for _ in range(int(2 * seconds)):
            now += 0.5
            if works:  # it grows: the clock of the file system may stand meanwhile
                with progress.open("a") as file:
                    file.write("x")
            watcher.look(task.pid)

    def least_after(seconds: float) -> int:
        nonlocal now
        rank.enter(Order(1, leave_running=True, restores=0))
        now += seconds
        return rank.least_kept(is_made=True)

    for _ in range(int(watcher.noticed_after_s / (interval - 1)) + 2):
        goes_on(interval, works=True)
        assert watcher.look(task.pid) == ""
        least = least_after(dump)
    assert least < 1 << 20
    hung_at, hung = watcher.free_s(), 0
    while not watcher.reason:
        goes_on(interval, works=False)
        idle_s = watcher.free_s() - hung_at
        if watcher.is_quiet:
            continue
        is_last = stage is Stage.RUNS and idle_s + interval >= after / 2
        hung += 1
        assert least_after(last if is_last else dump) > hung
    assert hung >= 2
    guard.life = replace(LIFE, stage=stage)
    assert least_after(last) > hung + (stage is Stage.RUNS)  # evidence is none that is counted


def test_of_a_hang_it_is_told_how_long_epochs_held_the_rank(
    context: Context,  # noqa: F811
    task: subprocess.Popen[bytes],  # noqa: F811
) -> None:
    guard, rank = recovering(context)
    watcher: Any = SimpleNamespace(
        reason="hangs", silent_s=153.0, held_s=90.0, look=lambda _: "hangs", forget=lambda: None
    )
    rank._watcher = watcher
    with closing(rank):
        assert rank.begin(new=True, can_start=True)
        context.note(pid=task.pid)
        assert rank.is_due(ended=False, waits=False)
        rank.take(None)
        failure = guard.read().failure
        assert failure is not None
        assert (failure.hung, failure.unnoticed_s, failure.idle_s) == (True, 153.0, 63.0)


def test_whatever_goes_wrong_checkpoints_by_the_clock_go_on(
    context: Context,  # noqa: F811
    task: subprocess.Popen[bytes],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And it is told, if there is somebody to be told."""
    context.note(pid=task.pid)
    failures: list[Exception] = [ZeroDivisionError("of a time"), JobError("no"), KeyError("rank")]
    is_made = threading.Event()
    said: list[str] = []

    def told(text: str) -> None:
        said.append(text)
        raise BrokenPipeError

    def checkpoint(_: Sequence[Require]) -> float:
        if failures:
            raise failures.pop(0)
        is_made.set()
        return 0.1

    clock = Clock(context, Periodic(interval_s=0.1, mtbf_s=1.0), told)
    monkeypatch.setattr(clock, "_checkpoint", checkpoint)
    clock.start()
    try:
        assert is_made.wait(60)
    finally:
        clock.stop.set()
        clock.join()
    why = ["ZeroDivisionError('of a time')", "no", "KeyError('rank')"]
    assert said == [f"job job runs on without a checkpoint: {one}" for one in why]
