# SPDX-License-Identifier: Apache-2.0
"""A signal that comes when the rank's tasks were just made, and nobody forwards signals yet."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from gpustasis.cli import job_recovery, job_run, output
from gpustasis.errors import StoreError
from gpustasis.jobs.ending import FORWARDED, Ended
from gpustasis.jobs.rank import Context
from gpustasis.jobs.steering import find_life
from gpustasis.jobs.supervise import Supervisor
from jobs.test_seats import CHOICE
from jobs.test_undoing import SETTINGS, context, server  # noqa: F401 - fixtures

WORDS = ("sh", "-c", "for i in $(seq 300); do sleep 0.1; done; exit 3")


@pytest.fixture(autouse=True)
def handlers() -> Iterator[dict[int, object]]:
    """What is there before, which does nothing: without it this process would end."""
    found = {number: signal.signal(number, lambda *_: None) for number in FORWARDED}
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
    if "process" in text:
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


def test_a_signal_that_comes_before_a_start_that_fails_leaves_things_as_they_were(
    handlers: dict[int, object],
    context: Context,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def say_where(_: Context) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise StoreError("it is away")

    monkeypatch.setattr(Context, "say_where", say_where)
    with pytest.raises(StoreError):
        kept(context, recovered=True)
    assert {number: signal.getsignal(number) for number in FORWARDED} == handlers
