# SPDX-License-Identifier: Apache-2.0
"""Whose a rank is, in stores that answer late, and what of the store nobody can act on."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from gpustasis.cli import job_recovery
from gpustasis.cli.job_recovery import Choice
from gpustasis.errors import JobError, StoreError
from gpustasis.jobs import steering
from gpustasis.jobs.guard import Guard
from gpustasis.jobs.kept import ended_at
from gpustasis.jobs.lives import Stage, Terms, Way, keeper_text, life_of
from gpustasis.jobs.rank import Context
from gpustasis.jobs.server import Server
from gpustasis.jobs.store import Answer, Entry, Put, Require, Unreachable
from gpustasis.verifying import Check
from jobs.test_lives import (  # noqa: F401 - a fixture
    FAILURE,
    HERE,
    TERMS,
    TEXTS,
    TTL_S,
    Keepers,
    keepers,
)
from jobs.test_stopping import committed
from jobs.test_undoing import KEYS, SETTINGS, context, server  # noqa: F401 - fixtures

CHOICE = Choice(
    restarts=1,
    afresh=False,
    back_off=1.0,
    hang_after=None,
    progress=None,
    evidence=False,
    standby=False,
)
ELSEWHERE = replace(HERE, run="/run/b", host="b")


def test_a_seat_whose_write_was_lost_is_taken_again(
    keepers: Keepers,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else its keeper would keep a lease that nothing goes with, and be missed for ever."""
    one = keepers.start(1)
    key, write = keepers.keys.keeper(1), one._store.write
    lost: list[str] = []

    def once_lost(requires: Sequence[Require], puts: Sequence[Put]) -> Answer:
        if puts and puts[0].key == key and not lost:
            lost.append(key)
            raise Unreachable("no answer")
        return write(requires, puts)

    monkeypatch.setattr(one._store, "write", once_lost)
    keepers.store.revoke(one._lease)
    keepers.wait(lambda: bool(lost))
    keepers.wait(lambda: key in keepers.store.read(key).entries)
    assert one.unseated == ""


@pytest.mark.parametrize("how", ["ends", "comes"])
def test_no_keeper_loses_its_seat_to_itself(
    how: str,
    keepers: Keepers,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A write that nobody has answered was applied; that seat ends, or comes to be, while the
    keeper sits down again."""
    one = keepers.start(1)
    one._over.set()
    assert one._thread is not None
    one._thread.join()
    key, grant, before = keepers.keys.keeper(1), one._store.grant, one._lease
    if how == "comes":
        keepers.store.revoke(before)
    changed: list[int] = []

    def meanwhile(ttl_s: int) -> int:
        if not changed:
            changed.append(1)
            if how == "ends":
                keepers.store.revoke(before)
            else:
                keepers.store.write([], [Put(key, keeper_text(one._name, HERE))])
        return grant(ttl_s)

    monkeypatch.setattr(one._store, "grant", meanwhile)
    one._sit_again()
    assert one.unseated == ""
    assert one._lease != before
    one._store.keep(one._lease)
    keepers.store.revoke(one._lease)
    assert key not in keepers.store.read(key).entries
    one._lease = 0


def test_what_one_place_has_begun_no_other_one_goes_on_with(
    keepers: Keepers,  # noqa: F811
) -> None:
    """A keeper that dies between that and joining the epoch leaves it to the next one: whose tasks
    would then count as being where the first one was."""
    first = keepers.start(1)
    assert first.say(2, Way.HERE)
    assert first.say(2, Way.HERE)  # the answer to the first may have been lost
    first.close()
    other = keepers.start(1, ELSEWHERE)
    assert not other.say(2, Way.HERE)
    standing = other.standing(2)
    assert standing is not None and standing.where == HERE


def test_after_a_boot_it_is_said_anew_where_a_rank_is(keepers: Keepers) -> None:  # noqa: F811
    """Else another directory of the machine would know what is left in this one."""
    first = keepers.start(1)
    assert first.say(2, Way.HERE)
    first.close()
    booted = replace(HERE, boot="2", run="/run/b")
    again = keepers.start(1, booted)
    assert again.say(2, Way.HERE)
    standing = again.standing(2)
    assert standing is not None and standing.where == booted


def test_whatever_the_store_holds_a_keeper_keeps_its_seat(
    keepers: Keepers,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What went wrong is told once, and what is there later is done."""
    lead = keepers.start(0)

    def wrong(*_: object) -> None:
        raise ZeroDivisionError("of a time")

    with monkeypatch.context() as patch:
        patch.setattr(lead._leading, "turn", wrong)
        keepers.wait(lambda: any("is not looked after" in one for one in keepers.said))
        time.sleep(1.5 * TTL_S)
        assert keepers.keys.keeper(0) in keepers.store.read(keepers.keys.keeper(0)).entries
    assert len(keepers.said) == 1
    lead.say(1, Way.ENDED)
    keepers.start(1).say(1, Way.ENDED)
    keepers.wait(lambda: keepers.life().stage is Stage.DONE)


def test_whoever_stands_by_waits_for_a_store_that_is_away(
    context: Context,  # noqa: F811
    server: Server,  # noqa: F811
    tmp_path: Path,
    journal: Path,
) -> None:
    server.close()
    server.close = lambda: None  # type: ignore[method-assign]  # it is
    back: list[Server] = []

    def come_back() -> None:
        back.append(Server(tmp_path / "store", journal))

    timer = threading.Timer(1.0, come_back)
    timer.start()
    choice = replace(CHOICE, standby=True)
    rank = job_recovery._recovering(context, TTL_S, choice, can_start=True)
    timer.join()
    rank.close()
    back[0].close()


@pytest.mark.parametrize(
    "changed",
    [
        {"stage": "stops", "failure": None},  # why it is restored has to be said
        {"failure": {**asdict(FAILURE), "at": 10**400}},
        {"failure": {**asdict(FAILURE), "unnoticed_s": float("nan")}},
        {"terms": {**asdict(TERMS), "back_off_s": float("inf")}},
    ],
)
def test_a_life_that_nobody_can_act_on_is_refused(changed: dict[str, Any]) -> None:
    text = json.dumps(json.loads(TEXTS[life_of]) | changed)
    with pytest.raises(JobError, match="k cannot be used"):
        life_of("k", Entry(text, 7))


def test_a_job_that_was_given_up_is_not_started_beside_what_may_run_on(
    keepers: Keepers,  # noqa: F811
) -> None:
    first = keepers.start(1)
    first.say(1, Way.HERE)
    steering.give_up(keepers.store, keepers.keys)
    first.close()  # it was cut off: it has not stopped its tasks
    other = keepers.start(1, ELSEWHERE)
    assert other.life.number == 2
    with pytest.raises(JobError, match="rank 1 was on a in life 1, where no keeper says"):
        other.say(2, Way.HERE)
    with pytest.raises(JobError, match="waits for no rank"):
        steering.fence(keepers.store, keepers.keys, 0)
    steering.fence(keepers.store, keepers.keys, 1)
    assert other.say(2, Way.HERE)


def test_whoever_has_no_seat_replaces_nobody_s_addresses(context: Context) -> None:  # noqa: F811
    """The other ranks would take its connections for some that lead to no rank."""
    terms = Terms(restarts=1)
    told: list[str] = []
    other = Guard(context.store, KEYS, 0, 1, terms, ELSEWHERE, ttl_s=TTL_S, told=told.append)
    with closing(other):
        other.begin(new=True)
        with pytest.raises(JobError, match="rank 0 has a keeper on b"):
            job_recovery.keep_recovered(
                *(context, SETTINGS, CHOICE, ("true",)),
                restore=False,
                newest=False,
                periodic=None,
                preempting=None,
            )
    assert KEYS.addresses(0) not in context.store.read(KEYS.addresses(0)).entries


def test_a_start_without_restarts_knows_that_the_job_has_ended(context: Context) -> None:  # noqa: F811
    """Else it would go back to a checkpoint of before the end."""
    _, number = committed(context), committed(context)
    assert ended_at(context.store, KEYS, context.world) == 0
    ended = job_recovery.keep_recovered(
        *(context, SETTINGS, CHOICE, ("true",)),
        restore=False,
        newest=False,
        periodic=None,
        preempting=None,
    )
    assert ended.status == 0
    assert ended_at(context.store, KEYS, context.world) == number


def test_whoever_stands_by_leaves_a_start_to_who_has_the_command(
    keepers: Keepers,  # noqa: F811
) -> None:
    """Else the rank would count as having ended before it was begun."""
    standby = Guard(
        *(keepers.store, keepers.keys, 1, 2, TERMS, ELSEWHERE),
        ttl_s=TTL_S,
        told=keepers.said.append,
    )
    assert not job_recovery._is_next(standby, can_start=False)
    assert job_recovery._is_next(standby, can_start=True)
    keepers.start(0).say(1, Way.HERE)
    assert not job_recovery._is_next(standby, can_start=False)
    first = keepers.start(1)
    first.say(1, Way.HERE)
    assert not job_recovery._is_next(standby, can_start=False)
    first.close()
    assert job_recovery._is_next(standby, can_start=False)


@pytest.mark.parametrize("seconds", [0.0, 1234.0])
def test_the_lead_waits_as_long_as_ranks_may_be_verified(
    context: Context,  # noqa: F811
    seconds: float,
) -> None:
    check = Check(words=("true",), seconds=seconds) if seconds else None
    context.options = replace(context.options, check=check)
    rank = job_recovery._recovering(context, TTL_S, CHOICE, can_start=True)
    leading = rank._guard._leading
    assert leading is not None
    assert leading._verify_s == seconds
    rank.close()


def test_who_cannot_reach_the_store_misses_nobody() -> None:
    """A keeper is gone only if the store says so for long enough."""

    class Gone:
        def read(self, *_: str) -> Answer:
            raise StoreError("it does not answer")

    gone: Any = Gone()
    guard = Guard(gone, KEYS, 1, 2, TERMS, HERE, ttl_s=TTL_S, told=print)
    following = guard._following
    assert following is not None
    following._missing_at = 1.0
    guard.turn()
    assert following._missing_at is None
