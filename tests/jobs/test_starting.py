# SPDX-License-Identifier: Apache-2.0
"""What an earlier start of a job that is recovered has left does not end, or begin, another one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from gpustasis.cli import job_run
from gpustasis.errors import JobError
from gpustasis.jobs import epochs, preempting, steering, verified
from gpustasis.jobs import recovering as recovering_module
from gpustasis.jobs.ending import Ended, Next
from gpustasis.jobs.guard import Guard, where
from gpustasis.jobs.lives import Failure, Life, Stage, Way, life_of
from gpustasis.jobs.member import Outcome
from gpustasis.jobs.messages import Epoch, Phase
from gpustasis.jobs.rank import Context
from gpustasis.jobs.records import Plan, phase_text
from gpustasis.jobs.steering import find_life
from gpustasis.jobs.store import Put
from gpustasis.jobs.supervise import Supervisor
from gpustasis.jobs.verified import Mark
from jobs.test_lives import EVIDENCE, HERE, TTL_S, Keepers, keepers  # noqa: F401 - a fixture
from jobs.test_stopping import TERMS, committed, recovering
from jobs.test_undoing import (  # noqa: F401 - fixtures
    SETTINGS,
    context,
    decided,
    server,
    task,
)
from support.signals import signalled

FAILURE = Failure(rank=0, reason="why", at=1.0)


def stored(context: Context, life: Life) -> Life:  # noqa: F811
    context.store.write([], [Put(context.keys.life, life.to_text())])
    return find_life(context.store, context.keys)


def elsewhere(context: Context) -> Guard:  # noqa: F811
    other = replace(where(context.place.run), host="b", boot="b", machine="", run="elsewhere")
    words = context.store, context.keys, 0, 1, TERMS, other
    return Guard(*words, ttl_s=4, told=lambda _: None)


def test_a_checkpoint_that_ended_an_earlier_start_does_not_end_this_one(
    context: Context,  # noqa: F811
) -> None:
    """Its keepers had left it open."""
    guard, rank = recovering(context)
    with closing(rank):
        assert not rank.begin(new=True, can_start=True, newest=True)
        assert not rank.ended_by(7)
        assert guard.read().stage is Stage.STOPS
        stored(context, replace(guard.life, run="another", stage=Stage.RUNS))
        assert rank.ended_by(7)  # nor the one that was begun meanwhile
        assert guard.read().stage is Stage.RUNS
        assert guard.standing(guard.life.number) is None


def test_a_job_that_a_checkpoint_has_ended_has_not_ended_by_itself(
    context: Context,  # noqa: F811
) -> None:
    _, rank = recovering(context)
    with closing(rank):
        assert rank.begin(new=True, can_start=True)
        assert rank.ended_by(7)
    _, standby = recovering(context)
    with closing(standby):
        assert not standby.begin(new=False, can_start=True)
        assert standby.take(None).done
        assert not standby.ended_well
        stored(context, replace(find_life(context.store, context.keys), failure=None))
        assert standby.take(None).done
        assert standby.ended_well


@pytest.mark.parametrize("stage", [Stage.LOOKS, Stage.STOPS, Stage.FAILED])
def test_nobody_says_that_a_rank_has_stopped_that_may_run_elsewhere(
    stage: Stage,
    context: Context,  # noqa: F811
) -> None:
    """In the life before, which was given up there."""
    other = elsewhere(context)
    with closing(other):
        life = other.begin(new=True)
        assert other.say(1, Way.HERE)
    stored(context, replace(life.failed(FAILURE), number=2, stage=stage, begun=1))
    guard, rank = recovering(context)
    with closing(rank):
        rank.begin(new=False, can_start=True)
        if stage is Stage.FAILED:
            assert rank.take(None).failed
        else:
            with pytest.raises(JobError, match="rank 0 was on b in life 1"):
                rank.take(None)
        assert guard.standing(2) is None


@pytest.mark.parametrize("lives", [False, True])
def test_a_keeper_that_was_told_to_end_restores_nothing(
    lives: bool,
    context: Context,  # noqa: F811
    task: subprocess.Popen[bytes],  # noqa: F811
) -> None:
    guard, rank = recovering(context)
    with closing(rank):
        assert rank.begin(new=True, can_start=True)
        if lives:
            context.note(pid=task.pid)
        rank.asked = "it was told to end"
        stored(context, guard.read().failed(FAILURE))
        rank.take(0)
        life = guard.read()
        assert (life.stage, life.why()) == (Stage.FAILED, "rank 0: it was told to end")


def test_a_job_that_was_told_to_end_has_not_come_to_its_end(context: Context) -> None:  # noqa: F811
    """Its program has ended well upon that, in the middle of its work: it goes on from its newest
    checkpoint later."""
    guard, rank = recovering(context)
    with closing(rank):
        assert rank.begin(new=True, can_start=True)
        rank.asked = "it was told to end"
        assert rank.is_due(ended=True, waits=False)
        rank.take(0)
        assert rank.take(0).failed
        assert not rank.ended_well
        assert (guard.read().stage, guard.life.ended) == (Stage.FAILED, 0)


@pytest.mark.parametrize("how", ["failed", "started anew"])
def test_tasks_that_were_told_to_end_have_time_for_it(
    how: str,
    context: Context,  # noqa: F811
    task: subprocess.Popen[bytes],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of another rank have done it at once, and its supervisor may have started it again."""
    guard, rank = recovering(context)
    with closing(rank):
        assert rank.begin(new=True, can_start=True)
        context.note(pid=task.pid)
        rank.asked = "it was told to end"
        if how == "failed":
            stored(context, replace(guard.read(), stage=Stage.FAILED, failure=FAILURE))
        else:
            stored(context, replace(guard.read(), run="another", number=2))
        guard.read()  # its thread may not have, by now
        assert rank.is_due(ended=False, waits=False)
        assert rank.take(None) == Next()
        assert task.poll() is None
        monkeypatch.setattr(recovering_module, "_ENDS_WITHIN_S", 0.0)
        if how == "failed":
            assert rank.take(None).failed
        else:
            with pytest.raises(JobError, match="was started anew meanwhile"):
                rank.take(None)
        assert task.poll() is not None


def test_a_command_that_ends_well_upon_a_signal_has_not_come_to_its_end(
    context: Context,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the next start would begin anew, whatever checkpoint there is."""
    monkeypatch.setattr(preempting, "note_ended", lambda *_: pytest.fail("it counts as ended"))
    supervisor = Supervisor(context, SETTINGS, lambda _: None)
    context.say_where()
    ready = tmp_path / "ready"
    words = ("sh", "-c", f"trap 'exit 0' TERM; touch {ready}; while :; do sleep 0.05; done")
    with signalled(signal.SIGTERM, ready.exists):
        ended = job_run._keep(supervisor, context, words, False, True, None)
    assert (ended.epoch, ended.status, ended.told) == (0, 0, True)


@pytest.mark.parametrize("is_other", [False, True])
def test_the_checkpoint_that_ended_an_earlier_start_ends_no_other_one(
    is_other: bool,
    context: Context,  # noqa: F811
) -> None:
    """Whose keepers had left it open: the rank has had no tasks in this start yet."""
    _, rank = recovering(context)
    with closing(rank):
        assert rank.begin(new=True, can_start=True, newest=is_other) is not is_other
        supervisor = Supervisor(context, SETTINGS, lambda _: None, recovering=rank)
        ended = supervisor._after(Outcome(7, Epoch(Phase.COMMITTED, 1), ""))
        assert ended == (None if is_other else Ended(epoch=7, status=None))


def test_trouble_of_an_earlier_start_does_not_fail_one_that_waits(
    context: Context,  # noqa: F811
) -> None:
    _, rank = recovering(context)
    with closing(rank):
        assert not rank.begin(new=True, can_start=False)
        rank.has_trouble("its tasks have ended")
        assert not rank.is_due(ended=True, waits=True)
        assert rank.is_due(ended=False, waits=False)


@pytest.mark.parametrize("life", [0, 1])
def test_a_keeper_that_waits_for_a_restore_says_that_tasks_of_this_life_have_ended(
    life: int,
    context: Context,  # noqa: F811
    task: subprocess.Popen[bytes],  # noqa: F811
) -> None:
    """They were restored, and have died with the keeper before; its supervisor says --restore
    again. Nobody else would: the rank has a keeper. What was before --restarts was given says
    nothing."""
    context.life = life
    context.note(pid=task.pid)
    guard, rank = recovering(context)
    task.kill()
    task.wait()
    if life:
        with closing(guard):
            guard.begin(new=True)
            guard.say(life, Way.HERE)
        guard, rank = recovering(context)
    with closing(rank):
        assert not rank.begin(new=True, can_start=False)
        rank.has_trouble("it was not settled")
        assert rank.is_due(ended=True, waits=True) == (life > 0)
        if life:
            rank.take(None)
            assert (guard.read().stage, guard.life.begun) == (Stage.STOPS, 1)


def test_a_keeper_that_has_never_had_tasks_says_that_those_of_another_place_have_ended(
    context: Context,  # noqa: F811
) -> None:
    """It has taken the seat of a keeper whose host is gone before anybody has missed that one."""
    other = Guard(context.store, context.keys, 0, 1, TERMS, HERE, ttl_s=4, told=print)
    with closing(other):
        other.begin(new=True)
        assert other.say(1, Way.HERE)
    guard, rank = recovering(context)
    with closing(rank):
        assert not rank.begin(new=False, can_start=False)
        assert rank.is_due(ended=True, waits=True)
        rank.take(None)
        assert (guard.read().stage, guard.life.begun) == (Stage.STOPS, 1)


def test_a_checkpoint_ends_the_start_whose_tasks_it_has_ended_and_no_other(
    context: Context,  # noqa: F811
) -> None:
    guard, rank = recovering(context)
    with closing(rank):
        assert not rank.begin(new=True, can_start=False)  # --restore: it has had no tasks yet
        assert not rank.ended_by(7)
        assert guard.read().stage is Stage.RUNS
        first = replace(guard.life, stage=Stage.RESTORES, epoch=9, failure=FAILURE)
        stored(context, first)
        assert guard.read().is_start
        assert guard.say(first.number, Way.STOPPED)
        assert rank.ended_by(10)  # of what epoch 9 has just restored
        assert guard.read().stage is Stage.DONE


def test_what_an_earlier_start_has_left_undone_does_not_fail_the_new_one(
    context: Context,  # noqa: F811
) -> None:
    number = decided(context, Plan(world=1, leave_running=True), Phase.ABORTED)
    context.note(epoch=number)
    _, rank = recovering(context)
    with closing(rank):
        assert rank.begin(new=True, can_start=True)
        rank.has_trouble("its tasks have ended")
        supervisor = Supervisor(context, SETTINGS, lambda _: None, recovering=rank)
        pid = supervisor.start(["sleep", "1000"], os.environ)
        try:
            assert not rank.is_due(ended=False, waits=False)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


@pytest.mark.parametrize("how", ["decided", "not decided", "the lead is there"])
def test_whoever_was_restored_without_the_lead_does_not_wait_for_it_for_ever(
    how: str,
    keepers: Keepers,  # noqa: F811
) -> None:
    """Nobody else says that the job is back, or is not."""
    lead = keepers.start(0)
    keepers.start(1)
    keys, checkpoint = keepers.keys, keepers.commit()
    plan = Plan(world=2, leave_running=True, restores=checkpoint)
    number = epochs.begin(keepers.store, keys, plan)
    if how != "not decided":
        keepers.store.write([], [Put(keys.phase(number), phase_text(plan, Phase.COMMITTED))])
    life = keepers.life().failed(FAILURE).restoring(number, checkpoint)
    if how != "the lead is there":
        lead.close()
    keepers.store.write([], [Put(keys.life, life.to_text())])
    if how == "decided":
        keepers.wait(lambda: keepers.life().stage is not Stage.RESTORES)
        after = keepers.life()
        assert (after.number, after.begun) == (life.number + 1, life.begun + 1)
        assert after.why() == "rank 0: its keeper's lease is gone"
    else:
        time.sleep(2 * TTL_S)
        assert keepers.life().stage is Stage.RESTORES


@pytest.mark.parametrize("evidence", ["none", "decided", "under way"])
def test_evidence_is_not_waited_for_for_ever_without_the_lead(
    evidence: str,
    keepers: Keepers,  # noqa: F811
) -> None:
    """All ranks stop, and wait for it, or for who says that nothing is left there."""
    lead = keepers.start(0, terms=EVIDENCE)
    other = keepers.start(1, terms=EVIDENCE)
    lead.say(1, Way.HERE)
    lead.close()
    life = keepers.life().failed(FAILURE)
    assert life.stage is Stage.LOOKS
    if evidence != "none":
        plan = Plan(world=2, leave_running=True)
        life = replace(life, epoch=epochs.begin(keepers.store, keepers.keys, plan))
    if evidence == "decided":
        epochs.abort(keepers.store, keepers.keys, life.epoch, "why not")
    keepers.store.write([], [Put(keepers.keys.life, life.to_text())])
    if evidence == "under way":
        time.sleep(2 * TTL_S)
        assert keepers.life().stage is Stage.LOOKS
        return
    keepers.wait(lambda: other.life.stage is Stage.STOPS)
    assert keepers.life().to_text() == replace(life, stage=Stage.STOPS).to_text()
    assert steering.fence(keepers.store, keepers.keys, 0).stage is Stage.STOPS


def test_a_verdict_clears_only_what_verdicts_have_marked(context: Context) -> None:  # noqa: F811
    store, keys, number = context.store, context.keys, committed(context)

    def verdict(wrong: str) -> Mark:
        plan = Plan(world=1, leave_running=True, restores=number)
        restore = epochs.begin(store, keys, plan)
        verified._store(store, keys, restore, number, wrong)
        assert epochs.abort(store, keys, restore, "done").phase is Phase.ABORTED
        return verified.marks(store, keys, [number]).get(number, Mark())

    assert verdict("it is not back").by_verdict
    assert verdict("").why == ""
    hung = Mark("it hung as soon as it was restored")
    store.write([], [verified.put_mark(keys, number, hung)])
    assert verdict("") == hung
    again = verdict("it is not back")
    assert (again.times, again.is_sure, again.by_verdict) == (2, True, False)
    assert verdict("") == again


def test_a_life_of_an_earlier_build_is_read(context: Context) -> None:  # noqa: F811
    guard, rank = recovering(context)
    with closing(rank):
        rank.begin(new=True, can_start=True)
        entry = context.store.read(context.keys.life).entries[context.keys.life]
        value = json.loads(entry.value)
        del value["ended"]
        assert life_of("key", replace(entry, value=json.dumps(value))) == guard.life
