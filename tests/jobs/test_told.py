# SPDX-License-Identifier: Apache-2.0
"""What a signal to one keeper does to its job, and for how long it counts."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import closing
from dataclasses import replace

import pytest

from gpustasis.jobs import ending
from gpustasis.jobs import recovering as recovering_module
from gpustasis.jobs.ending import Ended, Signal
from gpustasis.jobs.guard import Guard, where
from gpustasis.jobs.lives import Stage, Standing, Way, keeper_text, standing_text
from gpustasis.jobs.rank import Context
from gpustasis.jobs.recovering import Next, Recovering
from gpustasis.jobs.store import Put
from gpustasis.jobs.supervise import Supervisor
from jobs.test_lives import HERE
from jobs.test_stopping import TERMS, recovering
from jobs.test_undoing import SETTINGS, context, server  # noqa: F401 - fixtures


@pytest.mark.parametrize("then", ["others end", "others were told", "it takes too long"])
def test_a_rank_that_has_ended_well_upon_a_signal_lets_the_others_end_too(
    then: str,
    context: Context,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its program may have agreed with them to save, and to end."""
    monkeypatch.setattr(recovering_module, "_AGAIN_S", 0.0)
    store, keys = context.store, context.keys
    guard = Guard(store, keys, 0, 2, TERMS, where(context.place.run), ttl_s=4, told=print)
    rank = Recovering(context, guard, None, print)
    other = Standing(way=Way.HERE, where=HERE)
    puts = [Put(keys.keeper(1), keeper_text("me", HERE))]
    puts.append(Put(keys.in_life(1, 1), standing_text(other)))
    store.write([], puts)
    with closing(rank):
        assert rank.begin(new=True, can_start=True)
        rank.asked = "it was told to end"
        assert rank.is_due(ended=True, waits=False)
        assert rank.take(0) == rank.take(0) == Next()
        standing = guard.standing(1)
        assert standing is not None and standing.way is Way.HERE  # it has not come to its end
        assert guard.read().stage is Stage.RUNS
        match then:
            case "others end":
                ended = standing_text(replace(other, way=Way.ENDED))
                store.write([], [Put(keys.in_life(1, 1), ended)])
            case "others were told":
                store.write([], [Put(keys.said_by("told", 1), "1")])
            case _:
                monkeypatch.setattr(recovering_module, "_ENDS_WITHIN_S", 0.0)
        rank.take(0)
        life = guard.read()
        assert (life.stage, life.why()) == (Stage.FAILED, "rank 0: it was told to end")
        assert store.read(keys.said_by("told", 0)).entries[keys.said_by("told", 0)].value == "1"


def test_a_rank_that_has_died_upon_a_signal_lets_nobody_wait(
    context: Context,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guard, rank = recovering(context)
    monkeypatch.setattr(guard, "others_run", lambda _: True)
    with closing(rank):
        assert rank.begin(new=True, can_start=True)
        rank.asked = "it was told to end"
        rank.take(143)
        assert guard.read().stage is Stage.FAILED


@pytest.mark.parametrize("lasts_s", [0.3, 60.0])
def test_a_signal_that_the_tasks_outlive_has_not_ended_them(
    lasts_s: float,
    context: Context,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A program may take SIGHUP for something else, and come to its end later."""
    monkeypatch.setattr(ending, "_OUTLIVED_S", lasts_s)
    guard, rank = recovering(context)
    with closing(rank):
        assert rank.begin(new=True, can_start=True)
        supervisor = Supervisor(context, SETTINGS, print, recovering=rank)
        words = ("sh", "-c", "trap : HUP; for i in $(seq 20); do sleep 0.1; done; exit 0")
        supervisor.start(words, os.environ)
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGHUP))
        timer.start()
        ended = supervisor.run(restoring=False)
        assert ended == Ended(epoch=0, status=0)
        assert rank.ended_well == (lasts_s < 1)
        assert guard.life.stage is (Stage.DONE if lasts_s < 1 else Stage.FAILED)


def test_time_in_which_nobody_looked_makes_no_tasks_outlive_a_signal(
    context: Context,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An epoch may have held them; and they may not be told before the grace period is over."""
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    told = Signal(context, 100.0)

    def outlived(seconds: int, step: int) -> bool:
        found = False
        for _ in range(seconds // step):
            now[0] += step
            found = found or told.was_outlived()
        return found

    assert not outlived(10_000, 1)
    context.told_at = now[0]
    assert not outlived(900, 900)
    assert not outlived(690, 1)
    assert outlived(20, 1)
    assert context.told_at == 0.0
