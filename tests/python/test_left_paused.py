# SPDX-License-Identifier: Apache-2.0
"""The watch beside a runtime that is back and does not answer yet: what the last one has left
paused is resumed through its shim. Control groups, shim and criu are played here; tests/kubernetes
has real ones."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import pytest

from gpustasis.errors import EngineError
from gpustasis.runtimes import instance, left_paused, pauses
from gpustasis.runtimes.containerd import Container
from gpustasis.runtimes.instance import Instance
from gpustasis.runtimes.left_paused import Event, Watch
from gpustasis.task import read_task

ID = "0123456789abcdef" * 4
JOB = Container(id=ID, namespace="tests", pod="pod", name="job", image="image", state="running")
TIMEOUT_S = 30.0


class Node:
    """A runtime with one container. answers: whether it lists any; listed: whether that one."""

    thread: threading.Thread  # the watch

    def __init__(self) -> None:
        self.runtime: subprocess.Popen[bytes] | None = None
        self.frozen = self.dumping = False
        self.answers = self.listed = True
        self.go_on = threading.Event()  # clear: the watch is held up
        self.go_on.set()
        self.events: list[Event] = []

    def start(self) -> None:
        self.runtime = subprocess.Popen(["sleep", "1000"])

    def kill(self) -> None:
        ended, self.runtime = self.runtime, None
        assert ended is not None
        ended.kill()
        ended.wait()

    def find_instance(self, path: str) -> Instance | str:
        if self.runtime is None:
            return "nobody listens"
        pid = self.runtime.pid
        return Instance(pid, read_task(pid).start_time, os.pidfd_open(pid))

    def containers(self, *_: object) -> list[Container]:
        self.go_on.wait()
        if not self.answers:
            raise EngineError("server is not initialized yet")
        return [JOB] if self.listed else []

    def open_files(self, *comms: str) -> dict[str, dict[int, list[str]]]:
        here = {os.getpid(): [f"/run/{ID}/pages-1.img"]} if self.dumping else {}
        return {comm: here if comm == "criu" else {} for comm in comms}

    def wait(self, *words: float) -> bool:
        found = instance.wait(*words)
        self.go_on.wait()
        return found or instance.wait(0, *words[1:])

    def change(self) -> None:
        """The next runtime is there at once."""
        ended, self.runtime = self.runtime, None
        self.start()
        assert ended is not None
        ended.kill()
        ended.wait()

    def is_paused(self) -> bool:
        return self.frozen

    def resume(self) -> None:
        self.frozen = False

    def said(self) -> list[str]:
        return [event.what for event in self.events]

    def wait_for(self, what: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while what not in self.said():
            assert time.monotonic() < deadline, self.events
            time.sleep(0.02)


class Answering:
    name = ""

    def __init__(self, path: str) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def runtime(self, *_: object) -> str:
        return self.name


@contextmanager
def alone(container: Container) -> Iterator[None]:
    yield


@pytest.fixture(params=["containerd"])
def bare(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """Begin the watch with made.watch()."""
    made = Node()
    monkeypatch.setattr(Answering, "name", f"{request.param} 2.1")
    for name, value in {
        "find_instance": made.find_instance,
        "Cri": Answering,
        "containers": made.containers,
        "open_files": made.open_files,
        "groups_by_container": lambda: {ID: [Path("group")]},
        "is_frozen": lambda group: made.frozen,
        "wait": made.wait,
        "thaw": lambda group: made.resume(),
        "find_shim": lambda *words: made,
        "container_names": lambda state, one: ("tests", "pod", "job") if one == ID else None,
        "resume_task": lambda *words: made.resume(),
        "alone": alone,
    }.items():
        monkeypatch.setattr(left_paused, name, value)
    made.start()
    stop, end = os.pipe()
    watch = Watch("/run/containerd.sock", "gpustasis containerd", made.events.append)
    made.thread = threading.Thread(target=watch.run, args=(stop,))
    yield made
    os.write(end, b"x")
    made.go_on.set()
    made.thread.join()
    os.close(stop)
    os.close(end)
    if made.runtime is not None:
        made.kill()


@pytest.fixture
def node(bare: Node) -> Node:
    """It is watched."""
    bare.thread.start()
    bare.wait_for("watching")
    return bare


def test_a_runtime_that_is_back_and_does_not_answer(node: Node) -> None:
    node.frozen = node.dumping = True
    time.sleep(1.5)  # it is seen
    node.answers = False
    node.kill()
    node.wait_for("ended")
    node.start()
    node.wait_for("failed")
    assert node.frozen
    node.dumping = False
    node.wait_for("resumed")
    assert not node.frozen
    assert node.said() == ["watching", "ended", "waiting", "failed", "resumed"] or (
        node.said() == ["watching", "ended", "failed", "resumed"]
    )


BOTH = pytest.mark.parametrize("bare", ["containerd", "cri-o"], indirect=True)


@BOTH
def test_a_container_that_no_list_had_yet(node: Node, request: pytest.FixtureRequest) -> None:
    """It was started, and its checkpoint begun, since the last list."""
    node.frozen = True
    node.listed = False
    time.sleep(1.5)
    node.kill()
    node.wait_for("ended")
    if "containerd" in request.node.name:  # which kills it if it is paused still when that is back
        node.wait_for("resumed")
    node.listed = True
    node.start()
    node.wait_for("resumed")
    assert not node.frozen
    (resumed,) = [event for event in node.events if event.what == "resumed"]
    assert resumed.container is not None and resumed.container.path == "tests/pod/job"


@BOTH
def test_a_dump_of_a_container_that_no_list_had_yet(node: Node) -> None:
    """The next runtime is there before the dump ends, and before the watch has looked."""
    node.listed = False
    time.sleep(1.5)
    node.dumping = True
    node.kill()
    node.start()
    node.listed = True
    node.wait_for("ended")
    time.sleep(2)
    node.dumping, node.frozen = False, True
    node.wait_for("resumed")
    assert not node.frozen


@BOTH
def test_what_was_paused_before_the_watch_began_stays_so(bare: Node) -> None:
    """The runtime does not list its containers before it ends."""
    bare.frozen, bare.answers = True, False
    bare.thread.start()
    bare.wait_for("failed")
    bare.kill()
    bare.wait_for("ended")
    time.sleep(1)
    bare.answers = True
    bare.start()
    bare.wait_for("watching")
    time.sleep(3)
    assert bare.frozen and "resumed" not in bare.said()


@BOTH
def test_what_somebody_paused_while_the_runtime_hung_stays_so(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pauses, "BY_HAND_S", 2.0)
    time.sleep(1.5)
    node.answers = False
    node.wait_for("failed")
    node.frozen = True
    time.sleep(5)
    node.kill()
    node.wait_for("ended")
    time.sleep(2)
    assert node.frozen and "kept" in node.said()


def test_a_checkpoint_by_the_next_runtime_is_not_cut_off(node: Node) -> None:
    """The watch is held up; meanwhile the runtime ends, and the next one has begun."""
    time.sleep(1.5)
    node.go_on.clear()
    time.sleep(1.5)
    node.change()
    time.sleep(3)
    node.frozen = True
    node.go_on.set()
    time.sleep(3)
    assert node.frozen and "resumed" not in node.said()


def test_a_checkpoint_by_the_next_runtime_right_after_the_resume(node: Node) -> None:
    node.frozen = True
    time.sleep(1.5)
    node.kill()
    node.wait_for("resumed")
    node.start()
    time.sleep(0.8)  # it is still looked at often
    node.frozen = True
    time.sleep(3)
    assert node.frozen and node.said().count("resumed") == 1


@pytest.mark.parametrize("bare", ["cri-o"], indirect=True)
def test_a_runtime_in_between_that_never_lists(node: Node) -> None:
    node.listed = False
    time.sleep(1.5)
    node.frozen = True
    node.kill()
    node.wait_for("ended")
    node.answers = False
    node.start()
    node.wait_for("failed")
    time.sleep(4)  # what it would pause now is its own
    node.answers = node.listed = True
    node.change()
    node.wait_for("resumed")
    assert not node.frozen


def test_what_it_does_not_list_is_said_once(node: Node) -> None:
    node.answers = False
    node.wait_for("failed")
    time.sleep(3)
    assert node.said() == ["watching", "failed"]
    node.answers = True
    deadline = time.monotonic() + TIMEOUT_S
    while node.said() != ["watching", "failed", "watching"]:
        assert time.monotonic() < deadline, node.events
        time.sleep(0.02)
