# SPDX-License-Identifier: Apache-2.0
"""What a signal to a keeper has to do with the verdict on the restore of its tasks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from gpustasis.errors import JobError
from gpustasis.jobs import epochs, verified
from gpustasis.jobs.ending import Ended
from gpustasis.jobs.member import Outcome
from gpustasis.jobs.messages import Epoch, Phase
from gpustasis.jobs.network import Network
from gpustasis.jobs.rank import Context
from gpustasis.jobs.records import Plan, phase_text, settled_text
from gpustasis.jobs.restoring import Restoring
from gpustasis.jobs.store import Put, Unreachable
from gpustasis.jobs.work import Excuse, Excused, Order
from gpustasis.verifying import Check
from jobs.test_stopping import committed
from jobs.test_undoing import context, server, supervisor_of, task  # noqa: F401 - fixtures


def test_a_keeper_whose_tasks_have_ended_upon_a_signal_waits_for_no_verdict(
    context: Context,  # noqa: F811
    task: subprocess.Popen[bytes],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another rank may never settle, and its keeper would not end before it is killed."""
    context.world = 2
    store, keys = context.store, context.keys
    plan = Plan(world=2, leave_running=True, restores=committed(context))
    number = epochs.begin(store, keys, plan)
    puts = {
        keys.phase(number): phase_text(plan, Phase.COMMITTED),
        keys.settled(number, 0): settled_text(""),  # its own command has succeeded
    }
    store.write([], [Put(key, value) for key, value in puts.items()])
    context.options = replace(context.options, check=Check(words=("true",), seconds=60))
    supervisor = supervisor_of(context)
    told: list[str] = []
    monkeypatch.setattr(supervisor, "_told", told.append)
    outcomes = [Outcome(number, Epoch(Phase.COMMITTED, 1, leave_running=True, restores=1), "")]
    wait, end = time.sleep, time.monotonic() + 20

    def sleep(seconds: float) -> None:
        if threading.current_thread() is threading.main_thread() and time.monotonic() > end:
            pytest.fail("it waits for ever")
        wait(seconds)

    monkeypatch.setattr(time, "sleep", sleep)

    def take_part(is_over: Callable[[], bool]) -> Outcome | None:
        if outcomes:
            context.note(pid=task.pid, epoch=number)
            os.kill(os.getpid(), signal.SIGTERM)  # the tasks are there: they get it
            return outcomes.pop()
        assert is_over()
        return None

    monkeypatch.setattr(supervisor._keeper, "take_part", take_part)
    assert supervisor.run(restoring=True) == Ended(epoch=0, status=128 + signal.SIGTERM, told=True)
    assert "not known to be verified" in told[-1]


@pytest.mark.parametrize("told", [True, False])
def test_tasks_that_do_not_end_take_no_excuse_away(
    told: bool,
    context: Context,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store may not have the verdict yet, and another rank decides by what is settled."""
    checkpoint = committed(context)
    order = Order(checkpoint + 1, leave_running=True, restores=checkpoint)
    context.options = replace(context.options, check=Check(words=("true",), seconds=60))
    context.told_at = float(told)

    def end_tasks(_: Context) -> None:
        raise JobError("process 7 does not end")

    monkeypatch.setattr(verified, "end_tasks", end_tasks)
    with pytest.raises(JobError, match=r"its tasks have ended.*; process 7 does not end") as caught:
        verified.verify(context, order, "images")
    assert isinstance(caught.value, Excused)
    assert caught.value.excuse is (Excuse.OTHER if told else Excuse.NONE)


@pytest.mark.parametrize("lives", [True, False])
def test_what_an_earlier_keeper_was_told_excuses_no_tasks_that_live(
    lives: bool,
    context: Context,  # noqa: F811
    task: subprocess.Popen[bytes],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They have not heeded it, and the command finds them wrong. Those that take a while to end
    have."""
    checkpoint = committed(context)
    order = Order(checkpoint + 1, leave_running=True, restores=checkpoint, joined=True)
    context.options = replace(context.options, check=Check(words=("false",), seconds=60))
    context.note(pid=task.pid, epoch=order.number, told=order.number)
    monkeypatch.setattr(verified, "_ENDING_S", 1.0 if lives else 60.0)
    timer = threading.Timer(1.0, lambda: (task.kill(), task.wait()))
    not_back = verified.not_back

    def after_the_command(*words: Any, **more: Any) -> Excused:
        if not lives:
            timer.start()
        return not_back(*words, **more)

    monkeypatch.setattr(verified, "not_back", after_the_command)
    with pytest.raises(Excused, match="is not back") as caught:
        verified.verify(context, order, "images")
    assert caught.value.excuse is (Excuse.NONE if lives else Excuse.OTHER)
    assert ("nothing of the checkpoint" in str(caught.value)) != lives


@pytest.mark.parametrize("when", ["its command runs", "others are waited for", "never"])
def test_the_next_keeper_knows_that_the_last_one_was_told_to_end(
    when: str,
    context: Context,  # noqa: F811
    task: subprocess.Popen[bytes],  # noqa: F811
) -> None:
    """A node is drained, say: the keeper is told, and is killed with its tasks before it has said
    anything. Its host has not failed."""
    store, keys = context.store, context.keys
    checkpoint = committed(context)
    plan = Plan(world=1, leave_running=True, restores=checkpoint)
    number = epochs.begin(store, keys, plan)
    check = Check(words=("sleep", "1"), seconds=60)
    context.options = replace(context.options, check=check)
    context.note(pid=task.pid, epoch=number)
    order = Order(number, leave_running=True, restores=checkpoint, joined=True)
    context.told_at = float(when == "its command runs")
    verified.verify(context, order, "images")
    context.told_at = float(when == "others are waited for")
    assert verified.await_verdict(context, number, problem=False, gives_up=lambda: True) is None
    task.kill()
    task.wait()
    after = Context(context.place, 1, store, keys, context.options)
    with pytest.raises(Excused) as caught:
        Restoring(after, order).finish(leave_running=True)
    assert caught.value.excuse is (Excuse.LOST if when == "never" else Excuse.OTHER)
    later = replace(order, number=number + 1)  # of another restore it says nothing
    assert verified.not_back(after, later, "why", is_lost=True).excuse is Excuse.LOST


@pytest.mark.parametrize("how", ["started", "restored"])
def test_that_a_keeper_was_told_to_end_is_forgotten_with_new_tasks(
    how: str,
    context: Context,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Epochs are numbered anew if the store is; and what an older build finds, which knows nothing
    of it, is as it was."""
    order = Order(7, leave_running=True, restores=committed(context))
    context.told_at = 1.0
    verified.note_told(context, order.number)
    assert context.place.load().told == order.number
    context.told_at = 0.0
    if how == "started":
        supervisor_of(context).start(["true"], {})
    else:
        restoring = Restoring(context, order)
        monkeypatch.setattr(restoring, "_read", lambda: SimpleNamespace(network=Network()))
        restoring.lock_network()
    assert context.place.load() == context.state
    assert "told" not in json.loads((context.place.run / "state.json").read_text())
    wrong = verified.not_back(context, order, "why", is_lost=True)
    assert wrong.excuse is Excuse.LOST


def test_what_says_nothing_is_not_stored_of_a_rank(context: Context) -> None:  # noqa: F811
    """A field that is new keeps no older build from what it knows."""
    context.note(epoch=7, network=True)
    said = json.loads((context.place.run / "state.json").read_text())
    assert said == {"boot": context.state.boot, "epoch": 7, "network": True}
    assert context.place.load() == context.state


@pytest.mark.parametrize("lives", [True, False])
def test_that_an_earlier_keeper_was_told_excuses_no_other_rank_while_the_tasks_live(
    lives: bool,
    context: Context,  # noqa: F811
    task: subprocess.Popen[bytes],  # noqa: F811
) -> None:
    """They have not ended because of it, and have taken no other rank along."""
    context.world = 2
    store, keys = context.store, context.keys
    checkpoint = committed(context)
    plan = Plan(world=2, leave_running=True, restores=checkpoint)
    number = epochs.begin(store, keys, plan)
    store.write([], [Put(keys.settled(number, 1), settled_text("rank 1 is not back"))])
    context.note(pid=task.pid, epoch=number, told=number)
    if not lives:
        task.kill()
        task.wait()
    words = context, number
    found = verified.await_verdict(*words, problem=False, gives_up=lambda: False)
    assert found == "rank 1 is not back"
    assert (checkpoint in verified.marks(store, keys, [checkpoint])) == lives


def test_that_a_keeper_was_told_to_end_is_noted_before_the_store_is_asked(
    context: Context,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That may take long, and the keeper may be killed meanwhile."""
    context.told_at = 1.0
    noted: list[int] = []

    def read(*_: str) -> None:
        noted.append(context.place.load().told)
        raise Unreachable("the store is away")

    monkeypatch.setattr(context.store, "read", read)
    words = context, 7
    assert verified.await_verdict(*words, problem=False, gives_up=lambda: True) is None
    assert noted == [7]
