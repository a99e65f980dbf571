# SPDX-License-Identifier: Apache-2.0
"""A restored job counts as back once the command of every rank has succeeded: with CRIU, TCP
between network namespaces, and etcd."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from gpustasis.cli import job
from gpustasis.errors import JobError, VerificationError
from gpustasis.jobs import epochs, verified
from gpustasis.jobs.ending import Ended
from gpustasis.jobs.lives import Failure, Stage
from gpustasis.jobs.member import Outcome
from gpustasis.jobs.messages import Epoch, Phase
from gpustasis.jobs.preempting import Restart
from gpustasis.jobs.rank import Context, Options
from gpustasis.jobs.records import Keys, Plan, phase_text, settled_text
from gpustasis.jobs.restoring import Restoring
from gpustasis.jobs.store import Answer, Put, Store, Unreachable
from gpustasis.jobs.supervise import Supervisor
from gpustasis.jobs.work import Excuse, Excused, Order
from gpustasis.verifying import Check
from jobs.test_ranks import assert_ended, network, ring, store  # noqa: F401 - fixtures
from jobs.test_stopping import committed, recovering
from jobs.test_undoing import (  # noqa: F401 - fixtures
    SETTINGS,
    context,
    server,
    supervisor_of,
    task,
)
from support.job_ranks import wait_for
from support.json_output import check_document
from support.ring import WORLD, Ring
from support.signals import catches, signalled


def program(place: Path, text: str) -> str:
    path = place / "check"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def checkpointed(ring: Ring) -> None:  # noqa: F811
    made = ring.job("checkpoint", "--world", str(WORLD))
    assert made.returncode == 0, made.stderr + ring.logs()
    assert ring.ends() == [0] * WORLD


def notes(ring: Ring) -> dict[int, str]:  # noqa: F811
    """Of whole checkpoints, by their epochs."""
    shown = check_document(ring.job("list", "--json").stdout, "job list")
    return {one["epoch"]: one["note"] for one in shown["epochs"] if one["whole"]}


def test_one_rank_that_is_not_verified_ends_all_and_the_next_older_one_is_tried(
    ring: Ring,  # noqa: F811
    tmp_path: Path,
) -> None:
    ring.start_all()
    ring.wait(lambda: min(ring.steps_now()) > 50)
    left = ring.job("checkpoint", "--world", str(WORLD), "--leave-running")
    assert left.returncode == 0, left.stderr + ring.logs()
    ring.wait_for_progress()
    checkpointed(ring)

    noted = tmp_path / "noted"
    noted.mkdir()
    check = program(
        tmp_path,
        f"kill -0 $GPUSTASIS_ROOT_PID || exit 3; touch {noted}/$GPUSTASIS_RANK-$GPUSTASIS_EPOCH\n"
        "[ $GPUSTASIS_RANK-$GPUSTASIS_EPOCH != 2-2 ]",
    )
    ring.start_restoring("--verify-after", check)
    done = ring.job("restore")
    assert done.returncode == VerificationError.exit_code, done.stderr + ring.logs()
    assert f"rank 2 is not back: `{check}` has ended with status 1" in done.stderr
    assert ring.ends() == [VerificationError.exit_code] * WORLD
    assert ring.pids() == []
    assert ring.locked() == []
    assert "rank 2 is not back" in notes(ring)[2] and notes(ring)[1] == ""
    assert ring.job("verify").returncode == 0  # it stays, as it was

    ring.start_restoring("--verify-after", check, "--older-if-unverified")
    back = ring.job("restore", "--older-if-unverified", "--json")
    assert back.returncode == 0, back.stderr + ring.logs()
    assert check_document(back.stdout, "job restore")["restores"] == 1
    assert {path.name for path in noted.iterdir()} >= {f"{rank}-1" for rank in range(WORLD)}
    ring.wait_for_progress()
    assert_ended(ring.end())

    ring.start_restoring("--verify-after", "true")
    again = ring.job("restore")
    assert again.returncode == 0, again.stderr + ring.logs()
    ring.wait(lambda: notes(ring) == {1: "", 2: ""})  # verified: the note is gone
    ring.wait_for_progress()
    assert_ended(ring.end())


def test_a_keeper_that_dies_before_the_verdict_leaves_it_to_the_next_one(
    ring: Ring,  # noqa: F811
    tmp_path: Path,
) -> None:
    ring.start_all()
    ring.wait(lambda: min(ring.steps_now()) > 50)
    checkpointed(ring)
    check = program(
        tmp_path,
        f"touch {tmp_path}/begun-$GPUSTASIS_RANK\n[ $GPUSTASIS_RANK = 2 ] || exit 0\n"
        f"while [ ! -e {tmp_path}/go ]; do sleep 0.1; done; exit 1",
    )
    ring.start_restoring("--verify-after", check)
    order = ring.ask("restore")
    ring.wait(lambda: all((tmp_path / f"begun-{rank}").exists() for rank in range(WORLD)))
    # Rank 1 has settled, and waits for the verdict, when its keeper is killed.
    ring.wait(lambda: check_settled(ring) >= WORLD - 1)
    ring.signal(1, signal.SIGKILL)
    ring.wait(lambda: ring.status(1) is not None)
    assert len(ring.pids()) == WORLD
    ring.start(1, "--verify-after", check, command=False)
    keeper = ring.keepers[1]
    assert keeper is not None
    ring.wait(lambda: catches(keeper.pid, signal.SIGTERM))  # it is the keeper of the tasks
    (tmp_path / "go").touch()
    _, said = order.communicate(timeout=120)
    assert order.returncode == VerificationError.exit_code, said + ring.logs()
    assert ring.ends() == [VerificationError.exit_code] * WORLD
    assert ring.pids() == []


def check_settled(ring: Ring) -> int:  # noqa: F811
    shown = check_document(ring.job("list", "--json").stdout, "job list")
    return int(shown["epochs"][-1]["settled"])


def test_a_keeper_whose_restored_tasks_have_ended_at_once_ends_as_well(
    context: Context,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    supervisor = supervisor_of(context)
    outcomes = [Outcome(2, Epoch(Phase.COMMITTED, 1, leave_running=True, restores=1), "")]

    def take_part(is_over: Callable[[], bool]) -> Outcome | None:
        if outcomes:
            assert not is_over()  # it waits to be restored
            return outcomes.pop()
        assert is_over()
        return None

    monkeypatch.setattr(supervisor._keeper, "take_part", take_part)
    assert supervisor.run(restoring=True) == Ended(epoch=0, status=None)


def test_the_next_keeper_of_tasks_that_have_ended_asks_for_the_verdict(
    context: Context,  # noqa: F811
    task: subprocess.Popen[bytes],  # noqa: F811
) -> None:
    """They may have ended since those of other ranks were killed."""
    store, keys = context.store, context.keys  # noqa: F811
    context.options = Options(criu=context.options.criu, check=Check(words=("true",), seconds=60))
    checkpoint = epochs.begin(store, keys, Plan(world=1, leave_running=True))
    epochs.abort(store, keys, checkpoint, "what became of it does not matter here")
    plan = Plan(world=1, leave_running=True, restores=checkpoint)
    number = epochs.begin(store, keys, plan)
    verdict = Put(f"{keys.epoch(number)}back", settled_text("rank 3 is not back"))
    store.write([], [Put(keys.phase(number), phase_text(plan, Phase.COMMITTED)), verdict])
    context.note(pid=task.pid, epoch=number)
    task.kill()
    task.wait()
    with pytest.raises(VerificationError, match="rank 3 is not back"):
        supervisor_of(context).run(restoring=False)


def test_a_verdict_is_not_waited_for_once_the_job_has_moved_on(context: Context) -> None:  # noqa: F811
    """A rank has lost its keeper meanwhile, and will never settle: this one is to be stopped."""
    store, keys = context.store, context.keys  # noqa: F811
    checkpoint = committed(context)
    plan = Plan(world=1, leave_running=True, restores=checkpoint)
    number = epochs.begin(store, keys, plan)
    store.write([], [Put(keys.phase(number), phase_text(plan, Phase.COMMITTED))])
    guard, rank = recovering(context)
    with closing(rank):
        rank.begin(new=True, can_start=True)
        for stage, has_moved_on in ((Stage.RUNS, False), (Stage.STOPS, True)):
            failure = None if stage is Stage.RUNS else Failure(rank=0, reason="why", at=1.0)
            life = replace(guard.read(), stage=stage, failure=failure)
            store.write([], [Put(keys.life, life.to_text())])
            guard.read()
            assert rank.has_moved_on() == has_moved_on
        told: list[str] = []
        Supervisor(context, SETTINGS, told.append, recovering=rank)._verify(number, problem=False)
        assert "not known to be verified" in told[-1]


def test_a_signal_that_comes_while_an_epoch_brings_the_tasks_reaches_them(
    context: Context,  # noqa: F811
    task: subprocess.Popen[bytes],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    supervisor = supervisor_of(context)
    outcomes = [Outcome(2, Epoch(Phase.COMMITTED, 1, leave_running=True, restores=1), "")]

    def take_part(is_over: Callable[[], bool]) -> Outcome | None:
        if outcomes:
            os.kill(os.getpid(), signal.SIGTERM)
            context.note(pid=task.pid, epoch=2)
            return outcomes.pop()
        wait_for(is_over, "the end of the tasks")
        return None

    monkeypatch.setattr(supervisor._keeper, "take_part", take_part)
    assert supervisor.run(restoring=True) == Ended(epoch=0, status=128 + signal.SIGTERM, told=True)


def test_a_signal_that_ends_the_tasks_while_the_command_runs_is_not_the_checkpoint_s(
    context: Context,  # noqa: F811
    task: subprocess.Popen[bytes],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which is not marked; nor does the keeper wait for an older one, with --older-if-unverified:
    it was told to end."""
    store, keys = context.store, context.keys  # noqa: F811
    _, checkpoint = committed(context), committed(context)
    plan = Plan(world=1, leave_running=True, restores=checkpoint)
    order = Order(epochs.begin(store, keys, plan), leave_running=True, restores=checkpoint)
    store.write([], [Put(keys.phase(order.number), phase_text(plan, Phase.COMMITTED))])
    begun = tmp_path / "begun"
    check = Check(words=("sh", "-c", f"touch {begun}; exec sleep 60"), seconds=60)
    context.options = replace(context.options, check=check, older=True)
    supervisor = supervisor_of(context)
    epoch = Epoch(Phase.COMMITTED, 1, leave_running=True, restores=checkpoint)

    def take_part(_: Callable[[], bool]) -> Outcome:
        context.note(pid=task.pid, epoch=order.number)
        with pytest.raises(JobError, match="rank 0 is not back: its tasks have ended"):
            verified.verify(context, order, "images")
        return Outcome(order.number, epoch, "it is not back")

    monkeypatch.setattr(supervisor._keeper, "take_part", take_part)
    back = pytest.raises(VerificationError, match="the job is not back: rank 0 is not back: its")
    with back, signalled(signal.SIGTERM, begun.exists):
        supervisor.run(restoring=True)
    assert verified.marks(store, keys, [checkpoint]) == {}


def test_tasks_that_have_ended_are_not_back_whatever_the_command_says(
    context: Context,  # noqa: F811
) -> None:
    store, keys = context.store, context.keys  # noqa: F811
    plan = Plan(world=1, leave_running=True)
    checkpoint = epochs.begin(store, keys, plan)
    epochs.abort(store, keys, checkpoint, "what became of it does not matter here")
    check = Check(words=("true",), seconds=60)
    context.options = Options(criu=context.options.criu, check=check)
    order = Order(checkpoint + 1, leave_running=True, restores=checkpoint)
    with pytest.raises(JobError, match="rank 0 is not back: its tasks have ended"):
        verified.verify(context, order, "images")
    assert "its tasks have ended" in verified.verdict(store, keys, order.number, 0)
    assert "its tasks have ended" in verified.marks(store, keys, [checkpoint])[checkpoint].why


def test_how_often_a_checkpoint_was_not_verified_in_a_row_is_kept(
    context: Context,  # noqa: F811
) -> None:
    """The second time it surely never will; but once it was, nothing is held against it."""
    store, keys = context.store, context.keys  # noqa: F811

    def marked(number: int, wrong: str) -> list[tuple[int, bool]]:
        verified._store(store, keys, number, 1, wrong)
        verified._store(store, keys, number, 1, "another one was quicker")
        return [(one.times, one.is_sure) for one in verified.marks(store, keys, [1]).values()]

    assert marked(2, "why") == [(1, False)]
    assert marked(3, "why") == [(2, True)]
    assert marked(4, "") == []
    assert marked(5, "why") == [(1, False)]
    store.write([], [Put(f"{keys.epoch(1)}unverified", "what is this")])
    assert marked(6, "why") == [(1, False)]
    store.write([], [Put(f"{keys.epoch(1)}unverified", settled_text("of an earlier build"))])
    assert marked(7, "why") == [(2, True)]


@pytest.mark.parametrize("told", [True, False])
def test_a_rank_that_was_told_to_end_makes_the_others_restore_no_older_checkpoint(
    told: bool,
    context: Context,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The newer one is as good as it was: it is waited for again."""
    store, keys = context.store, context.keys  # noqa: F811
    older, newest = committed(context), committed(context)
    plan = Plan(world=1, leave_running=True, restores=newest)
    number = epochs.begin(store, keys, plan)
    store.write([], [Put(keys.phase(number), phase_text(plan, Phase.COMMITTED))])
    context.options = replace(context.options, older=True)
    supervisor = supervisor_of(context)
    supervisor._restart = Restart(context, newest, print)
    asked: list[int] = []
    monkeypatch.setattr(supervisor, "_have_restored", asked.append)
    verified._store(
        store,
        keys,
        number,
        newest,
        "rank 1 is not back",
        excuse=Excuse.OTHER if told else Excuse.NONE,
    )
    supervisor._verify(number, problem=False)
    assert asked == [newest if told else older]


@pytest.mark.parametrize("told", [True, False])
def test_whoever_has_asked_for_a_restore_asks_for_no_older_one_then(
    told: bool,
    context: Context,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, keys = context.store, context.keys  # noqa: F811
    older, newest = committed(context), committed(context)
    asked: list[int] = []

    def hold(_: Store, __: Keys, plan: Plan, *___: float) -> None:
        asked.append(plan.restores)
        if len(asked) == 1:
            verified._store(
                store,
                keys,
                77,
                newest,
                "rank 1 is not back",
                excuse=Excuse.OTHER if told else Excuse.NONE,
            )
            raise VerificationError("it is not back")

    monkeypatch.setattr(job, "hold", hold)
    monkeypatch.setattr(job, "open_store", lambda _: nullcontext(store))
    assert job.restore.callback is not None
    words = {"epoch": None, "timeout_s": 60.0, "look_limit": 60.0}
    job.restore.callback(keys.job, older_if_unverified=True, **words)
    assert asked == [newest, newest if told else older]


@pytest.mark.parametrize("is_away", [False, True])
@pytest.mark.parametrize("how", ["with its keeper", "upon a signal", "by itself"])
def test_tasks_that_were_lost_for_another_reason_say_nothing_of_the_checkpoint(
    how: str,
    is_away: bool,
    context: Context,  # noqa: F811
    task: subprocess.Popen[bytes],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their host has lost its power, say. Also if another rank stores the verdict."""
    store, keys = context.store, context.keys  # noqa: F811
    checkpoint = committed(context)
    plan = Plan(world=1, leave_running=True, restores=checkpoint)
    number = epochs.begin(store, keys, plan)
    context.options = replace(context.options, check=Check(words=("true",), seconds=60))
    context.note(pid=task.pid, epoch=number)
    task.kill()
    task.wait()
    context.told_at = float(how == "upon a signal")
    joined = how == "with its keeper"
    order = Order(number, leave_running=True, restores=checkpoint, joined=joined)

    def is_lost(*_: object) -> Answer:
        raise Unreachable("no answer")

    with monkeypatch.context() as patch:
        if is_away:
            patch.setattr(store, "write", is_lost)
        with pytest.raises(JobError, match="rank 0 is not back: its tasks have ended") as caught:
            Restoring(context, order).finish(leave_running=True)
    assert bool(verified.verdict(store, keys, number, 0)) == (not is_away)
    assert isinstance(caught.value, Excused)
    text = settled_text("x" * 5000 + str(caught.value), caught.value.excuse)
    store.write([], [Put(keys.settled(number, 0), text)])
    verified._decide(store, keys, number, counts=True)
    said = verified.verdict(store, keys, number, 0)
    assert ("x" * 4096 if is_away else "its tasks have ended") in said
    assert bool(verified.marks(store, keys, [checkpoint])) == (how == "by itself")
