# SPDX-License-Identifier: Apache-2.0
"""Which ranks hang."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from gpustasis.jobs.hanging import Watcher


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.mark.parametrize("sign", ["log", "cpu", "gpu"])
def test_any_sign_of_progress_is_one(
    sign: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    log = tmp_path / "output.log"
    log.write_text("")
    used = {"cpu": 0.0, "gpu": 0.0}
    monkeypatch.setattr("gpustasis.jobs.hanging._cpu_s", lambda _: used["cpu"])
    watcher = Watcher(10.0, log, None, lambda: used["gpu"])
    for turn in range(40):
        clock.now += 0.5
        if sign == "log":
            log.write_text("x" * turn)
        elif sign == "cpu":
            used["cpu"] += 0.05
        else:
            used["gpu"] = 0.5
        assert watcher.look(7) == ""
    used["gpu"] = 0.0
    for _ in range(19):
        clock.now += 0.5
        assert watcher.look(7) == ""
    clock.now += 1.0
    assert "idle" in watcher.look(7)
    assert watcher.silent_s >= 10
    watcher.forget()
    clock.now += 0.5
    assert watcher.look(7) == ""


def test_a_progress_file_alone_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    log, progress = tmp_path / "output.log", tmp_path / "progress"
    watcher = Watcher(10.0, log, progress, lambda: 1.0)
    reasons = []
    for turn in range(60):
        clock.now += 0.5
        log.write_text("x" * turn)
        if turn < 30:
            progress.write_text("x" * turn)
        reasons.append(watcher.look(7))
    assert not any(reasons[:45])
    assert f"{progress} has not changed for 10 s" in reasons[-1]


def test_time_in_which_nobody_looked_is_no_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An epoch may have held the tasks."""
    clock = Clock(monkeypatch)
    watcher = Watcher(10.0, tmp_path / "output.log", tmp_path / "progress")
    watcher.look(7)
    clock.now += 60.0
    assert watcher.look(7) == ""
