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
    """containerd with one container. answers: whether it lists it."""

    def __init__(self) -> None:
        self.runtime: subprocess.Popen[bytes] | None = None
        self.frozen = self.dumping = False
        self.answers = True
        self.events: list[Event] = []

    def start(self) -> None:
        self.runtime = subprocess.Popen(["sleep", "1000"])

    def kill(self) -> None:
        assert self.runtime is not None
        self.runtime.kill()
        self.runtime.wait()
        self.runtime = None

    def find_instance(self, path: str) -> Instance | str:
        if self.runtime is None:
            return "nobody listens"
        pid = self.runtime.pid
        return Instance(pid, read_task(pid).start_time, os.pidfd_open(pid))

    def containers(self, *_: object) -> list[Container]:
        if not self.answers:
            raise EngineError("server is not initialized yet")
        return [JOB]

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
    def __init__(self, path: str) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def runtime(self, *_: object) -> str:
        return "containerd v2.1"


@contextmanager
def alone(container: Container) -> Iterator[None]:
    yield


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    made = Node()
    for name, value in {
        "find_instance": made.find_instance,
        "Cri": Answering,
        "containers": made.containers,
        "open_files": made.open_files,
        "groups_by_container": lambda: {ID: [Path("group")]},
        "is_frozen": lambda group: made.frozen,
        "find_shim": lambda *words: made,
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
