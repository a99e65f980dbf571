# SPDX-License-Identifier: Apache-2.0
"""All of a rank's tasks are ended, and nothing else; and what a keeper finds of an earlier life."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from gpustasis.errors import JobError
from gpustasis.jobs import epochs, steering, verified
from gpustasis.jobs.exchange import Settings
from gpustasis.jobs.guard import Guard, where
from gpustasis.jobs.lead import digest_of
from gpustasis.jobs.leading import Leading
from gpustasis.jobs.lives import (
    Failure,
    Life,
    Stage,
    Standing,
    Terms,
    Way,
    keeper_text,
    standing_text,
)
from gpustasis.jobs.messages import Phase
from gpustasis.jobs.rank import Context
from gpustasis.jobs.records import Plan, phase_text
from gpustasis.jobs.recovering import Recovering
from gpustasis.jobs.steering import find_life
from gpustasis.jobs.stopping import status_of
from gpustasis.jobs.store import Put, Snapshot
from gpustasis.jobs.supervise import Supervisor
from gpustasis.task import read_task
from jobs.test_undoing import context, server, task  # noqa: F401 - fixtures
from support.job_ranks import state_of, wait_for

TERMS = Terms(restarts=1)
# A root with a child, which is left behind when the root is killed.
FAMILY = "import subprocess, sys; subprocess.Popen(['sleep', '1000']); sys.stdin.read()"


@pytest.fixture
def family() -> Iterator[tuple[int, int, int]]:
    """Root, when it was started, and its child."""
    words = [sys.executable, "-c", FAMILY]
    with subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True) as root:
        place = Path(f"/proc/{root.pid}/task/{root.pid}/children")
        wait_for(lambda: bool(place.read_text().split()), "the child")
        child = int(place.read_text().split()[0])
        yield root.pid, read_task(root.pid).start_time, child
        root.kill()
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("root_is_dead", [False, True])
def test_what_a_root_leaves_behind_is_ended_too(
    family: tuple[int, int, int], root_is_dead: bool
) -> None:
    root, start, child = family
    if root_is_dead:
        os.kill(root, signal.SIGKILL)
        wait_for(lambda: state_of(root) in {"Z", ""}, "the root's end")
    code = f"from gpustasis.jobs.stopping import stop; stop({root}, {start})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert state_of(root) in {"Z", ""}
    assert state_of(child) in {"Z", ""}


def test_a_job_that_is_not_back_leaves_nothing_behind(
    context: Context,  # noqa: F811
    family: tuple[int, int, int],
) -> None:
    """What is no longer below its root neither: an older checkpoint may be restored then."""
    root, _, child = family
    context.note(pid=root)
    os.kill(root, signal.SIGKILL)
    wait_for(lambda: not context.state.lives, "the root's end")
    verified.end_tasks(context)
    assert state_of(child) in {"Z", ""}


# Its first thread has ended, which looks like a zombie, and another one runs.
HEADLESS = """
import ctypes, sys, threading, time
threading.Thread(target=time.sleep, args=(1000,)).start()
ctypes.CDLL(None).pthread_exit(None)
"""
STOP_CHILD = """
import os, subprocess, sys, time
from gpustasis.jobs.stopping import stop
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
stat = lambda: open(f"/proc/{child.pid}/stat").read().rpartition(")")[2].split()
while stat()[0] != "Z":
    time.sleep(0.01)
stop(child.pid, int(stat()[19]))
assert not os.path.exists(f"/proc/{child.pid}")
"""


def test_a_process_without_its_first_thread_is_ended_too() -> None:
    """And its pid is free afterwards: a restore needs it."""
    words = [sys.executable, "-c", STOP_CHILD, HEADLESS]
    subprocess.run(words, check=True, timeout=60)


# The root of a rank is killed, and what it has started ends by itself before anybody looks. As a
# zombie of the keeper it holds the root's session, and so the root's pid.
LEFT_ENDED = """
import ctypes, os, signal, subprocess, sys, time
from gpustasis.jobs.stopping import children, stop
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # a subreaper, as a keeper is
script = "sleep 1000 & echo $!; wait"
root = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True)
child = int(root.stdout.readline())
stat = lambda pid: open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()
start = int(stat(root.pid)[19])
root.kill()
root.wait()  # as a keeper learns its status
os.kill(child, signal.SIGKILL)
while stat(child)[0] != "Z":
    time.sleep(0.01)
stop(root.pid if sys.argv[1] == "known" else 0, start)
assert children() == []
"""


@pytest.mark.parametrize("root", ["known", "forgotten"])
def test_what_has_ended_by_itself_keeps_no_pid(root: str) -> None:
    subprocess.run([sys.executable, "-c", LEFT_ENDED, root], check=True, timeout=60)


def test_the_session_of_a_later_process_is_left_alone(family: tuple[int, int, int]) -> None:
    root, start, child = family
    code = f"from gpustasis.jobs.stopping import stop; stop({root}, {start - 1})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    # They live, and sleep as soon as they have had a processor.
    wait_for(lambda: state_of(root) == "S", "the root, which reads")
    wait_for(lambda: state_of(child) == "S", "the child, which sleeps")


def test_no_root_is_no_session() -> None:
    """0 is that of the kernel's threads."""
    code = "from gpustasis.jobs.stopping import stop; stop(0, 0)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("status", [0, 3, -9])
def test_how_a_process_of_others_has_ended(status: int) -> None:
    code = f"import os, sys; sys.stdin.read(); os.kill(os.getpid(), {max(0, -status)})"
    code += f"; sys.exit({status})"
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as program:
        descriptor = os.pidfd_open(program.pid)
        try:
            start = read_task(program.pid).start_time
            assert status_of(program.pid, start, descriptor) is None
            assert program.stdin is not None
            program.stdin.close()
            wait_for(lambda: state_of(program.pid) == "Z", "its end")
            assert status_of(program.pid, start, descriptor) == status
            program.wait()
            kernel = tuple(map(int, os.uname().release.split("-")[0].split(".")[:2]))
            known = status if kernel >= (6, 15) else None
            assert status_of(program.pid, start, descriptor) == known
        finally:
            os.close(descriptor)


def recovering(context: Context) -> tuple[Guard, Recovering]:  # noqa: F811
    told: Callable[[str], object] = lambda _: None  # noqa: E731
    guard = Guard(
        *(context.store, context.keys, 0, 1, TERMS, where(context.place.run)), ttl_s=4, told=told
    )
    return guard, Recovering(context, guard, None, told)


def lived(context: Context) -> None:  # noqa: F811
    """The job had a life, and has failed."""
    guard, _ = recovering(context)
    with closing(guard):
        guard.begin(new=True)
        guard.say(1, Way.HERE)
        guard.give_up("why")


def test_tasks_of_an_earlier_life_are_stopped_before_a_seat_is_taken(
    context: Context,  # noqa: F811
    task: subprocess.Popen[bytes],  # noqa: F811
) -> None:
    lived(context)
    guard, rank = recovering(context)
    with closing(guard):
        guard.begin(new=True)
    context.life = 1
    context.note(pid=task.pid)
    other = replace(where(context.place.run), run="elsewhere")
    elsewhere = Guard(
        *(context.store, context.keys, 0, 1, TERMS, other), ttl_s=4, told=lambda _: None
    )
    with closing(elsewhere):
        elsewhere.begin(new=False)
        with pytest.raises(JobError, match="has a keeper on"):
            rank.begin(new=False, can_start=False)
    assert state_of(task.pid) in {"Z", ""}
    assert not context.state.lives


def test_what_a_root_of_an_earlier_life_has_left_is_stopped_before_the_command_starts_again(
    context: Context,  # noqa: F811
    family: tuple[int, int, int],
) -> None:
    root, _, child = family
    lived(context)
    context.life = 1
    context.note(pid=root)
    os.kill(root, signal.SIGKILL)
    wait_for(lambda: not context.state.lives, "the root's end")
    _, rank = recovering(context)
    with closing(rank):
        assert rank.begin(new=True, can_start=True)
        assert state_of(child) in {"Z", ""}


def test_tasks_of_this_life_are_kept(
    context: Context,  # noqa: F811
    task: subprocess.Popen[bytes],  # noqa: F811
) -> None:
    context.life = 1
    context.note(pid=task.pid)
    _, rank = recovering(context)
    with closing(rank):
        assert not rank.begin(new=True, can_start=True)
        assert not rank.is_due(ended=False, waits=False)
        assert task.poll() is None


def test_the_number_of_a_root_that_has_ended_stays_taken_until_all_is_stopped(
    context: Context,  # noqa: F811
) -> None:
    """Else its session could be another's by then, whose processes would be ended."""
    _, rank = recovering(context)
    supervisor = Supervisor(context, Settings(), lambda _: None, recovering=rank)
    words = ["sh", "-c", "read line; exit 3"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True) as root:
        context.note(pid=root.pid)
        assert not supervisor._has_ended()
        assert root.stdin is not None
        root.stdin.close()
        wait_for(lambda: state_of(root.pid) == "Z", "the root's end")
        assert supervisor._has_ended()
        assert supervisor._status == 3
        assert state_of(root.pid) == "Z"


def test_a_command_is_started_once_in_a_life(context: Context) -> None:  # noqa: F811
    """A keeper whose rank has died while it had none does not start it again beside the others."""
    _, rank = recovering(context)
    with closing(rank):
        assert rank.begin(new=True, can_start=True)
    _, again = recovering(context)
    with closing(again):
        assert not again.begin(new=True, can_start=True)
        assert again.is_due(ended=True, waits=False)
        again.take(None)
        life = find_life(context.store, context.keys)
        assert (life.stage, life.why()) == (
            Stage.STOPS,
            "rank 0 has ended, its status is not known",
        )


@pytest.mark.parametrize("status", [0, 1, None])
def test_tasks_that_have_ended_well_have_not_failed_whatever_an_epoch_says(
    status: int | None,
    context: Context,  # noqa: F811
) -> None:
    """One by the clock has been under way, and was aborted."""
    guard, rank = recovering(context)
    with closing(rank):
        assert rank.begin(new=True, can_start=True)
        rank.has_trouble("its tasks have ended")
        assert rank.is_due(ended=True, waits=False)
        rank.take(status)
        assert guard.read().begun == (status != 0)
        standing = guard.standing(1)
        assert standing is not None
        assert (standing.way is Way.ENDED) == (status == 0)
        assert (rank._trouble == "") == (status == 0)


@pytest.mark.parametrize("how", ["given up", "anew"])
def test_whoever_ends_has_said_that_nothing_of_its_rank_is_left(
    how: str,
    context: Context,  # noqa: F811
    task: subprocess.Popen[bytes],  # noqa: F811
) -> None:
    """So it may be started elsewhere."""
    guard, rank = recovering(context)
    with closing(rank):
        assert rank.begin(new=True, can_start=True)
        context.note(pid=task.pid)
        steering.give_up(context.store, context.keys)
        if how == "anew":
            text = replace(find_life(context.store, context.keys), run="other", number=2).to_text()
            context.store.write([], [Put(context.keys.life, text)])
            with pytest.raises(JobError, match="was started anew"):
                rank.take(None)
        else:
            assert rank.take(None).failed == "given up by hand"
        standing = guard.standing(1)
        assert standing is not None and standing.way is Way.STOPPED
        assert state_of(task.pid) in {"Z", ""}


def committed(context: Context, begun_at: float = 0.0) -> int:  # noqa: F811
    """A whole checkpoint of one rank. begun_at: by the clock; 0: asked for."""
    plan = Plan(world=1, leave_running=True)
    number = epochs.begin(context.store, context.keys, plan)
    text = phase_text(plan, Phase.COMMITTED, digest_of({0: "record"}))
    puts = [Put(context.keys.phase(number), text), Put(context.keys.record(number, 0), "record")]
    if begun_at:
        puts.append(Put(context.keys.in_between(number), f"{begun_at:.3f}"))
    context.store.write([], puts)
    return number


def stopped(
    context: Context,  # noqa: F811
    failure: Failure,
    *,
    afresh: bool = False,
    starts: bool = True,
    back_off_s: float = 100.0,
    **fields: int,
) -> None:
    """The job is, and has a keeper, with a command if `starts`."""
    keys, place = context.keys, where(context.place.run)
    terms = Terms(restarts=99, back_off_s=back_off_s, afresh=afresh)
    life = Life(run="r", number=1, stage=Stage.STOPS, world=1, terms=terms, failure=failure)
    life = replace(life, **fields)
    puts = {
        keys.life: life.to_text(),
        keys.in_life(life.number, 0): standing_text(Standing(way=Way.STOPPED, where=place)),
        keys.keeper(0): keeper_text("me", place, starts=starts),
    }
    context.store.write([], [Put(key, value) for key, value in puts.items()])


def test_the_same_checkpoint_is_restored_again_after_a_while(context: Context) -> None:  # noqa: F811
    """And a newer one at once."""
    failure = Failure(rank=0, reason="why", at=time.time())
    stopped(context, failure, in_a_row=2, restored=committed(context))
    keys = context.keys
    said: list[str] = []
    lead = Leading(context.store, keys, 4, said.append)
    lead.turn(find_life(context.store, keys))
    assert find_life(context.store, keys).stage is Stage.STOPS
    assert said == ["job job waits: it is restored 100 s after it has failed"]
    newer = committed(context)
    lead.turn(find_life(context.store, keys))
    found = find_life(context.store, keys)
    assert (found.stage, found.restored, found.in_a_row) == (Stage.RESTORES, newer, 1)


def test_while_it_waits_marks_are_not_read_again_and_again(
    context: Context,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A job may have thousands of epochs, and a turn comes several times a second."""
    failure = Failure(rank=0, reason="why", at=time.time())
    stopped(context, failure, in_a_row=2, restored=committed(context), afresh=True)
    read, marks_read = context.store.read, 0

    def counted(*names: str) -> Snapshot:
        nonlocal marks_read
        marks_read += any(name.endswith("unverified") for name in names)
        return read(*names)

    monkeypatch.setattr(context.store, "read", counted)
    lead = Leading(context.store, context.keys, 4, lambda _: None)
    for _ in range(5):
        lead.turn(find_life(context.store, context.keys))
    assert find_life(context.store, context.keys).stage is Stage.STOPS
    assert marks_read == 1
