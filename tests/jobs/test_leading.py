# SPDX-License-Identifier: Apache-2.0
"""What leads a job from one life to the next, turn by turn: no keeper runs meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import pytest

from gpustasis.errors import JobError
from gpustasis.jobs import epochs, leading
from gpustasis.jobs.guard import Guard
from gpustasis.jobs.leading import Leading, Ranks
from gpustasis.jobs.lives import Life, Stage, Standing, Way, keeper_text, standing_text
from gpustasis.jobs.messages import Phase
from gpustasis.jobs.records import Keys, Plan, phase_text, settled_text
from gpustasis.jobs.store import Put, Store
from jobs.test_lives import (  # noqa: F401 - a fixture among them
    EVIDENCE,
    FAILURE,
    HERE,
    LIFE,
    TERMS,
    TTL_S,
    Keepers,
    epochs_of,
    keepers,
)


def put(
    keepers: Keepers,  # noqa: F811
    life: Life,
    ways: Sequence[Way],
    gone: Sequence[int] = (),
) -> Life:
    """Have that stored as the job's life, and how far its ranks are in it. The keepers of all but
    `gone` have a seat."""
    keys = keepers.keys
    standings = enumerate(standing_text(Standing(way=way, where=HERE)) for way in ways)
    puts = [Put(keys.in_life(life.number, rank), text) for rank, text in standings]
    seats = [keys.keeper(rank) for rank in range(len(ways)) if rank not in gone]
    puts += [Put(key, keeper_text("me", HERE)) for key in seats]
    keepers.store.write([], [Put(keys.life, life.to_text()), *puts])
    return keepers.life()


def lead_of(keepers: Keepers) -> Leading:  # noqa: F811
    """It does something when it is told to."""
    return Leading(keepers.store, keepers.keys, 10, keepers.said.append)


@pytest.mark.parametrize("hung", [True, False])
def test_evidence_is_kept_before_ranks_are_stopped(keepers: Keepers, hung: bool) -> None:  # noqa: F811
    """Of a job that hangs that is a checkpoint as well, which is marked; of another one, whose
    ranks are not all there, there can be none."""
    life = replace(LIFE, terms=EVIDENCE).failed(replace(FAILURE, hung=hung))
    lead = lead_of(keepers)
    lead.turn(put(keepers, life, [Way.LOOKED, Way.HERE]))
    assert (keepers.life().stage, epochs_of(keepers)) == (Stage.LOOKS, 0)
    lead.turn(put(keepers, life, [Way.LOOKED, Way.LOOKED]))
    if not hung:
        assert (keepers.life().stage, epochs_of(keepers)) == (Stage.STOPS, 0)
        return
    assert (keepers.life().stage, keepers.life().epoch) == (Stage.LOOKS, 1)
    made = epochs.standing(keepers.store, keepers.keys, 1)
    assert made.is_evidence
    assert made.plan == Plan(world=2, leave_running=True)
    lead.turn(keepers.life())
    assert keepers.life().stage is Stage.LOOKS
    epochs.abort(keepers.store, keepers.keys, 1, "why not")
    lead.turn(keepers.life())
    assert keepers.life().stage is Stage.STOPS


@pytest.mark.parametrize("gone", [[], [1]])
def test_evidence_is_not_waited_for_for_ever(
    keepers: Keepers,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    gone: list[int],
) -> None:
    """Not long of a keeper that is there, and not at all of one that is not."""
    life = replace(LIFE, terms=EVIDENCE).failed(replace(FAILURE, hung=True))
    if not gone:
        monkeypatch.setattr(leading, "_LOOKED_S", 0.0)
    lead_of(keepers).turn(put(keepers, life, [Way.LOOKED, Way.HERE], gone))
    assert (keepers.life().stage, epochs_of(keepers)) == (Stage.STOPS, 0)


def test_it_runs_again_once_all_ranks_do(
    keepers: Keepers,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint, keys = keepers.commit(), keepers.keys
    plan = Plan(world=2, leave_running=True, restores=checkpoint)
    number = epochs.begin(keepers.store, keys, plan)
    life = put(keepers, LIFE.failed(FAILURE).restoring(number, checkpoint), [Way.STOPPED] * 2)
    lead = lead_of(keepers)
    lead.turn(life)
    keepers.store.write([], [Put(keys.phase(number), phase_text(plan, Phase.COMMITTED))])
    keepers.store.write([], [Put(keys.settled(number, 0), settled_text(""))])
    lead.turn(life)
    assert keepers.life() == life
    assert leading.all_recoveries(keepers.store, keys) == []
    monkeypatch.setattr(leading, "_SETTLED_S", 0.0)  # who says nothing is not waited for long
    lead.turn(life)
    after = keepers.life()
    assert (after.stage, after.number, after.failure) == (Stage.RUNS, life.number + 1, None)
    (recovery,) = leading.all_recoveries(keepers.store, keys)
    assert (recovery.life, recovery.epoch, recovery.restored) == (life.number, number, checkpoint)


def test_a_leader_that_was_overtaken_begins_no_epoch(keepers: Keepers) -> None:  # noqa: F811
    """It has seen that all ranks have stopped, and stood still since; another keeper of rank 0 has
    led the job to its next life."""
    checkpoint = keepers.commit()
    stale = put(keepers, LIFE.failed(FAILURE), [Way.STOPPED] * 2)
    lead, late = lead_of(keepers), lead_of(keepers)
    lead.turn(stale)
    assert keepers.life().epoch == checkpoint + 1
    epochs.abort(keepers.store, keepers.keys, checkpoint + 1, "why not")
    lead.turn(keepers.life())
    life = keepers.life()
    assert (life.stage, life.number) == (Stage.STOPS, stale.number + 1)
    with pytest.raises(JobError, match="somebody else has just begun"):
        late.turn(stale)
    assert keepers.life() == life
    assert epochs_of(keepers) == checkpoint + 1


def test_a_leader_that_was_overtaken_changes_no_life(keepers: Keepers) -> None:  # noqa: F811
    stale = put(keepers, replace(LIFE, failure=None), [Way.ENDED] * 2)
    life = leading.give_up(keepers.store, keepers.keys)
    lead_of(keepers).turn(stale)
    assert keepers.life() == life


def test_what_is_being_restored_is_not_given_up(keepers: Keepers) -> None:  # noqa: F811
    """Its ranks would be made by the epoch all the same."""
    life = put(keepers, LIFE.failed(FAILURE).restoring(2, 1), [Way.STOPPED] * 2)
    with pytest.raises(JobError, match="is being restored by epoch 2: wait for it"):
        leading.give_up(keepers.store, keepers.keys)
    words = keepers.store, keepers.keys, 1, 2, TERMS, HERE
    with closing(Guard(*words, ttl_s=TTL_S, told=keepers.said.append)) as guard:
        guard.give_up("why not")
    assert keepers.life() == life


@pytest.mark.parametrize("stage", Stage)
def test_nobody_restores_by_hand_what_is_being_restored(keepers: Keepers, stage: Stage) -> None:  # noqa: F811
    leading.require_no_recovery(keepers.store, keepers.keys)  # a job that is not recovered
    put(keepers, replace(LIFE, stage=stage), [])
    if stage not in {Stage.LOOKS, Stage.STOPS, Stage.RESTORES}:
        leading.require_no_recovery(keepers.store, keepers.keys)
        return
    with pytest.raises(JobError, match="is being restored by itself, in life 3"):
        leading.require_no_recovery(keepers.store, keepers.keys)


def test_a_fence_holds_in_the_life_that_it_was_said_in(
    keepers: Keepers,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put(keepers, LIFE.failed(FAILURE), [Way.STOPPED, Way.HERE], gone=[1])
    read = leading.read_ranks

    def meanwhile(store: Store, keys: Keys, life: Life) -> Ranks:
        found = read(store, keys, life)
        leading.give_up(store, keys)
        return found

    monkeypatch.setattr(leading, "read_ranks", meanwhile)
    with pytest.raises(JobError, match="it has gone on meanwhile"):
        leading.fence(keepers.store, keepers.keys, 1)
    assert read(keepers.store, keepers.keys, LIFE).standings[1].way is Way.HERE


def test_a_store_that_was_away_has_not_lost_a_rank(keepers: Keepers) -> None:  # noqa: F811
    """A lease that has ended while nobody could keep it says nothing of its rank."""
    lead = lead_of(keepers)
    keepers.start(1).say(1, Way.HERE)
    life = keepers.life()
    keepers.open.close()
    lead.turn(life)
    lead._missing = {rank: since - 4 for rank, since in lead._missing.items()}
    lead.forget()
    lead._looked = -1e9
    lead.turn(life)
    lead._missing = {rank: since - 4 for rank, since in lead._missing.items()}
    lead._looked = -1e9
    lead.turn(life)
    assert keepers.life().stage is Stage.RUNS
    lead._missing = {rank: since - 2 for rank, since in lead._missing.items()}
    lead._looked = -1e9
    lead.turn(life)
    assert keepers.life().stage is Stage.STOPS
