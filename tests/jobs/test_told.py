# SPDX-License-Identifier: Apache-2.0
"""What a signal to one keeper does to its job, and for how long it counts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpustasis.errors import JobError
from gpustasis.jobs import ending, epochs, steering
from gpustasis.jobs import recovering as recovering_module
from gpustasis.jobs.ending import Ended, Next, Signal
from gpustasis.jobs.guard import Guard, where
from gpustasis.jobs.lives import Failure, Life, Stage, Way
from gpustasis.jobs.messages import Phase
from gpustasis.jobs.preempting import Grace, Preempting
from gpustasis.jobs.rank import Context
from gpustasis.jobs.recovering import Recovering
from gpustasis.jobs.store import Put, Snapshot
from gpustasis.jobs.supervise import Supervisor
from jobs.test_stopping import TERMS, recovering
from jobs.test_undoing import SETTINGS, context, server, task  # noqa: F401 - fixtures
from support.job_ranks import wait_for
from support.signals import signalled


@pytest.mark.parametrize("status", [0, 143])
def test_what_a_signal_has_ended_is_decided_at_once(
    status: int,
    context: Context,  # noqa: F811
) -> None:
    """The keeper may be killed soon. If its tasks have ended well, that is known."""
    key = context.keys.told
    guard, rank = recovering(context)
    with closing(rank):
        assert rank.begin(new=True, can_start=True)
        rank.asked = "it was told to end"
        assert rank.is_due(ended=True, waits=False)
        rank.take(status)
        life = guard.read()
        assert (life.stage, life.why()) == (Stage.FAILED, "rank 0: it was told to end")
    assert (key in context.store.read(key).entries) == (status == 0)


@pytest.mark.parametrize("ended_well", [True, False])
def test_tasks_may_end_by_themselves_once_those_of_another_rank_have_upon_a_signal(
    ended_well: bool,
    context: Context,  # noqa: F811
    task: subprocess.Popen[bytes],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The programs may have agreed to save, and to end."""
    monkeypatch.setattr(recovering_module, "_AGAIN_S", 0.0)
    store, keys = context.store, context.keys
    guard = Guard(store, keys, 0, 2, TERMS, where(context.place.run), ttl_s=4, told=print)
    rank = Recovering(context, guard, None, print)
    with closing(rank):
        assert rank.begin(new=True, can_start=True)
        context.note(pid=task.pid)
        if ended_well:
            store.write([], [Put(keys.told, str(context.state.life))])
        steering.give_up(store, keys)
        wait_for(lambda: guard.read().stage is Stage.FAILED, "the end")
        assert rank.is_due(ended=False, waits=False)
        if ended_well:
            assert rank.take(None) == rank.take(None) == Next()
            assert task.poll() is None
            monkeypatch.setattr(recovering_module, "_ENDS_WITHIN_S", 0.0)
        assert rank.take(None).failed
        assert not Path(f"/proc/{task.pid}").exists()


def test_tasks_that_have_ended_well_have_failed_with_their_job_if_nobody_told_them_to_end(
    context: Context,  # noqa: F811
) -> None:
    """Else who started the keeper would take the job for one that has come to its end."""
    store, keys = context.store, context.keys
    guard = Guard(store, keys, 0, 2, TERMS, where(context.place.run), ttl_s=4, told=print)
    rank = Recovering(context, guard, None, print)

    def fail() -> None:
        wait_for(lambda: guard.standing(1) is not None, "the rank's first word")
        wait_for(lambda: guard.standing(1).way is Way.ENDED, "its end")  # type: ignore[union-attr]
        steering.give_up(store, keys)

    with closing(rank):
        assert rank.begin(new=True, can_start=True)
        supervisor = Supervisor(context, SETTINGS, print, recovering=rank)
        supervisor.start(("true",), os.environ)
        failing = threading.Thread(target=fail)
        failing.start()
        try:
            ended = supervisor.run(restoring=False)
        finally:
            failing.join()
        assert ended == Ended(epoch=0, status=JobError.exit_code)


def test_that_tasks_have_ended_well_upon_a_signal_is_known_although_another_rank_was_seen_first(
    context: Context,  # noqa: F811
    task: subprocess.Popen[bytes],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that they have agreed with has ended with another status, say. Those of a third rank may
    end by themselves all the same, before and after the job is given up."""
    monkeypatch.setattr(recovering_module, "_AGAIN_S", 0.0)
    store, keys = context.store, context.keys
    guard = Guard(store, keys, 0, 2, TERMS, where(context.place.run), ttl_s=4, told=print)
    rank = Recovering(context, guard, None, print)
    other = Guard(store, keys, 1, 2, TERMS, where(context.place.run), ttl_s=4, told=print)
    with closing(rank), closing(other):
        assert rank.begin(new=True, can_start=True)
        other.begin(new=True)
        context.note(pid=task.pid)
        guard.report(1, "rank 2 has ended, with status 1", unnoticed_s=0.2)
        other.told(1)
        assert guard.read().stage is Stage.STOPS
        assert rank.is_due(ended=False, waits=False)
        assert rank.take(None) == Next()
        assert task.poll() is None
        other.give_up("it was told to end")
        assert rank.take(None) == Next()
        assert task.poll() is None
        monkeypatch.setattr(recovering_module, "_ENDS_WITHIN_S", 0.0)
        assert rank.take(None).failed
        assert not Path(f"/proc/{task.pid}").exists()
        assert rank._asked_at == 0.0  # the time of the next tasks begins anew


@pytest.mark.parametrize("stage", [Stage.RUNS, Stage.LOOKS, Stage.STOPS])
def test_that_tasks_have_ended_well_upon_a_signal_is_said_at_every_stage(
    stage: Stage,
    context: Context,  # noqa: F811
) -> None:
    store, keys = context.store, context.keys
    guard, rank = recovering(context)
    with closing(rank):
        assert rank.begin(new=True, can_start=True)
        life = guard.read()
        failure = Failure(rank=1, reason="rank 1 has ended", at=1.0)
        assert guard.replace(life, replace(life, stage=stage, failure=failure))
        rank.is_told("it was told to end")
        assert rank.take(0) == Next()
        assert (guard.was_told(1), guard.read().stage) == (True, Stage.FAILED)
    assert store.read(keys.told).entries[keys.told].value == "1"


def test_whether_any_rank_was_told_is_one_entry_to_read_however_many_ranks_there_are(
    context: Context,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All ranks ask, and again and again."""
    store, keys, world = context.store, context.keys, 50
    place = where(context.place.run)
    ranks = [Guard(store, keys, one, world, TERMS, place, ttl_s=4, told=print) for one in range(3)]
    assert not ranks[2].was_told(1)
    for one in (*ranks, ranks[0]):
        one.told(7)
    ranks[1].told(6)  # it has come late
    read, found = store.read, 0

    def counted(*names: str) -> Snapshot:
        nonlocal found
        snapshot = read(*names)
        found += len(snapshot.entries)
        return snapshot

    monkeypatch.setattr(store, "read", counted)
    assert [ranks[2].was_told(life) for life in (6, 7, 8)] == [False, True, False]
    assert found == 3


@pytest.mark.parametrize("text", ["none of ours", "", "0", '{"version": 2}'])
def test_an_entry_that_is_no_number_keeps_no_keeper_from_what_is_to_be_done(
    text: str,
    context: Context,  # noqa: F811
) -> None:
    """It would end before it has given its job up; or one whose tasks live."""
    store, keys = context.store, context.keys
    guard, rank = recovering(context)
    with closing(rank):
        assert rank.begin(new=True, can_start=True)
        store.write([], [Put(keys.told, text)])
        assert not guard.was_told(1)
        rank.is_told("it was told to end")
        assert rank.take(0) == Next()
        assert (guard.was_told(1), guard.read().stage) == (True, Stage.FAILED)
    assert store.read(keys.told).entries[keys.told].value == "1"


@pytest.mark.parametrize("text", ["none of ours", "1"])
def test_an_entry_that_is_no_number_does_not_keep_tasks_from_being_stopped(
    text: str,
    context: Context,  # noqa: F811
    task: subprocess.Popen[bytes],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovering_module, "_AGAIN_S", 0.0)
    _, rank = recovering(context)
    with closing(rank):
        assert rank.begin(new=True, can_start=True)
        context.note(pid=task.pid)
        context.store.write([], [Put(context.keys.told, text)])
        steering.give_up(context.store, context.keys)
        assert bool(rank.take(None).failed) == (text != "1")
        assert (task.poll() is None) == (text == "1")


@pytest.mark.parametrize("lasts_s", [0.3, 60.0])
def test_a_signal_that_the_tasks_outlive_has_not_ended_them(
    lasts_s: float,
    context: Context,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A program may take SIGHUP for something else, and come to its end later."""
    ready, go = tmp_path / "ready", tmp_path / "go"
    monkeypatch.setattr(ending, "_OUTLIVED_S", lasts_s)
    look = Signal.was_outlived

    def was_outlived(told: Signal) -> bool:
        """The program ends as soon as it has been so, or is told, if it will not be so."""
        found = look(told)
        if found or (lasts_s > 1 and context.told_at):
            go.touch()
        return found

    monkeypatch.setattr(Signal, "was_outlived", was_outlived)
    guard, rank = recovering(context)
    with closing(rank):
        assert rank.begin(new=True, can_start=True)
        supervisor = Supervisor(context, SETTINGS, print, recovering=rank)
        code = f"trap : HUP; touch {ready}; while [ ! -e {go} ]; do sleep 0.05; done; exit 0"
        supervisor.start(("sh", "-c", code), os.environ)
        with signalled(signal.SIGHUP, ready.exists):
            ended = supervisor.run(restoring=False)
        assert ended == Ended(epoch=0, status=0)
        assert rank.ended_well == (lasts_s < 1)
        assert guard.life.stage is (Stage.DONE if lasts_s < 1 else Stage.FAILED)


def test_time_in_which_nobody_looked_makes_no_tasks_outlive_a_signal(
    context: Context,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An epoch may have held them; and they may not be told before the grace period is over."""
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    told = Signal(context)

    def outlived(seconds: int, step: int) -> bool:
        found = False
        for _ in range(seconds // step):
            now[0] += step
            found = found or told.was_outlived()
        return found

    assert not outlived(10_000, 1)
    context.told_at = now[0]
    assert not outlived(900, 900)
    assert not outlived(590, 1)
    assert outlived(20, 1)
    assert context.told_at == 0.0
    told.comes(signal.SIGHUP)
    told.comes(signal.SIGTERM)
    assert not outlived(10_000, 1)


@pytest.mark.parametrize("who", ["another rank", "its own"])
@pytest.mark.parametrize(("silent_s", "hung"), [(30.0, True), (1.0, False)])
def test_tasks_that_a_signal_has_made_silent_did_not_hang(
    silent_s: float,
    hung: bool,
    who: str,
    context: Context,  # noqa: F811
    task: subprocess.Popen[bytes],  # noqa: F811
) -> None:
    """They may save, and the others wait for them: the checkpoint that they were restored from is
    as good as it was. But what is told to end since it hangs has hung."""
    guard, rank = recovering(context)
    watcher: Any = SimpleNamespace(
        reason="hangs", silent_s=silent_s, held_s=0.0, look=lambda _: "hangs", forget=lambda: None
    )
    with closing(rank):
        assert rank.begin(new=True, can_start=True)
        context.note(pid=task.pid)
        rank.is_told("it was told to end")
        rank.is_told("it was told to end again")
        if who == "another rank":
            guard.report(1, "rank 1 hangs", unnoticed_s=silent_s, hung=True)
        else:
            rank._watcher = watcher
            assert rank.take(None) == Next()
        failure = guard.read().failure
        assert failure is not None and failure.hung == (hung or who == "another rank")
        assert rank.take(None) == Next()
        life = guard.read()
        assert life.failure is not None
        assert (life.stage, life.failure.hung) == (Stage.FAILED, hung)


UNTIL_TOLD = ("sh", "-c", "trap 'exit 0' TERM; while :; do sleep 0.05; done")
GRACE = Grace(grace_s=120.0, reserve_s=5.0, rate=1 << 40)


# Its first thread ends when it is told to, and a second later the program.
THREADS = """
import ctypes, os, pathlib, signal, sys, threading, time

def end():
    time.sleep(1)
    os._exit(int(sys.argv[2]))

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
pathlib.Path(sys.argv[1]).touch()
signal.sigwait({signal.SIGTERM})
threading.Thread(target=end).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)  # of this thread
"""


@pytest.mark.parametrize(
    ("how", "status"), [("at once", 0), ("meanwhile", 0), ("by threads", 0), ("by threads", 3)]
)
def test_tasks_of_a_job_that_has_ended_get_the_signal_that_was_to_checkpoint_it(
    how: str,
    status: int,
    context: Context,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else they would have time to end, and not know that they have to. Meanwhile: while their
    keeper looks at what has become of the job."""
    ready, may_end = tmp_path / "ready", tmp_path / "may-end"
    monkeypatch.setattr(recovering_module, "_ENDS_WITHIN_S", 10.0)
    guard, rank = recovering(context)
    read = guard.read
    told: list[str] = []
    preempting = Preempting(context, GRACE, told.append)
    monkeypatch.setattr(preempting, "_begin", lambda: 0)  # another epoch is under way

    def fail() -> None:
        wait_for(lambda: len(told) > 0, "the keeper's answer to the signal")
        steering.give_up(context.store, context.keys)

    def read_late() -> Life:
        life = read()
        is_takes = threading.current_thread() is threading.main_thread()
        if is_takes and any("the tasks are told to end" in line for line in told):
            may_end.touch()
            wait_for(lambda: not context.state.lives, "the end of the tasks")
        return life

    with closing(rank):
        assert rank.begin(new=True, can_start=True)
        if how == "meanwhile":
            monkeypatch.setattr(guard, "read", read_late)
        else:
            may_end.touch()
        supervisor = Supervisor(context, SETTINGS, print, preempting, rank)
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
        ends = f"until [ -e {may_end} ]; do sleep 0.01; done; exit 0"
        command = ("sh", "-c", f"trap '{ends}' TERM; touch {ready}; while :; do sleep 0.05; done")
        if how == "by threads":
            command = (sys.executable, "-c", THREADS, str(ready), str(status))
        supervisor.start(command, os.environ)
        try:
            with signalled(signal.SIGTERM, ready.exists, fail):
                assert supervisor.run(restoring=False) == Ended(epoch=0, status=status)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    assert "no checkpoint, the tasks are told to end: rank 0 was told to end, and the" in told[-1]


def test_the_checkpoint_that_was_to_end_a_job_is_aborted_where_the_job_has_ended(
    context: Context,  # noqa: F811
    task: subprocess.Popen[bytes],  # noqa: F811
) -> None:
    context.note(pid=task.pid)
    told: list[str] = []
    preempting = Preempting(context, GRACE, told.append)
    assert preempting.told_to_end()
    store, keys = context.store, context.keys
    wait_for(lambda: keys.newest in store.read(keys.newest).entries, "the epoch")
    preempting.over()
    assert task.wait(30) == -signal.SIGTERM
    epoch, _ = epochs.phase(store, keys, 1)
    assert (epoch.phase, not preempting.told_to_end()) == (Phase.ABORTED, True)
    assert epoch.note == "rank 0 was told to end, and the job has ended meanwhile"
