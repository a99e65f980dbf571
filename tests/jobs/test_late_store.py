# SPDX-License-Identifier: Apache-2.0
"""Keepers whose store does not answer for a while: what they ask it then, and how soon again."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from gpustasis.jobs import epochs
from gpustasis.jobs.local import Local, LocalWatch
from gpustasis.jobs.member import Keeper, _Attendance
from gpustasis.jobs.messages import Limits
from gpustasis.jobs.pace import Pace
from gpustasis.jobs.records import Keys, Plan
from gpustasis.jobs.seat import Seat
from gpustasis.jobs.server import Server
from gpustasis.jobs.store import LeaseGone, Snapshot, Unreachable, WatchLost
from jobs.test_keeper import KEYS, SETTINGS, Tasks, server  # noqa: F401 - a fixture
from support.job_ranks import ANSWER_S


class Failing(Local):
    """A store that does not answer what `fails` names; `asked`: all that it was asked."""

    def __init__(self, place: Path) -> None:
        super().__init__(place, ANSWER_S)
        self.asked: list[str] = []
        self.kept_at = 0.0  # that a lease was asked for, or kept
        self.fails: set[str] = set()

    def _note(self, what: str) -> None:
        self.asked.append(what)
        if what in self.fails:
            raise Unreachable("it does not answer")

    def read(self, *keys: str) -> Snapshot:
        self._note("read")
        return super().read(*keys)

    def grant(self, ttl_s: int) -> int:
        self._note("grant")
        self.kept_at = time.monotonic()
        return super().grant(ttl_s)

    def keep(self, lease: int) -> None:
        self._note("keep")
        self.kept_at = time.monotonic()
        super().keep(lease)

    def watch(self, key: str, after: int) -> LocalWatch:
        self._note("watch")
        return super().watch(key, after)


@pytest.fixture
def store(server: Server, tmp_path: Path) -> Iterator[Failing]:  # noqa: F811
    store = Failing(tmp_path / "store")
    yield store
    store.close()


@pytest.fixture
def attendance(store: Failing) -> Iterator[_Attendance]:
    number = epochs.begin(store, KEYS, Plan(world=1, leave_running=True))
    seat = Seat(store, KEYS, number, 0, "keeper")
    attendance = _Attendance(seat, 1, Tasks(), SETTINGS, Pace(0, 1, 1000))
    yield attendance
    store.fails = set()
    attendance.close()


def beat(attendance: _Attendance, store: Failing) -> list[str]:
    """What a beat asks."""
    store.asked.clear()
    attendance._beaten = -1e9
    attendance._again_at = 0.0
    attendance._pending.clear()
    attendance._lead_asks = None
    attendance._exchange()
    return store.asked


def test_a_watch_outlives_one_request_without_answer_and_no_second_one(
    attendance: _Attendance, store: Failing
) -> None:
    attendance._begin()
    store.fails = {"keep"}
    first = attendance._watching[0][0]
    assert beat(attendance, store)[:2] == ["read", "keep"]
    assert attendance._watching[0][0] is first
    beat(attendance, store)
    assert not attendance._watching
    store.fails = set()
    assert beat(attendance, store)[:4] == ["keep", "read", "watch", "keep"]
    assert len(attendance._watching) == 1
    assert attendance._failures == 0
    assert beat(attendance, store)[:2] == ["read", "keep"]


def test_a_store_that_has_not_answered_is_asked_first_to_keep_the_lease(
    attendance: _Attendance, store: Failing
) -> None:
    attendance._begin()
    store.fails = {"keep"}
    beat(attendance, store)
    assert beat(attendance, store) == ["keep"]


def test_of_many_ranks_one_whose_reading_is_late_only_keeps_its_lease_and_reads_later(
    store: Failing,
) -> None:
    world = 2048
    number = epochs.begin(store, KEYS, Plan(world=world, leave_running=True))
    seat = Seat(store, KEYS, number, 0, "keeper")
    attendance = _Attendance(seat, world, Tasks(), SETTINGS, Pace(0, world, 1000))
    attendance._begin()
    attendance._seat.was_told = False
    while "read" not in beat(attendance, store):  # each third beat reads
        pass
    for _ in range(2):
        assert beat(attendance, store) == ["keep"]
    store.fails = {"read"}
    assert beat(attendance, store) == ["read"]
    assert beat(attendance, store) == ["keep"]
    assert len(attendance._watching) == 1
    assert attendance._failures == 0
    store.fails = set()
    assert beat(attendance, store) == ["read", "keep"]  # it was owed
    attendance._seat.was_told = True
    for _ in range(3):
        assert beat(attendance, store) == ["keep"]
        attendance._seat.was_told = True
    attendance.close()


def test_a_rank_that_has_given_the_store_up_keeps_no_lease_before_it_can_read(
    attendance: _Attendance, store: Failing
) -> None:
    """The others see that it is away, and do not stand still while half of its requests work."""
    attendance._begin()
    store.fails = {"read"}
    beat(attendance, store)
    attendance._me = replace(attendance._me, reachable=False)
    for _ in range(3):
        assert beat(attendance, store) == ["read"]


def test_a_lease_is_kept_until_the_store_has_answered_all(
    attendance: _Attendance, store: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.fails = {"watch"}
    store.asked.clear()
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            attendance._seat._store.revoke(attendance._seat._lease)  # as if it had expired
        if len(waits) == 4:
            store.fails = set()

    monkeypatch.setattr("gpustasis.jobs.member.time.sleep", sleep)
    began = time.monotonic()
    attendance._begin()
    assert store.asked[:9] == [
        *("grant", "read", "watch"),
        *("keep", "read", "watch"),
        *("keep", "grant", "read"),
    ]
    kept_at = store.kept_at
    store.keep(attendance._seat._lease)
    assert len(waits) == 4
    assert 0.1 <= waits[0] <= 0.2
    assert waits[-1] > waits[0]
    assert began < attendance._beaten <= kept_at


class Flaky(Failing):
    """Its watches end at once."""

    def watch(self, key: str, after: int) -> LocalWatch:
        return cast("LocalWatch", Lost())


class Lost:
    """A watch that is lost."""

    def wait(self, timeout_s: float) -> Sequence[object]:
        raise WatchLost("it is lost")

    def close(self) -> None: ...


def waits_of(store: Local, count: int, monkeypatch: pytest.MonkeyPatch, ttl_s: int) -> list[float]:
    """How long a keeper that waits for an epoch waits before it asks again."""
    waits: list[float] = []
    monkeypatch.setattr(Keeper, "_wait", lambda _, seconds, is_over: waits.append(seconds))
    settings = replace(SETTINGS, ttl_s=ttl_s, limits=Limits())
    keeper = Keeper(store, Keys("job"), 0, 1, Tasks(), settings)
    assert keeper.take_part(lambda: len(waits) == count) is None
    return waits


def test_watches_that_are_lost_now_and_then_delay_no_keeper(
    server: Server,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Flaky(tmp_path / "store")
    assert max(waits_of(store, 20, monkeypatch, ttl_s=60)) <= 0.2
    store.close()


def test_a_keeper_that_has_not_joined_asks_in_time_for_the_next_epoch(
    store: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.fails = {"read"}
    waits = waits_of(store, 20, monkeypatch, ttl_s=600)
    assert waits[0] <= 0.2
    assert Limits().look_s / 16 <= waits[-1] <= Limits().look_s / 8


@pytest.mark.parametrize(
    ("world", "first_s"), [(1, 0.2), (64, 0.2), (200, 0.2), (4096, 4.096), (16_384, 16.384)]
)
def test_of_many_ranks_each_asks_again_later(world: int, first_s: float) -> None:
    pace = Pace(0, world, 500)
    for failures in range(8):
        most_s = min(60, first_s * 2**failures)
        waits = [pace.again_s(failures, 60) for _ in range(50)]
        assert most_s / 2 <= min(waits)
        assert max(waits) <= most_s


def test_a_lease_that_is_gone_is_made_anew(store: Failing) -> None:
    number = epochs.begin(store, KEYS, Plan(world=1, leave_running=True))
    seat = Seat(store, KEYS, number, 0, "keeper")
    seat.take(60)
    store.revoke(seat._lease)
    with pytest.raises(LeaseGone):
        seat.keep()
    seat.take(60)
    seat.keep()
