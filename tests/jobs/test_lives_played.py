# SPDX-License-Identifier: Apache-2.0
"""No rank of a job that is recovered runs twice, whatever fails, and whenever."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from gpustasis.jobs import guard
from support.job_lives import Player

WALKS, STEPS = 20, 2500


def test_no_rank_ever_runs_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "time", lambda: clock[0])
    monkeypatch.setattr(guard, "_AGAIN_S", 0)
    monkeypatch.setattr(os, "fdatasync", lambda _: None)  # nothing has to outlive this
    counts: Counter[str] = Counter()
    for walk in range(WALKS):
        player = Player(tmp_path / f"journal-{walk}", Random(walk), clock)
        monkeypatch.setattr("gpustasis.jobs.recovering.stop", player.stop)
        try:
            for _ in range(STEPS):
                player.step()
        finally:
            player.close()
        counts.update(player.counts)
    # It has come to all that.
    assert min(counts[name] for name in ("committed", "aborted", "stopped", "fenced")) > 10, counts
