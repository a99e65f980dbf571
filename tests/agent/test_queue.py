# SPDX-License-Identifier: Apache-2.0
"""The queue and what it knows of operations, without an agent around it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import gpustasis
from gpustasis.agent.config import Config, Target
from gpustasis.agent.operations import Figures, Journal, Operation, State
from gpustasis.agent.queue import Queue
from gpustasis.agent.subjects import Held, Subject, held
from gpustasis.agent.undrained import left_to_drain, total
from gpustasis.agent.work import Work
from gpustasis.criu.statistics import statistics_path
from gpustasis.draining.recycle import UNSYNCED
from gpustasis.errors import AgentError
from gpustasis.image.arena import Tier
from support.criu_roots import newest_criu
from support.job import Job
from support.local_checkpoints import make_local

USER = 12345
WAIT_S = 30.0
SMALL_FILES = 64 << 10  # bytes on the disk, of a marker and the like
US = Subject(pid=os.getpid(), start_time=7)
SLEEP = "print('ready', flush=True)\nwhile True: __import__('time').sleep(0.1)"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(store=tmp_path / "store", memory_reserve=0, disk_reserve=0)


@pytest.fixture
def journal(config: Config) -> Iterator[Journal]:
    found = Journal(config.store / "operations")
    yield found
    found.close()


@pytest.fixture
def queue(config: Config, journal: Journal) -> Queue:
    return Queue(config, journal, lambda _: None)


def done(config: Config, target: str = "", uid: int = 0, ended: float = 1.0) -> Operation:
    above = f"targets/{target}" if target else f"users/{uid}/process-{US.key}"
    place = config.store / above / f"{ended}"
    return Operation(
        subject=US, uid=uid, target=target, state=State.DONE, ended=ended, place=str(place)
    )


def test_a_checkpoint_is_built_on_one_of_its_own_target_and_user_only(
    config: Config, queue: Queue
) -> None:
    """Those of others are removed by the rules of others."""
    own = done(config, target="train")
    foreign = Operation(subject=US, uid=0, target="train", state=State.DONE, ended=9.0, boot="0")
    for one in (own, done(config, ended=2.0), done(config, uid=5, ended=3.0), foreign):
        queue.add_known(one)
    assert queue.last_done(Operation(subject=US, uid=0, target="train")) is own
    assert queue.last_done(Operation(subject=US, uid=0, target="other")) is None


def test_a_checkpoint_is_built_on_one_in_its_own_directory_only(
    config: Config, tmp_path: Path, launch: Callable[..., Job]
) -> None:
    """The store may have been another one when that was made."""
    job = launch([sys.executable, "-c", SLEEP])
    job.wait_for("ready")
    own, other = done(config, target="train"), done(config)
    for one in (own, other):
        Path(one.place).parent.mkdir(parents=True)
        checkpoint(job.pid, one.place)
    target = Target(name="train", pidfile=tmp_path / "pid")
    operation = Operation(subject=US, uid=0, target="train")
    assert Work(operation, config, target, last=own)._parent() == Path(own.place)
    assert Work(operation, config, target, last=other)._parent() is None


def checkpoint(pid: int, place: str | Path) -> None:
    criu = newest_criu()
    program = str(criu.root or criu.program)
    gpustasis.checkpoint(pid, place, leave_running=True, layout="packed", criu=program)


def test_an_operation_is_on_the_disk_with_its_boot_and_long_words(journal: Journal) -> None:
    """What is damaged is left out when it is read again: the words may not make it too long."""
    words = "\N{PILE OF POO}" * 4096
    operation = Operation(subject=US, uid=0, error=words, note=words)
    journal.write(operation)
    (found,) = journal.load()
    assert (found.id, found.boot) == (operation.id, operation.boot) and len(found.boot) == 32
    assert words.startswith(found.error) and len(found.error) > 100
    assert {"boot", "to_resume"}.isdisjoint(operation.as_json())


def test_what_cannot_be_cancelled_says_so(config: Config, queue: Queue) -> None:
    """An answer that the job runs on, and then it is ended, costs a job."""
    podman = Operation(subject=Subject(engine="podman", name="x"), uid=0, stop=True)
    with pytest.raises(AgentError, match="Podman's service cannot be told"):
        Work(podman, config, None).cancel()
    with held(os.getpid()) as process:
        work = Work(Operation(subject=process.subject(), uid=0, stop=True), config, None, process)
        work._still_wanted(process)  # the last that criu waits for
        with pytest.raises(AgentError, match="criu is told to end process"):
            work.cancel()
        assert not work.operation.cancel
        again = Work(work.operation, config, None, process)
        again.cancel()
        with pytest.raises(AgentError, match="it was cancelled"):
            again._still_wanted(process)
    before = Operation(subject=US, uid=0, stop=True, state=State.RUNNING)
    queue.add_known(before)
    with pytest.raises(AgentError, match="is not at work here"):
        queue.cancel(before)


def test_what_a_user_has_done_is_forgotten_by_itself(
    config: Config, journal: Journal, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what root has done; and never the last checkpoint of a target."""
    monkeypatch.setattr("gpustasis.agent.queue.KEPT", 3)
    last = done(config, target="train")
    root_s = [last, *(done(config) for _ in range(3))]
    for one in (*root_s, *(done(config, uid=USER) for _ in range(8))):
        journal.write(one)
        queue.add_known(one)
    refuse(queue, USER)
    assert [one.uid for one in queue.known()] == [0] * 4 + [USER] * 3
    refuse(queue, 0)
    assert [one.uid for one in queue.known()] == [0] * 3 + [USER] * 3 + [0]
    assert last in queue.known()
    assert {one.id for one in journal.load()} == {one.id for one in queue.known()}


def refuse(queue: Queue, uid: int) -> None:
    """An operation that ends: there is no such process."""
    child = subprocess.Popen(["sleep", "60"])
    process = Held(child.pid)
    child.kill()
    child.wait()
    found = queue.submit(Operation(subject=process.subject(), uid=uid), process)
    wait_for(lambda: not any(queue.counts()))
    assert found.state.is_over


def wait_for(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_user_s_checkpoints_at_work_count_for_the_disk(
    config: Config, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that begin at once may take no more than one after the other."""
    # The first one's claim is there when the second asks, and nothing of it is on the disk yet.
    bounds = replace(config, concurrency=2, disk_per_user=(16 << 20) + (12 << 20))
    queue = Queue(bounds, journal, lambda _: None)
    go_on, begun = threading.Event(), threading.Event()

    def wait(work: Work) -> None:
        begun.set()
        go_on.wait(WAIT_S)
        raise AgentError("enough")

    monkeypatch.setattr(Work, "run", wait)
    with started() as first, started() as second:
        asked = queue.submit(Operation(subject=first.subject(), uid=USER), first)
        assert begun.wait(WAIT_S)
        later = queue.submit(Operation(subject=second.subject(), uid=USER), second)
        wait_for(lambda: later.state.is_over)
        assert later.state is State.REFUSED and "and disk_per_user is 28.0 MiB" in later.error
        go_on.set()
        wait_for(lambda: asked.state.is_over)
        assert queue.close(WAIT_S)


def in_memory(
    config: Config, arena: Path, size: int, uid: int, target: str = "", ended: float = 1.0
) -> Operation:
    """One that is done, with an eighth of it on the disk already."""
    found = done(config, uid=uid, target=target, ended=ended)
    Path(found.place).parent.mkdir(parents=True, exist_ok=True)
    make_local(Path(found.place), arena)
    (Path(found.place) / "pages-1.img").write_bytes(bytes(size // 8))
    found.figures = Figures(
        duration_s=1.0,
        downtime_s=1.0,
        size_bytes=size,
        stored_bytes=0,
        gpu_bytes=size,
        incremental=False,
        emulated=False,
        verified=False,
        tier="local",
    )
    return found


@pytest.mark.parametrize(
    ("uid", "target", "counts"),
    [(USER, "", "user"), (USER + 1, "", ""), (USER, "train", ""), (0, "train", "")],
)
def test_what_is_to_be_drained_counts_for_the_disk(
    config: Config, journal: Journal, arena: Path, uid: int, target: str, counts: str
) -> None:
    """It is in memory now, and will be there. What its drain has written counts once. What belongs
    to a target is nobody's of whom a limit is kept."""
    bounds = replace(config, disk_per_user=(16 << 20) + (68 << 20))
    queue = Queue(bounds, journal, lambda _: None)
    local = in_memory(config, arena, 64 << 20, uid, target)
    queue.add_known(local)
    left = left_to_drain([local])[local.id]
    assert (56 << 20) - SMALL_FILES < left < 56 << 20

    def ask() -> Operation:
        with started() as process:
            found = queue.submit(Operation(subject=process.subject(), uid=USER), process)
            wait_for(lambda: found.state.is_over)
        return found

    said = f"user {USER} has 64.0 MiB of checkpoints"
    small = replace(bounds, disk_per_user=(16 << 20) + (60 << 20))
    assert said not in ask().error
    queue._config = small
    assert (said in ask().error) == (counts == "user")
    queue.note_drained(Path(local.place), Tier.DURABLE)
    assert said not in ask().error and left_to_drain([local]) == {}


def test_the_disk_that_is_to_be_drained_to_is_kept_free(
    config: Config, journal: Journal, arena: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has asked for what is in memory. Nobody waits while its files are looked at."""
    monkeypatch.setattr("gpustasis.agent.space.free_disk", lambda _: 80 << 20)
    queue = Queue(config, journal, lambda _: None)
    local = in_memory(config, arena, 80 << 20, USER)
    queue.add_known(local)
    held_locks: list[bool] = []
    walk = os.walk

    def walked(place: Path) -> object:
        held_locks.append(queue._changed._is_owned())  # type: ignore[attr-defined]
        return walk(place)

    monkeypatch.setattr(os, "walk", walked)
    words = "10.0 MiB are free beyond disk_reserve (0.0 MiB), what is at work and what is to be "
    with started() as process:
        found = queue.submit(Operation(subject=process.subject(), uid=0), process)
        wait_for(lambda: found.state.is_over)
    assert found.state is State.REFUSED and words in found.error, found.error
    assert held_locks and not any(held_locks)


def test_what_can_never_be_drained_takes_nothing(config: Config, arena: Path) -> None:
    local = in_memory(config, arena, 64 << 20, USER)
    (next(arena.iterdir()) / UNSYNCED).touch()
    assert left_to_drain([local]) == {local.id: 0}


def test_what_is_in_earlier_checkpoints_is_not_drained_again(config: Config, arena: Path) -> None:
    local = in_memory(config, arena, 64 << 20, USER)
    all_of_it = left_to_drain([local])[local.id]
    assert local.figures is not None
    local.figures = replace(local.figures, incremental=True)
    assert left_to_drain([local]) == {local.id: all_of_it}  # it is not known how much
    ref = {"ref": {"plain_bytes": 16 << 20}}
    task = {"pid": 7, "image_pid": 7, "externalized": True, "staged_bytes": 32 << 20} | ref
    own = {"pid": 7, "image_pid": 7, "left_because": "", "bytes": 32 << 20} | ref
    of_both = {"file_bytes": 1, "stored_twice_bytes": 0, "phases_ms": {}}
    said = {"version": 1, "result": "ok", "error": "", "backend": "driver", "phases_ms": {}}
    said |= {"tasks": [task | of_both], "cpu_memory": [own | of_both]}
    statistics_path(Path(local.place), "dump").write_text(json.dumps(said))
    left = left_to_drain([local])[local.id]
    assert all_of_it - (32 << 20) - SMALL_FILES < left <= all_of_it - (32 << 20)
    local.figures = replace(local.figures, incremental=False)
    assert left_to_drain([local])[local.id] > left + (31 << 20)


def test_what_has_come_since_counts_in_full(config: Config, arena: Path) -> None:
    first, second = (in_memory(config, arena, 8 << 20, USER, ended=at) for at in (1.0, 2.0))
    left = left_to_drain([first])
    assert total([first, second], left) == left[first.id] + (8 << 20)
    assert total([second], left) == 8 << 20


@contextmanager
def started() -> Iterator[Held]:
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            yield Held(child.pid)
        finally:
            child.kill()


def test_what_is_at_work_is_not_taken_for_what_failed(
    config: Config, queue: Queue, tmp_path: Path
) -> None:
    """It has begun, and its directory holds nothing yet."""
    directory = config.store / "targets" / "train"
    for name in ("failed", "begun"):
        (directory / name).mkdir(parents=True)
    begun = Operation(subject=US, uid=0, target="train", state=State.RUNNING)
    begun.place = str(directory / "begun")
    queue.add_known(begun)
    target = Target(name="train", pidfile=tmp_path / "pid")
    operation = Operation(subject=US, uid=0, target="train")
    Work(operation, config, target, not_over=queue.not_over)._tidy(directory)
    assert [one.name for one in directory.iterdir()] == ["begun"]
