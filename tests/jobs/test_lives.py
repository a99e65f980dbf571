# SPDX-License-Identifier: Apache-2.0
"""How a job goes from one life to the next: what is stored, who may say what, and when it is
restored."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpustasis.errors import JobError
from gpustasis.jobs import epochs, steering
from gpustasis.jobs.guard import Guard, where
from gpustasis.jobs.lead import digest_of
from gpustasis.jobs.leading import Ranks
from gpustasis.jobs.lives import (
    Failure,
    Life,
    Recovery,
    Stage,
    Standing,
    Terms,
    Way,
    Where,
    keeper_of,
    keeper_text,
    life_of,
    recovery_of,
    recovery_text,
    standing_of,
    standing_text,
)
from gpustasis.jobs.messages import Phase
from gpustasis.jobs.records import Keys, Plan, phase_text
from gpustasis.jobs.store import Entry, Put, Store
from support.changed_text import read_or_refused

HERE = Where(host="a", boot="1", machine="m", run="/run/a")
TERMS = Terms(restarts=2)
EVIDENCE = Terms(restarts=2, evidence=True)
FAILURE = Failure(rank=1, reason="why", at=5.0)
LIFE = Life(run="r", number=3, stage=Stage.RUNS, world=2, terms=TERMS, failure=FAILURE)
RECOVERY = Recovery(
    life=1, rank=0, reason="why", at=5.0, unnoticed_s=1.0, seconds=2.0, epoch=3, restored=1
)
STANDING = Standing(way=Way.HERE, where=HERE)
TEXTS: dict[Callable[..., Any], str] = {
    life_of: LIFE.to_text(),
    standing_of: standing_text(STANDING),
    keeper_of: keeper_text("me", HERE),
    recovery_of: recovery_text(RECOVERY),
}
TTL_S = 2


def test_what_is_written_is_read() -> None:
    assert life_of("k", Entry(TEXTS[life_of], 7)) == replace(LIFE, revision=7)
    assert standing_of("k", Entry(TEXTS[standing_of], 7)) == replace(STANDING, revision=7)
    assert keeper_of("k", Entry(TEXTS[keeper_of], 7)) == ("me", HERE)
    assert recovery_of("k", Entry(TEXTS[recovery_of], 7)) == RECOVERY


@pytest.mark.parametrize("read", TEXTS, ids=lambda read: read.__name__)
@given(st.data())
def test_any_text_is_read_or_refused(read: Callable[..., Any], data: st.DataObject) -> None:
    read_or_refused(read, TEXTS[read], data)


def test_a_failure_is_restored_as_often_as_is_allowed() -> None:
    life = replace(LIFE, failure=None)
    stages = []
    while not life.stage.is_final:
        life = life.failed(FAILURE)
        stages.append((life.stage, life.back_off_s()))
        if life.stage is Stage.STOPS:
            life = life.restoring(epoch=9, checkpoint=1).next()
    assert stages == [(Stage.STOPS, 0.0), (Stage.STOPS, 1.0), (Stage.FAILED, 1.0)]
    assert life.why() == "why; it was restarted 2 times already"


def test_the_back_off_doubles_until_another_checkpoint_is_restored() -> None:
    life = replace(LIFE, terms=Terms(restarts=99, back_off_s=2.0), failure=None)
    waits = []
    for checkpoint in (1, 1, 1, 1, 5, 5):
        life = life.failed(FAILURE)
        waits.append(life.back_off_s())
        life = life.restoring(epoch=9, checkpoint=checkpoint).next()
    assert waits == [0.0, 2.0, 4.0, 8.0, 16.0, 2.0]  # leading.py waits for none before another one
    late = replace(life, in_a_row=50)
    assert late.back_off_s() == 300.0


def test_a_restore_that_was_aborted_is_a_life_of_its_own() -> None:
    """A keeper may have made its tasks, and have died: what it says of them is still to come."""
    life = LIFE.failed(FAILURE).restoring(epoch=9, checkpoint=1)
    after = life.not_restored(FAILURE)
    assert (after.stage, after.number, after.begun) == (Stage.STOPS, life.number + 1, 2)
    assert after.restoring(epoch=10, checkpoint=1).not_restored(FAILURE).stage is Stage.FAILED
    watched = replace(life, terms=EVIDENCE)
    assert watched.not_restored(FAILURE).stage is Stage.STOPS  # nothing is there to look at


@pytest.mark.parametrize(
    ("other", "is_mine"),
    [
        ({}, True),
        ({"host": "b"}, True),  # a host may get another name
        ({"run": "/run/b"}, False),  # there may be tasks that this keeper knows nothing of
        ({"boot": "2"}, True),  # nothing has outlived that
        ({"boot": "2", "machine": "n"}, False),
        ({"boot": "2", "host": "b"}, False),  # boards of one kind may have one UUID
        ({"boot": "2", "machine": ""}, False),
    ],
)
def test_who_knows_that_no_task_is_left(other: dict[str, str], is_mine: bool) -> None:
    there = replace(HERE, **other)
    mine = replace(HERE, machine="") if other.get("machine") == "" else HERE
    assert there.is_mine(mine) is is_mine


def test_it_is_said_which_rank_is_waited_for() -> None:
    life = LIFE.failed(FAILURE)
    stopped = replace(STANDING, way=Way.STOPPED)
    other = replace(HERE, run="/run/b", host="b")

    def why(standing: Standing | None, keeper: Where | None) -> str:
        standings = {0: stopped} | ({1: standing} if standing else {})
        keepers = {0: HERE} | ({1: keeper} if keeper else {})
        return Ranks(2, standings, keepers).awaited(life)

    assert why(stopped, HERE) == ""
    assert why(stopped, other) == ""
    assert "has not stopped yet" in why(STANDING, HERE)
    assert "no keeper says that its tasks have ended" in why(STANDING, None)
    assert "its keeper is on b" in why(STANDING, other)
    assert "has no keeper" in why(stopped, None)
    assert "has not said that it has no tasks" in why(None, HERE)


class Keepers:
    """Of one job, in one process."""

    def __init__(self, new_store: Callable[[], Store], keys: Keys) -> None:
        self._new_store = new_store
        self.keys = keys
        self.store = new_store()
        self.said: list[str] = []
        self.open = ExitStack()

    def start(self, rank: int, where: Where = HERE, terms: Terms = TERMS, **words: bool) -> Guard:
        guard = Guard(
            *(self._new_store(), self.keys, rank, 2, terms, where),
            ttl_s=TTL_S,
            told=self.said.append,
        )
        self.open.enter_context(closing(guard))
        guard.begin(new=words.get("new", True), newest=words.get("newest", False))
        return guard

    def life(self) -> Life:
        return steering.find_life(self.store, self.keys)

    def wait(self, what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not what():
            assert time.monotonic() < deadline, (self.life(), self.said)
            time.sleep(0.02)

    def commit(self, *, evidence: bool = False) -> int:
        """A whole checkpoint, of records that nobody reads."""
        plan = Plan(world=2, leave_running=True)
        puts = [Put(self.keys.evidence(epochs_of(self) + 1), "1")] if evidence else []
        number = epochs.begin(self.store, self.keys, plan, puts=puts)
        records = {rank: f"{rank}" for rank in range(2)}
        text = phase_text(plan, Phase.COMMITTED, digest_of(records))
        written = [Put(self.keys.record(number, rank), one) for rank, one in records.items()]
        self.store.write([], [Put(self.keys.phase(number), text), *written])
        return number


def epochs_of(keepers: Keepers) -> int:
    entry = keepers.store.read(keepers.keys.newest).entries.get(keepers.keys.newest)
    return int(entry.value) if entry else 0


@pytest.fixture
def keepers(new_store: Callable[[], Store], top: str) -> Iterator[Keepers]:
    found = Keepers(new_store, Keys("job", top))
    with found.open:
        yield found


def test_a_rank_has_one_keeper(keepers: Keepers) -> None:
    first = keepers.start(1)
    with pytest.raises(JobError, match="rank 1 has a keeper on a"):
        keepers.start(1, replace(HERE, run="/run/b"))
    second = keepers.start(1)  # it holds the rank's lock on that host: the first one has died
    assert second.has_seat()
    keepers.wait(lambda: first.life.run == second.life.run)


def test_of_two_keepers_that_come_at_once_one_has_the_seat(
    keepers: Keepers, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant = keepers.store.grant

    def meanwhile(ttl_s: int) -> int:
        keepers.start(1, replace(HERE, run="/run/b"))
        return grant(ttl_s)

    monkeypatch.setattr(keepers.store, "grant", meanwhile)
    words = keepers.store, keepers.keys, 1, 2, TERMS, HERE
    late = Guard(*words, ttl_s=TTL_S, told=keepers.said.append)
    with closing(late), pytest.raises(JobError, match="rank 1 has got another keeper just now"):
        late.begin(new=True)


def test_all_keepers_are_told_the_same(keepers: Keepers) -> None:
    keepers.start(0)
    with pytest.raises(JobError, match="its ranks were started with"):
        keepers.start(1, terms=Terms(restarts=3))


def test_only_who_knows_says_that_a_rank_has_stopped(keepers: Keepers) -> None:
    keepers.start(0).say(1, Way.HERE)
    first = keepers.start(1)
    assert first.say(1, Way.HERE)
    first.close()
    other = keepers.start(1, replace(HERE, run="/run/b", host="b"))
    assert not other.say(1, Way.STOPPED)
    found = other.standing(1)
    assert found is not None
    assert (found.way, found.where) == (Way.HERE, HERE)


def test_of_two_failures_one_is_taken(keepers: Keepers) -> None:
    both = [keepers.start(rank) for rank in range(2)]
    for rank, one in enumerate(both):
        one.say(1, Way.HERE)
        one.report(1, f"rank {rank} has ended", unnoticed_s=0.1)
    life = keepers.life()
    assert (life.stage, life.begun, life.why()) == (Stage.STOPS, 1, "rank 0 has ended")


def stopped(keepers: Keepers) -> list[Guard]:
    """A job of two ranks that has failed; both have said that they have stopped."""
    both = [keepers.start(rank) for rank in range(2)]
    for one in both:
        one.say(1, Way.HERE)
    both[1].report(1, "rank 1 has ended", unnoticed_s=0.1)
    return both


def test_it_is_restored_when_all_have_stopped_and_no_epoch_is_open(keepers: Keepers) -> None:
    checkpoint = keepers.commit()
    both = stopped(keepers)
    open_one = epochs.begin(keepers.store, keepers.keys, Plan(world=2, leave_running=True))
    both[0].say(1, Way.STOPPED)
    keepers.wait(lambda: any("rank 1 has not stopped yet" in one for one in keepers.said))
    both[1].say(1, Way.STOPPED)
    keepers.wait(lambda: any(f"epoch {open_one} is not decided yet" in one for one in keepers.said))
    assert keepers.life().stage is Stage.STOPS
    assert epochs_of(keepers) == open_one
    epochs.abort(keepers.store, keepers.keys, open_one, "why not")
    keepers.wait(lambda: keepers.life().stage is Stage.RESTORES)
    life = keepers.life()
    assert (life.epoch, life.restored) == (open_one + 1, checkpoint)
    _, plan = epochs.phase(keepers.store, keepers.keys, life.epoch)
    assert plan.restores == checkpoint


def test_what_was_kept_as_evidence_is_not_restored(keepers: Keepers) -> None:
    checkpoint = keepers.commit()
    keepers.commit(evidence=True)
    for one in stopped(keepers):
        one.say(1, Way.STOPPED)
    keepers.wait(lambda: keepers.life().stage is Stage.RESTORES)
    assert keepers.life().restored == checkpoint


def test_a_restore_that_is_aborted_is_tried_again_and_then_given_up(keepers: Keepers) -> None:
    keepers.commit()
    both = stopped(keepers)
    for number in (1, 2):
        for one in both:
            one.say(number, Way.STOPPED)
        keepers.wait(lambda: keepers.life().stage is Stage.RESTORES)
        epochs.abort(keepers.store, keepers.keys, keepers.life().epoch, "a damaged dump")
        keepers.wait(lambda: keepers.life().stage is not Stage.RESTORES)
        for one in both:
            one.say(number + 1, Way.HERE)
    life = keepers.life()
    assert (life.stage, life.number) == (Stage.FAILED, 3)
    assert "has not restored it: a damaged dump; it was restarted 2 times already" in life.why()


def test_a_keeper_that_is_gone_is_missed(keepers: Keepers) -> None:
    """By the lead; and the lead by the others."""
    both = [keepers.start(rank) for rank in range(2)]
    for one in both:
        one.say(1, Way.HERE)
    both[1].close()
    keepers.wait(lambda: keepers.life().stage is Stage.STOPS)
    life = keepers.life()
    assert life.why() == "rank 1: its keeper's lease is gone"
    assert life.failure is not None
    assert life.failure.unnoticed_s >= TTL_S


def test_the_lead_is_missed_too(keepers: Keepers) -> None:
    both = [keepers.start(rank) for rank in range(2)]
    for one in both:
        one.say(1, Way.HERE)
    both[0].close()
    keepers.wait(lambda: keepers.life().stage is Stage.STOPS)
    assert keepers.life().why() == "rank 0: its keeper's lease is gone"


def test_a_rank_that_has_ended_well_is_not_missed(keepers: Keepers) -> None:
    both = [keepers.start(rank) for rank in range(2)]
    for one in both:
        one.say(1, Way.HERE)
    both[1].say(1, Way.ENDED)
    both[1].close()
    time.sleep(2 * TTL_S)
    assert keepers.life().stage is Stage.RUNS
    both[0].say(1, Way.ENDED)
    keepers.wait(lambda: keepers.life().stage is Stage.DONE)


def test_a_person_says_that_a_host_is_off(keepers: Keepers) -> None:
    keepers.commit()
    with pytest.raises(JobError, match="is not one that is recovered"):
        steering.fence(keepers.store, keepers.keys, 1)
    both = stopped(keepers)
    both[0].say(1, Way.STOPPED)
    with pytest.raises(JobError, match="it stops them itself"):
        steering.fence(keepers.store, keepers.keys, 1)
    both[1].close()
    keepers.start(1, replace(HERE, run="/run/b"))
    steering.fence(keepers.store, keepers.keys, 1)
    keepers.wait(lambda: keepers.life().stage is Stage.RESTORES)


def test_a_job_that_has_ended_begins_anew(keepers: Keepers) -> None:
    both = stopped(keepers)
    life = steering.give_up(keepers.store, keepers.keys)
    assert life.stage is Stage.FAILED
    assert keepers.start(1, new=False).life.stage is Stage.FAILED
    for one in both:
        one.close()
    again = keepers.start(0)
    assert (again.life.stage, again.life.number, again.life.begun) == (Stage.RUNS, 2, 0)
    assert again.life.run != life.run


def test_a_store_that_has_lost_what_it_held_is_not_believed(keepers: Keepers) -> None:
    one = keepers.start(1)
    older = keepers.life()
    one.report(1, "rank 1 has ended", unnoticed_s=0.1)
    one._note(replace(one.life, revision=one.life.revision + 10_000))
    with pytest.raises(JobError, match="has lost what it held"):
        one.report(1, "rank 1 has ended", unnoticed_s=0.1)
    assert older.number == 1


def test_a_place_is_known_by_what_is_noted_there(tmp_path: Path) -> None:
    """Not by its path: containers have the same ones."""
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()
    first = where(places[0])
    assert first.is_mine(where(places[0]))
    assert not first.is_mine(where(places[1]))
    (places[0] / "place").unlink()  # and with it, what the tasks are
    assert not first.is_mine(where(places[0]))
