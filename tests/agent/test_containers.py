# SPDX-License-Identifier: Apache-2.0
"""Containers under containerd, which leaves one paused when nobody waits for its checkpoint; played
by a server that only answers."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpustasis.agent import containers
from gpustasis.agent.aftermath import settle
from gpustasis.agent.config import Config
from gpustasis.agent.operations import Journal, Operation, State
from gpustasis.agent.queue import Queue
from gpustasis.agent.subjects import Subject
from gpustasis.runtimes import containerd as engine
from gpustasis.runtimes import cri_containers
from gpustasis.runtimes.cri import GET_TASK, RESUME_TASK, TASK_PAUSED
from support.cri_server import CriServer, inventory

ID = "fedcba9876543210" * 4
A, B = "a" * 64, "b" * 64
WAIT_S = 30.0
TASK_RUNNING = 2  # Status.RUNNING of containerd.v1.types


class Containerd:
    """Pauses its one container for a checkpoint, which lasts until `go_on` is set or its call is
    cut off, and then leaves it so."""

    def __init__(self, path: Path) -> None:
        self.paused = False
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.config = Config(
            store=path / "store", containerd=str(path / "cri"), memory_reserve=0, disk_reserve=0
        )
        self.journal = Journal(self.config.store / "operations")
        self.written: list[Operation] = []  # when the checkpoint began
        answers: dict[str, Any] = inventory("containerd", "v2.1.0", {ID: 1})
        answers |= {
            "CheckpointContainer": self._checkpoint,
            GET_TASK: self._get,
            RESUME_TASK: self._resume,
        }
        self.server = CriServer(path / "cri", answers)

    def _checkpoint(self, request: Any, context: Any) -> Mapping[str, object]:
        self.written = self.journal.load()
        self.paused = True
        context.add_callback(self.go_on.set)
        self.begun.set()
        self.go_on.wait(WAIT_S)
        return {}

    def _get(self, request: Any, context: Any) -> Mapping[str, object]:
        return {"process": {"status": TASK_PAUSED if self.paused else TASK_RUNNING}}

    def _resume(self, request: Any, context: Any) -> Mapping[str, object]:
        self.paused = False
        return {}


@pytest.fixture
def containerd() -> Iterator[Containerd]:
    with tempfile.TemporaryDirectory(prefix="agent-") as name:
        made = Containerd(Path(name))
        with made.server:
            yield made
        made.journal.close()


def operation(**more: Any) -> Operation:
    return Operation(subject=Subject(engine="containerd", name=ID[:12]), uid=0, **more)


def begun(containerd: Containerd) -> tuple[Queue, Operation]:
    queue = Queue(containerd.config, containerd.journal, lambda _: None)
    asked = queue.submit(operation())
    assert containerd.begun.wait(WAIT_S), asked
    return queue, asked


def test_an_agent_that_stops_lets_a_container_run_on(containerd: Containerd) -> None:
    queue, asked = begun(containerd)
    assert containerd.paused
    assert queue.close(30.0)  # half of it is for what ends by itself
    assert asked.state is State.FAILED and not containerd.paused, asked


@pytest.mark.parametrize("before", [False, True])
def test_a_container_that_a_killed_agent_left_paused_is_resumed(
    containerd: Containerd, before: bool
) -> None:
    """Not one that was paused before its checkpoint: somebody wants it so."""
    containerd.paused = before
    queue, _ = begun(containerd)
    containerd.go_on.set()
    queue.close(WAIT_S)
    (found,) = containerd.written  # what a killed agent would have left behind
    assert not found.state.is_over
    containerd.paused = True
    settle(found, containerd.config, lambda: False)
    assert containerd.paused == before
    assert found.state is State.INTERRUPTED
    assert ("was left paused, and runs on" in found.note) != before, found


def test_a_rank_that_a_killed_agent_left_paused_is_resumed(
    containerd: Containerd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(containers, "engine_of", lambda _: "containerd")
    containerd.paused = True
    containers.resume_rank(ID, containerd.config)
    assert not containerd.paused
    containers.resume_rank(ID, containerd.config)  # it was not left so, or ours is not the first


def test_an_engine_is_given_as_long_as_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its script waits for the dumps of all ranks."""
    given = []
    monkeypatch.setattr(containers, "engine_of", lambda _: "crio")
    monkeypatch.setattr(containers, "Cri", lambda _: nullcontext())
    monkeypatch.setattr(cri_containers, "find", lambda *_: ID)
    monkeypatch.setattr(engine, "checkpoint", lambda *words: given.append(words[3]))
    words = (ID, Config(jobs_dump_limit=7200.0), Path("/none"))
    containers.dump_rank(*words, leave_running=True, stop=lambda: False)
    assert given[0] > 7200


def test_the_archive_that_was_just_made_stays_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was set back since those before it, by whose names it is the oldest."""
    alone = SimpleNamespace(inspect=lambda: SimpleNamespace(parent=None))
    monkeypatch.setattr("gpustasis.open", lambda _: alone)
    archives = [tmp_path / f"20260101T00000{number}.0-a.tar" for number in range(4)]
    for one in archives:
        one.touch()
    containers.keep_last(archives[0], 2)
    assert sorted(tmp_path.iterdir()) == [archives[0], *archives[2:]]
    containers.keep_last(archives[3], 2)
    assert sorted(tmp_path.iterdir()) == archives[2:]


@pytest.mark.parametrize(
    ("path", "found"),
    [
        (f"/machine.slice/libpod-{A}.scope", {A: f"libpod-{A}.scope"}),
        (f"/machine.slice/libpod-{A}.scope/container", {A: f"libpod-{A}.scope"}),
        (f"/kubepods.slice/pod1/crio-{A}.scope/{B}", {A: f"crio-{A}.scope"}),
        (f"/kubepods/burstable/pod1234/{A}", {A: A}),
        (f"/machine.slice/machine-libpod_pod_{B}.slice/libpod-{A}.scope", {A: f"libpod-{A}.scope"}),
        (f"/libpod_parent/{B}/libpod-{A}", {A: f"libpod-{A}"}),
        *((f"/machine.slice/libpod-conmon-{A}.scope", {}), ("/", {}), (f"/{A}b", {})),
        *((f"/machine.slice/{A[1:]}", {}), (f"/docker/{'c' * 64}/libpod-{A}", {A: f"libpod-{A}"})),
        # Of a user's own making, and a name with an end of a line within.
        (f"/user.slice/user-1000.slice/user@1000.service/libpod-{A}.scope", {}),
        (f"/machine.slice/\v0::/libpod-{A}.scope", {A: f"libpod-{A}.scope"}),
    ],
)
def test_which_container_a_process_is_in(path: str, found: dict[str, str]) -> None:
    for line in (f"0::{path}\n", f"3:cpu,cpuacct:{path}\n1:name=systemd:/\n"):
        assert containers.groups_of(line, {"c" * 64}) == found
