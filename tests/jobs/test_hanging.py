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


def test_an_epoch_is_no_progress_and_no_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes CPU in the name of tasks that hang, and tasks that run have no time meanwhile."""
    clock = Clock(monkeypatch)
    log = tmp_path / "output.log"
    log.write_text("")
    used = 0.0
    monkeypatch.setattr("gpustasis.jobs.hanging._cpu_s", lambda _: used)
    watcher = Watcher(10.0, log, None, lambda: 0.0)
    assert watcher.look(7) == ""
    for _ in range(3):
        for _ in range(6):
            clock.now += 0.5
            assert watcher.look(7) == ""
            assert watcher.is_quiet == (clock.now >= 1009)  # 3 s, 4 s held, and 2 s
        watcher.is_held(7)
        clock.now += 4.0
        used += 2.0
        assert watcher.look(7) == ""
    assert watcher.silent_s == 21.0
    clock.now += 0.5
    assert watcher.look(7) == ""
    clock.now += 0.6
    assert "hangs" in watcher.look(7)


def test_what_was_written_before_an_epoch_held_the_tasks_is_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a program that comes to a safe point after each step."""
    clock = Clock(monkeypatch)
    progress = tmp_path / "progress"
    watcher = Watcher(10.0, tmp_path / "output.log", progress)
    for turn in range(10):
        for _ in range(16):
            clock.now += 0.5
            assert watcher.look(7) == "", turn
        progress.write_text("x" * (turn + 1))
        watcher.is_held(7)
        clock.now += 2.0
        assert watcher.look(7) == ""
        assert not watcher.is_quiet


@pytest.mark.parametrize("busy", [True, False])
def test_epochs_that_follow_each_other_hide_neither_work_nor_a_hang(
    busy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that only waits has a tick now and then, as after it was let go."""
    clock = Clock(monkeypatch)
    used = 0.0
    monkeypatch.setattr("gpustasis.jobs.hanging._cpu_s", lambda _: used)
    watcher = Watcher(100.0, tmp_path / "output.log", None, lambda: 0.0)
    watcher.look(7)
    reasons = []
    for _ in range(160):
        clock.now += 1.0
        used += 0.5 if busy else 0.005
        watcher.is_held(7)
        clock.now += 3.0
        used += 1.0
        reasons.append(watcher.look(7))
    assert not any(reasons[:99])
    assert bool(reasons[-1]) != busy


@pytest.mark.parametrize("step_s", [0.1, 0.32, 0.37])
def test_work_that_begins_at_the_last_moment_is_seen(
    step_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPU is looked at over more than one look: what it has used by now counts at once."""
    clock = Clock(monkeypatch)
    used = 0.0
    monkeypatch.setattr("gpustasis.jobs.hanging._cpu_s", lambda _: used)
    for silent_s in (turn / 10 for turn in range(90, 120)):
        watcher = Watcher(12.0, tmp_path / "output.log", None, lambda: 0.0)
        watcher.look(7)
        begin = clock.now
        while clock.now < begin + 15.0:
            clock.now += step_s
            used += step_s if clock.now >= begin + silent_s else 0.0
            assert watcher.look(7) == "", (silent_s, clock.now - begin)
