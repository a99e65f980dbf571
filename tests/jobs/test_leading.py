# SPDX-License-Identifier: Apache-2.0
"""What leads a job from one life to the next, turn by turn: no keeper runs meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import pytest

from gpustasis.errors import JobError
from gpustasis.jobs import epochs, leading, steering, verified
from gpustasis.jobs.guard import Guard
from gpustasis.jobs.leading import Leading, Ranks
from gpustasis.jobs.lives import Life, Stage, Standing, Way, keeper_text, standing_text
from gpustasis.jobs.messages import Phase
from gpustasis.jobs.records import Keys, Plan, phase_text, settled_text
from gpustasis.jobs.store import Put, Store
from gpustasis.jobs.verified import Mark
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
    assert steering.all_recoveries(keepers.store, keys) == []
    monkeypatch.setattr(leading, "_SETTLED_S", 0.0)  # who says nothing is not waited for long
    patient = Leading(keepers.store, keys, 10, keepers.said.append, 60.0)
    patient.turn(life)  # as long as it may be verified
    assert keepers.life() == life
    lead.turn(life)
    after = keepers.life()
    assert (after.stage, after.number, after.failure) == (Stage.RUNS, life.number + 1, None)
    (recovery,) = steering.all_recoveries(keepers.store, keys)
    assert (recovery.life, recovery.epoch, recovery.restored) == (life.number, number, checkpoint)


def started(keepers: Keepers, *, ended: int = 0) -> Life:  # noqa: F811
    """A job that is to go on from its newest checkpoint, all ranks of which are there."""
    life = replace(LIFE, stage=Stage.STOPS, begun=0, ended=ended, failure=FAILURE)
    return put(keepers, life, [Way.STOPPED] * 2)


def test_a_start_goes_on_from_the_newest_checkpoint(keepers: Keepers) -> None:  # noqa: F811
    checkpoint, keys = keepers.commit(), keepers.keys
    lead = lead_of(keepers)
    lead.turn(started(keepers))
    life = keepers.life()
    assert (life.stage, life.epoch, life.restored) == (Stage.RESTORES, checkpoint + 1, checkpoint)
    plan = Plan(world=2, leave_running=True, restores=checkpoint)
    puts = [Put(keys.settled(life.epoch, rank), settled_text("")) for rank in range(2)]
    keepers.store.write([], [Put(keys.phase(life.epoch), phase_text(plan, Phase.COMMITTED)), *puts])
    lead.turn(life)
    after = keepers.life()
    assert (after.stage, after.number, after.begun) == (Stage.RUNS, life.number + 1, 0)
    assert steering.all_recoveries(keepers.store, keys) == []  # nothing had failed
    assert keepers.said == [f"job {keys.job} goes on from epoch {checkpoint}"]


def test_a_start_whose_restore_is_aborted_has_failed_once(keepers: Keepers) -> None:  # noqa: F811
    checkpoint = keepers.commit()
    lead = lead_of(keepers)
    lead.turn(started(keepers))
    epochs.abort(keepers.store, keepers.keys, checkpoint + 1, "why not")
    lead.turn(keepers.life())
    life = keepers.life()
    assert (life.stage, life.begun, life.is_start) == (Stage.STOPS, 1, False)
    assert "epoch 2 has not restored it: why not" in life.why()


@pytest.mark.parametrize("by", ["lives", "ranks", "one rank", "nobody"])
def test_what_has_ended_well_is_not_gone_on_from(keepers: Keepers, by: str) -> None:  # noqa: F811
    """Whether keepers with --restarts have noted it or others; what is made later is."""
    checkpoint, keys = keepers.commit(), keepers.keys
    noted = {"ranks": [0, 1], "one rank": [1]}.get(by, [])
    puts = [Put(keys.said_by("ended", rank), str(checkpoint)) for rank in noted]
    keepers.store.write([], puts)
    life = started(keepers, ended=checkpoint if by == "lives" else 0)
    lead_of(keepers).turn(life)
    after = keepers.life()
    if by in {"one rank", "nobody"}:
        assert (after.stage, after.restored) == (Stage.RESTORES, checkpoint)
        return
    assert (after.stage, after.restored, after.number) == (Stage.RUNS, 0, life.number + 1)
    later = keepers.commit()
    lead_of(keepers).turn(put(keepers, after.failed(FAILURE), [Way.STOPPED] * 2))
    assert (keepers.life().stage, keepers.life().restored) == (Stage.RESTORES, later)


def test_that_all_have_ended_well_is_kept_for_the_next_start(keepers: Keepers) -> None:  # noqa: F811
    checkpoint = keepers.commit()
    lead_of(keepers).turn(put(keepers, replace(LIFE, failure=None), [Way.ENDED] * 2))
    assert (keepers.life().stage, keepers.life().ended) == (Stage.DONE, checkpoint)
    guard = keepers.start(0)
    assert (guard.life.stage, guard.life.ended) == (Stage.RUNS, checkpoint)


def test_a_checkpoint_of_another_number_of_ranks_is_not_gone_on_from(
    keepers: Keepers,  # noqa: F811
) -> None:
    keepers.commit()
    three = replace(started(keepers), world=3)
    lead_of(keepers).turn(put(keepers, three, [Way.STOPPED] * 3))
    after = keepers.life()
    assert after.stage is Stage.FAILED
    assert "epoch 1 is a checkpoint of 2 ranks, and the job is started with 3" in after.why()
    assert epochs_of(keepers) == 1


@pytest.mark.parametrize("first", ["", "rank 0 is not back: its command has failed"])
def test_a_rank_that_is_not_back_fails_the_job(keepers: Keepers, first: str) -> None:  # noqa: F811
    """As soon as it has said so: its tasks are killed, and all others have to stop. What another
    one has said before is why."""
    checkpoint, keys = keepers.commit(), keepers.keys
    plan = Plan(world=2, leave_running=True, restores=checkpoint)
    number = epochs.begin(keepers.store, keys, plan)
    life = put(keepers, LIFE.failed(FAILURE).restoring(number, checkpoint), [Way.STOPPED] * 2)
    settled = Put(keys.settled(number, 1), settled_text("its command has failed"))
    phase = Put(keys.phase(number), phase_text(plan, Phase.COMMITTED))
    if first:
        verified._store(keepers.store, keys, number, checkpoint, first)
    keepers.store.write([], [phase, settled])
    lead_of(keepers).turn(life)
    after = keepers.life()
    assert (after.stage, after.number) == (Stage.STOPS, life.number + 1)
    assert after.begun == life.begun + 1
    wrong = first or "rank 1: its command has failed"
    assert after.why() == f"epoch {number} has not brought it back: {wrong}"
    assert steering.all_recoveries(keepers.store, keys) == []


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
    life = steering.give_up(keepers.store, keepers.keys)
    lead_of(keepers).turn(stale)
    assert keepers.life() == life


def test_what_is_being_restored_is_not_given_up(keepers: Keepers) -> None:  # noqa: F811
    """Its ranks would be made by the epoch all the same."""
    life = put(keepers, LIFE.failed(FAILURE).restoring(2, 1), [Way.STOPPED] * 2)
    with pytest.raises(JobError, match="is being restored by epoch 2: wait for it"):
        steering.give_up(keepers.store, keepers.keys)
    words = keepers.store, keepers.keys, 1, 2, TERMS, HERE
    with closing(Guard(*words, ttl_s=TTL_S, told=keepers.said.append)) as guard:
        guard.give_up("why not")
    assert keepers.life() == life


@pytest.mark.parametrize("stage", Stage)
def test_nobody_restores_by_hand_what_is_being_restored(keepers: Keepers, stage: Stage) -> None:  # noqa: F811
    steering.require_no_recovery(keepers.store, keepers.keys)  # a job that is not recovered
    put(keepers, replace(LIFE, stage=stage), [])
    if stage not in {Stage.LOOKS, Stage.STOPS, Stage.RESTORES}:
        steering.require_no_recovery(keepers.store, keepers.keys)
        return
    with pytest.raises(JobError, match="is being restored by itself, in life 3"):
        steering.require_no_recovery(keepers.store, keepers.keys)


def test_a_fence_holds_in_the_life_that_it_was_said_in(
    keepers: Keepers,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put(keepers, LIFE.failed(FAILURE), [Way.STOPPED, Way.HERE], gone=[1])
    read = leading.read_ranks

    def meanwhile(store: Store, keys: Keys, life: Life) -> Ranks:
        found = read(store, keys, life)
        steering.give_up(store, keys)
        return found

    monkeypatch.setattr(steering, "read_ranks", meanwhile)
    with pytest.raises(JobError, match="it has gone on meanwhile"):
        steering.fence(keepers.store, keepers.keys, 1)
    assert read(keepers.store, keepers.keys, LIFE).standings[1].way is Way.HERE


def test_a_store_that_was_away_has_not_lost_a_rank(keepers: Keepers) -> None:  # noqa: F811
    """A lease that has ended while nobody could keep it says nothing of its rank."""
    lead = Leading(keepers.store, keepers.keys, 100, keepers.said.append)  # lost after 50 s
    keepers.start(1).say(1, Way.HERE)
    life = keepers.life()
    keepers.open.close()
    lead.turn(life)
    lead._missing = {rank: since - 40 for rank, since in lead._missing.items()}
    lead.forget()
    lead._looked = -1e9
    lead.turn(life)
    lead._missing = {rank: since - 40 for rank, since in lead._missing.items()}
    lead._looked = -1e9
    lead.turn(life)
    assert keepers.life().stage is Stage.RUNS
    lead._missing = {rank: since - 20 for rank, since in lead._missing.items()}
    lead._looked = -1e9
    lead.turn(life)
    assert keepers.life().stage is Stage.STOPS


@pytest.mark.parametrize("is_start", [True, False])
@pytest.mark.parametrize("why", ["it has no checkpoint", "it has ended well", "it hung twice"])
def test_it_is_told_why_a_job_does_not_go_on_from_its_newest_checkpoint(
    why: str,
    is_start: bool,
    keepers: Keepers,  # noqa: F811
) -> None:
    terms, number = replace(TERMS, afresh=True), 0
    if why != "it has no checkpoint":
        number = keepers.commit()
    if why == "it hung twice":
        mark = Mark("it hung twice", times=2, is_sure=True)
        keepers.store.write([], [verified.put_mark(keepers.keys, number, mark)])
        why = f"epoch {number} is of no use, as all others: it hung twice"
    elif number:
        why += f" after epoch {number}"
    ended = number if "ended" in why else 0
    life = replace(LIFE, terms=terms, stage=Stage.STOPS, begun=int(not is_start), ended=ended)
    lead_of(keepers).turn(put(keepers, life, [Way.STOPPED] * 2))
    assert (keepers.life().stage, keepers.life().restored) == (Stage.RUNS, 0)
    how = f"job job starts: {why}" if is_start else f"runs again, started afresh, for {why}, "
    assert how in keepers.said[-1]


def test_why_a_job_has_failed_is_told_once(keepers: Keepers) -> None:  # noqa: F811
    failure = replace(FAILURE, reason="rank 0 hangs", hung=True)
    life = replace(LIFE, stage=Stage.STOPS, begun=1, failure=failure)
    lead_of(keepers).turn(put(keepers, life, [Way.STOPPED] * 2))
    assert keepers.life().stage is Stage.FAILED
    assert keepers.life().why() == "rank 0 hangs; there is no whole checkpoint to restore"
