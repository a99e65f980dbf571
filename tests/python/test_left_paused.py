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
from gpustasis.runtimes import left_paused
from gpustasis.runtimes.containerd import Container
from gpustasis.runtimes.instance import Instance
from gpustasis.runtimes.left_paused import Event, Watch
from gpustasis.task import read_task

ID = "0123456789abcdef" * 4
JOB = Container(id=ID, namespace="tests", pod="pod", name="job", image="image", state="running")
TIMEOUT_S = 30.0


class Node:
    """A runtime with one container. answers: whether it lists any; listed: whether that one."""

    def __init__(self) -> None:
        self.runtime: subprocess.Popen[bytes] | None = None
        self.frozen = self.dumping = False
        self.answers = self.listed = True
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
        if not self.answers:
            raise EngineError("server is not initialized yet")
        return [JOB] if self.listed else []

    def open_files(self, *comms: str) -> dict[str, dict[int, list[str]]]:
        here = {os.getpid(): [f"/run/{ID}/pages-1.img"]} if self.dumping else {}
        return {comm: here if comm == "criu" else {} for comm in comms}

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
def node(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    made = Node()
    monkeypatch.setattr(Answering, "name", f"{request.param} 2.1")
    for name, value in {
        "find_instance": made.find_instance,
        "Cri": Answering,
        "containers": made.containers,
        "open_files": made.open_files,
        "groups_by_container": lambda: {ID: [Path("group")]},
        "is_frozen": lambda group: made.frozen,
        "find_shim": lambda *words: made,
        "container_names": lambda state, one: ("tests", "pod", "job") if one == ID else None,
        "resume_task": lambda *words: made.resume(),
        "alone": alone,
    }.items():
        monkeypatch.setattr(left_paused, name, value)
    made.start()
    stop, end = os.pipe()
    watch = Watch("/run/containerd.sock", "gpustasis containerd", made.events.append)
    thread = threading.Thread(target=watch.run, args=(stop,))
    thread.start()
    made.wait_for("watching")
    yield made
    os.write(end, b"x")
    thread.join()
    os.close(stop)
    os.close(end)
    if made.runtime is not None:
        made.kill()


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


BOTH = pytest.mark.parametrize("node", ["containerd", "cri-o"], indirect=True)


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
