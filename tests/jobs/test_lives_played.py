# SPDX-License-Identifier: Apache-2.0
"""No rank of a job that is recovered runs twice, whatever fails, and whenever."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest

from gpustasis.jobs import guard
from gpustasis.jobs.lives import Stage, Way
from gpustasis.jobs.steering import find_life
from support.job_lives import KEYS, TTL_S, Player

WALKS, STEPS = 20, 2500


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which passes when it is changed."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "time", lambda: now[0])
    monkeypatch.setattr(guard, "_AGAIN_S", 0)
    monkeypatch.setattr(os, "fdatasync", lambda _: None)  # nothing has to outlive this
    return now


@pytest.mark.parametrize("gone", [0, 1], ids=["the lead", "another"])
def test_a_keeper_that_was_cut_off_misses_nobody_at_once(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch, gone: int
) -> None:
    """The other one may have been cut off as well, and have its seat again as soon as it can."""
    monkeypatch.setattr("support.job_lives._ANSWER_LOST", 0)
    player = Player(tmp_path / "journal", Random(1), clock)
    try:
        places = [next(one for one in player.hosts if one.rank == rank) for rank in (0, 1)]
        guards = [player.guard_of(one) for one in places]
        for one in guards:
            one.begin(new=True)
            assert one.say(1, Way.HERE)
        guards[gone].crash()
        left, place = guards[1 - gone], places[1 - gone]

        def stage_after(seconds: float) -> Stage:
            clock[0] += seconds
            left.turn()
            return find_life(cast("Any", player.tree_store()), KEYS).stage

        seconds = 0.0
        while seconds <= TTL_S + 1:  # the seat is free by then, and that was seen
            assert stage_after(0.5) is Stage.RUNS
            seconds += 0.5
        place.is_cut = True
        clock[0] += TTL_S / 2
        left.turn()
        place.is_cut = False
        assert stage_after(0.1) is Stage.RUNS
        assert stage_after(TTL_S / 4) is Stage.RUNS
        assert stage_after(TTL_S / 2) is not Stage.RUNS
    finally:
        player.close()


def test_no_rank_ever_runs_twice(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: Counter[str] = Counter()
    for walk in range(WALKS):
        player = Player(tmp_path / f"journal-{walk}", Random(walk), clock)
        monkeypatch.setattr("gpustasis.jobs.recovering.stop", player.stop)
        monkeypatch.setattr("gpustasis.jobs.recovering.keep_stacks", lambda *_: None)
        try:
            for _ in range(STEPS):
                player.step()
        finally:
            player.close()
        counts.update(player.counts)
    # It has come to all that.
    assert min(counts[name] for name in ("committed", "aborted", "stopped", "fenced")) > 10, counts
