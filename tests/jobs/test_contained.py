# SPDX-License-Identifier: Apache-2.0
"""Which criu of a container is told what, and what becomes of its engine's pause: with real
processes, visits and stores, and without criu. Containers are in tests/runtimes/test_ranks.py."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gpustasis.criu.find import Criu
from gpustasis.errors import JobError
from gpustasis.jobs import contained, epochs
from gpustasis.jobs.contained import POST_DUMP, PRE_DUMP, Contained, Engine, note_criu
from gpustasis.jobs.local import Local
from gpustasis.jobs.network import Lock, Network
from gpustasis.jobs.place import place_of
from gpustasis.jobs.rank import Context, Options
from gpustasis.jobs.records import Keys, Plan
from gpustasis.jobs.server import Server
from gpustasis.jobs.store import Put
from gpustasis.jobs.visits import EnginesCriu, Visit, Visits
from gpustasis.jobs.work import Order
from gpustasis.task import read_task
from support.job_ranks import ANSWER_S, namespace, tables, wait_for
from support.packet_filters import put_nft

KEYS = Keys("job")
NO_CRIU = Criu(program=Path("/none"), root=None, version=(4, 2), origin="test")
TIMEOUT_S = 60.0
Start = Callable[[], subprocess.Popen[bytes]]


@pytest.fixture
def context(tmp_path: Path, journal: Path) -> Iterator[Context]:
    server = Server(tmp_path / "store", journal)
    store = Local(tmp_path / "store", ANSWER_S)
    place = place_of("job", 0, tmp_path / "kept", tmp_path / "run")
    place.make()
    yield Context(place, 1, store, KEYS, Options(criu=NO_CRIU))
    store.close()
    server.close()


@pytest.fixture
def start() -> Iterator[Start]:
    """A process, which stands for a criu or a container."""
    with ExitStack() as held:

        def make() -> subprocess.Popen[bytes]:
            made = held.enter_context(subprocess.Popen(["sleep", "1000"]))
            held.callback(made.kill)
            return made

        yield make


class Pause:
    """Of an engine. While it puts it back, something may happen."""

    def __init__(self) -> None:
        self.on = True
        self.meanwhile: Callable[[], object] = lambda: None

    def lift(self) -> None:
        self.on = False

    def put_back(self) -> None:
        self.on = True
        self.meanwhile()

    def is_on(self) -> bool:
        return self.on


@pytest.fixture
def pause() -> Pause:
    return Pause()


def begin(context: Context) -> int:
    """An epoch for which engines are asked by others."""
    put = Put(KEYS.awaited(1), "1")
    return epochs.begin(context.store, KEYS, Plan(world=1, leave_running=True), puts=[put])


def visit_of(
    criu: subprocess.Popen[bytes], task: subprocess.Popen[bytes], action: str, epoch: int = 0
) -> Visit:
    return Visit(
        action=action,
        container="c" * 64,
        pid=task.pid,
        criu=criu.pid,
        criu_start=read_task(criu.pid).start_time,
        images=Path("/proc/self/cwd"),
        leaves_running=True,
        epoch=epoch,
    )


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(TIMEOUT_S)


def part_of(context: Context, number: int, visits: Visits, pause: Pause) -> Contained:
    engine = Engine(ask=lambda order, stop: None, pause=lambda one: pause, marks=Path("/none"))
    return Contained(context, Order(number, leave_running=True, restores=0), visits, engine)


def test_a_criu_that_nobody_has_looked_at_is_not_told_to_go(
    context: Context, start: Start, pause: Pause
) -> None:
    """The engine's first call was cut off when its criu waited, and it was asked again in time for
    the same epoch: the second criu would dump what is not locked for it, and then wait for ever."""
    number, visits, task = begin(context), Visits(), start()
    part = part_of(context, number, visits, pause)
    first, second = start(), start()
    one = visit_of(first, task, PRE_DUMP, number)
    visits.add(one)
    part.look()
    end(first)
    one.over.set()
    visits.remove(one)
    other = visit_of(second, task, PRE_DUMP, number)
    visits.add(other)
    for act in (part.lock_cuda, part.dump):
        with pytest.raises(JobError, match="criu has ended before it was to dump"):
            act()
    assert not part.is_touched()
    part.release()
    assert not other.over.is_set()
    visits.refuse("epoch 1 is aborted", number)
    assert other.said == "no epoch 1 is aborted"


def test_what_is_decided_is_told_to_the_criu_that_it_is_about(
    context: Context, start: Start
) -> None:
    """Not to one that is just about to dump another container that says it is this rank."""
    visits, task, criu, other = Visits(), start(), start(), start()
    ours = visit_of(criu, task, POST_DUMP)
    theirs = visit_of(other, start(), PRE_DUMP, 2)
    note_criu(context, ours)
    for one in (theirs, ours):
        visits.add(one)
    ending = threading.Thread(
        target=EnginesCriu(context, visits, POST_DUMP).end, kwargs={"yes": True}
    )
    ending.start()
    assert ours.over.wait(TIMEOUT_S)
    end(criu)
    ending.join(TIMEOUT_S)
    assert (ending.is_alive(), ours.said, theirs.over.is_set()) == (False, "go", False)


def test_a_script_of_an_earlier_process_of_that_pid_is_not_this_ones(
    context: Context, start: Start
) -> None:
    visits, task, criu = Visits(), start(), start()
    now = visit_of(criu, task, POST_DUMP)
    note_criu(context, now)
    earlier = visit_of(criu, task, POST_DUMP)
    earlier.criu_start -= 1
    visits.add(earlier)
    earlier.over.set()
    visits.remove(earlier)
    ours = EnginesCriu(context, visits, POST_DUMP)
    assert ours.slipped() == ""
    visits.add(now)
    now.over.set()
    visits.remove(now)
    assert "gone on before anything was decided" in ours.slipped()


def test_a_network_is_unlocked_when_its_container_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are in it: a pod's, or the host's. What is restored there would find it locked."""
    put_nft(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    with subprocess.Popen(["unshare", "--net", "sleep", "1000"]) as container:
        try:
            wait_for(lambda: namespace(container.pid) != namespace(os.getpid()), "a namespace")
            words = ["nsenter", f"--net=/proc/{container.pid}/ns/net", "sleep", "1000"]
            with subprocess.Popen(words) as other:
                try:
                    wait_for(lambda: namespace(other.pid) == namespace(container.pid), "another")
                    lock = Lock("job", 0, container.pid)
                    lock.take(Network(ports=frozenset({5})))
                    assert "gpustasis_" in tables(other.pid)
                    end(container)
                    lock.release()
                    assert "gpustasis_" not in tables(other.pid)
                finally:
                    other.kill()
        finally:
            container.kill()


def test_a_pause_that_its_engine_has_ended_is_not_put_back(
    context: Context, start: Start, pause: Pause
) -> None:
    """Its criu was killed while it waited for the other ranks."""
    number, visits, criu = begin(context), Visits(), start()
    part = part_of(context, number, visits, pause)
    visits.add(visit_of(criu, start(), PRE_DUMP, number))
    part.look()
    assert not pause.on
    end(criu)
    part.release()
    assert not pause.on


def test_a_pause_is_not_left_by_a_criu_that_ends_while_it_is_put_back(
    context: Context, start: Start, pause: Pause, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contained, "_RESUMED_S", 0.1)
    number, visits, criu = begin(context), Visits(), start()
    part = part_of(context, number, visits, pause)
    visits.add(visit_of(criu, start(), PRE_DUMP, number))
    part.look()
    pause.meanwhile = lambda: end(criu)
    part.release()
    assert criu.returncode is not None
    assert not pause.on


def test_the_pause_of_an_engine_that_waits_is_put_back(
    context: Context, start: Start, pause: Pause
) -> None:
    """Else its own call to end it fails."""
    number, visits, criu = begin(context), Visits(), start()
    part = part_of(context, number, visits, pause)
    one = visit_of(criu, start(), PRE_DUMP, number)
    visits.add(one)
    part.look()
    releasing = threading.Thread(target=part.release)
    releasing.start()
    assert one.over.wait(TIMEOUT_S)
    assert (one.said.startswith("no "), pause.on) == (True, True)
    end(criu)
    releasing.join(TIMEOUT_S)
    assert not releasing.is_alive()
