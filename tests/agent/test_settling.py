# SPDX-License-Identifier: Apache-2.0
"""How an agent goes on while it looks what became of what the one before it was at."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpustasis._core import ARENA_MARKER
from gpustasis.agent import daemon
from gpustasis.agent.config import Config
from gpustasis.agent.operations import Journal, Operation, State
from gpustasis.agent.subjects import Subject
from gpustasis.errors import AgentError

SETTLE_S = 30.0


def wait_for(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + SETTLE_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_one_that_is_not_settled_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What an agent before was at: its own target alone waits for what became of it."""
    config = Config(store=tmp_path / "store", socket=tmp_path / "s", http_socket=None)
    (tmp_path / "store").mkdir()
    journal = Journal(config.store / "operations")
    hangs, runs = (Operation(subject=Subject(pid=pid, start_time=1), uid=0) for pid in (2, 3))
    for one in (hangs, runs):
        one.state = State.RUNNING
        journal.write(one)
    goes_on, due = threading.Event(), list[float]()

    def settle(operation: Operation, *_: object) -> None:
        if operation.id == hangs.id:
            assert goes_on.wait(SETTLE_S)
        operation.state = State.DONE

    monkeypatch.setattr(daemon, "settle", settle)
    agent = daemon._Agent(config, journal)
    monkeypatch.setattr(agent._periodic, "submit_due", due.append)
    for thread in agent._settling:
        thread.start()
    try:
        wait_for(lambda: not agent._queue.pending(runs.subject.key))
        assert agent._queue.pending(hangs.subject.key)
        agent._look()
        assert len(due) == 1
    finally:
        goes_on.set()
        for thread in agent._settling:
            thread.join(SETTLE_S)
        journal.close()
    assert not agent._queue.pending(hangs.subject.key)


def test_two_agents_do_not_use_one_store(tmp_path: Path) -> None:
    """The second one would settle what the first is at."""
    journal = Journal(tmp_path)
    with pytest.raises(AgentError, match="is locked: another agent uses this store"):
        Journal(tmp_path)
    journal.close()
    Journal(tmp_path).close()


def test_one_that_is_given_up_counts_as_in_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = Config(store=tmp_path / "store", socket=tmp_path / "s", http_socket=None)
    journal = Journal(config.store / "operations")
    place = config.store / "targets/train/20260101T000000.0-0123456789abcdef"
    place.mkdir(parents=True)
    (place / ARENA_MARKER).write_text("of a later version\n")
    subject = Subject(pid=2, start_time=1)
    journal.write(Operation(subject=subject, uid=0, state=State.RUNNING, place=str(place)))
    monkeypatch.setattr(daemon, "settle", lambda *_: None)
    agent = daemon._Agent(config, journal)
    (thread,) = agent._settling
    thread.start()
    thread.join(SETTLE_S)
    journal.close()
    assert agent._drains.count() == 1
