# SPDX-License-Identifier: Apache-2.0
"""A driver, or a process, that does not answer holds no keeper up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from gpustasis.driver import Driver, ProcessState, TimedOutError
from gpustasis.jobs import rank
from support.job_ranks import wait_for


class Deaf:
    """A driver that does not answer about process 7 before `hears` is set."""

    def __init__(self) -> None:
        self.hears = threading.Event()
        self.states = {7: ProcessState.RUNNING, 8: ProcessState.LOCKED}

    def get_state(self, pid: int) -> ProcessState:
        """As Driver.get_state."""
        self._answer(pid)
        return self.states[pid]

    def lock(self, pid: int, _: int) -> None:
        """As Driver.lock."""
        self._answer(pid)
        self.states[pid] = ProcessState.LOCKED

    def unlock(self, pid: int) -> None:
        """As Driver.unlock."""
        self._answer(pid)
        self.states[pid] = ProcessState.RUNNING

    def _answer(self, pid: int) -> None:
        if pid == 7:
            assert self.hears.wait(60)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    deaf = Deaf()
    monkeypatch.setattr(rank, "ANSWER_S", 0.2)
    monkeypatch.setattr(rank, "load_driver", lambda: deaf)
    monkeypatch.setattr(rank, "_using", list)
    yield deaf
    deaf.hears.set()


def test_a_process_that_does_not_answer_is_named_and_the_others_are_unlocked(driver: Any) -> None:
    assert rank.unlock_cuda([7, 8]) == ["GetState on process 7: no answer within 0.2 s"]
    assert driver.states[8] is ProcessState.RUNNING
    with pytest.raises(TimedOutError, match="GetState on process 7"):
        rank.state_of(cast("Driver", driver), 7)


def test_what_is_locked_after_nobody_waits_for_it_is_unlocked_again(driver: Any) -> None:
    with pytest.raises(TimedOutError, match="Lock on process 7"):
        rank.lock_cuda(cast("Driver", driver), 7, 1)
    seen: list[ProcessState] = []
    unlock = driver.unlock
    driver.unlock = lambda pid: (seen.append(driver.states[pid]), unlock(pid))
    driver.hears.set()
    wait_for(lambda: driver.states[7] is ProcessState.RUNNING and bool(seen), "the unlock")
    assert seen == [ProcessState.LOCKED]
