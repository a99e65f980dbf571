# SPDX-License-Identifier: Apache-2.0
"""A signal that comes when the rank's tasks were just made, and nobody forwards signals yet."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Callable, Iterator

import pytest

from gpustasis.cli import job_recovery, job_run, output
from gpustasis.errors import JobError
from gpustasis.jobs.ending import FORWARDED, Ended
from gpustasis.jobs.member import Keeper
from gpustasis.jobs.messages import Phase
from gpustasis.jobs.rank import Context
from gpustasis.jobs.records import Plan
from gpustasis.jobs.steering import find_life
from gpustasis.jobs.store import Unreachable
from gpustasis.jobs.supervise import Supervisor
from jobs.test_seats import CHOICE
from jobs.test_undoing import (  # noqa: F401 - fixtures
    SETTINGS,
    context,
    decided,
    server,
    task,
)

WORDS = ("sh", "-c", "for i in $(seq 300); do sleep 0.1; done; exit 3")


HEARD: list[int] = []  # by what was there before a keeper held signals


class Ends(BaseException):
    """As the keeper does."""


def hears(number: int, _: object) -> None:
    HEARD.append(number)


def ends(number: int, _: object) -> None:
    raise Ends


@pytest.fixture(autouse=True)
def handlers() -> Iterator[dict[int, object]]:
    """What is there before, which only listens: without it this process would end."""
    HEARD.clear()
    found = {number: signal.signal(number, hears) for number in FORWARDED}
    mine: dict[int, object] = {number: signal.getsignal(number) for number in FORWARDED}
    yield mine
    for number, handler in found.items():
        signal.signal(number, handler)


def kept(context: Context, *, recovered: bool) -> Ended:  # noqa: F811
    if not recovered:
        supervisor = Supervisor(context, SETTINGS, print)
        return job_run._keep(supervisor, context, WORDS, False, False, None)
    return job_recovery.keep_recovered(
        *(context, SETTINGS, CHOICE, WORDS),
        restore=False,
        newest=False,
        periodic=None,
        preempting=None,
    )


def tell_myself(text: str) -> None:
    if ": process" in text:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("recovered", [True, False])
def test_a_signal_reaches_tasks_that_were_just_started(
    recovered: bool,
    handlers: dict[int, object],
    context: Context,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else they would run on without a keeper."""
    tellers: list[Callable[[str], None]] = [tell_myself]
    monkeypatch.setattr(output, "teller", lambda: tellers[0])
    ended = kept(context, recovered=recovered)
    assert ended.status == 128 + signal.SIGTERM
    assert not context.state.lives
    assert {number: signal.getsignal(number) for number in FORWARDED} == handlers
    if recovered:
        why = find_life(context.store, context.keys).why()
        assert why == "rank 0: its keeper was told to end, by SIGTERM"


@pytest.mark.parametrize("recovered", [True, False])
def test_a_signal_that_comes_before_a_start_that_fails_leaves_things_as_they_were(
    recovered: bool,
    handlers: dict[int, object],
    context: Context,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There are no tasks that it could reach, and the keeper ends anyway."""

    def fail(*_: object, **__: object) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        raise FileNotFoundError(errno.ENOENT, "no such program")

    monkeypatch.setattr(os, "posix_spawnp", fail)
    with pytest.raises(JobError, match="cannot start sh: no such program"):
        kept(context, recovered=recovered)
    assert HEARD == []  # it was held
    assert context.state.pid == 0
    key = context.keys.keeper(0)
    assert key not in context.store.read(key).entries
    assert {number: signal.getsignal(number) for number in FORWARDED} == handlers
    os.kill(os.getpid(), signal.SIGTERM)
    assert HEARD == [signal.SIGTERM]


def left_open(context: Context) -> None:  # noqa: F811
    """An earlier keeper has not done what was decided of an epoch."""
    decided(context, Plan(world=1, leave_running=True), Phase.ABORTED)


@pytest.mark.parametrize(
    ("recovered", "comes"),
    [(False, "meanwhile"), (True, "meanwhile"), (True, "before")],  # without a life none is held
)
def test_a_keeper_that_waits_for_a_store_before_there_are_tasks_is_ended_by_a_signal(
    recovered: bool,
    comes: str,
    context: Context,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store may stay away, and nothing else but SIGKILL would end the keeper."""
    left_open(context)
    signal.signal(signal.SIGTERM, ends)
    say_where = Context.say_where

    def say(context: Context) -> None:
        say_where(context)
        if comes == "before":
            os.kill(os.getpid(), signal.SIGTERM)

    def take_part(*_: object) -> None:
        if comes == "meanwhile":
            os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("the store is away, and the keeper waits for ever")

    monkeypatch.setattr(Context, "say_where", say)
    monkeypatch.setattr(Keeper, "take_part", take_part)
    with pytest.raises(Ends):
        kept(context, recovered=recovered)
    assert context.state.pid == 0


@pytest.mark.parametrize("is_away", [False, True])
def test_a_signal_reaches_tasks_that_an_epoch_has_brought_which_was_left_open(
    is_away: bool,
    context: Context,  # noqa: F811
    task: subprocess.Popen[bytes],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As soon as there are tasks, and before the store is asked anything else; which may be away
    by now."""

    def settle(_: Supervisor) -> bool:
        context.note(pid=task.pid)
        return True

    def say_where(_: Context) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        if HEARD:
            pytest.fail("the keeper would have ended")
        if is_away:
            raise Unreachable("the store is away")

    monkeypatch.setattr(Supervisor, "settle", settle)
    monkeypatch.setattr(Context, "say_where", say_where)
    supervisor = Supervisor(context, SETTINGS, print)
    ended = job_run._keep(supervisor, context, WORDS, False, True, None)
    assert (ended.status, ended.told) == (128 + signal.SIGTERM, True)
    assert not context.state.lives


@pytest.mark.parametrize("recovered", [True, False])
def test_signals_are_held_as_soon_as_what_was_left_open_is_done(
    recovered: bool,
    context: Context,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left_open(context)
    tellers: list[Callable[[str], None]] = [tell_myself]
    monkeypatch.setattr(output, "teller", lambda: tellers[0])
    assert kept(context, recovered=recovered).status == 128 + signal.SIGTERM
    assert HEARD == []
