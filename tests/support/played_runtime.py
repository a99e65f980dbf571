# SPDX-License-Identifier: Apache-2.0
"""A container runtime with one container, for `resume --watch` to look at: control group, shim and
runtime are played, and criu by a program of that name."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event as Flag
from threading import Thread
from typing import Self

from gpustasis.errors import CheckpointError, EngineError
from gpustasis.runtimes import instance
from gpustasis.runtimes.cri_containers import Container
from gpustasis.runtimes.instance import Instance
from gpustasis.runtimes.left_paused import Event
from gpustasis.task import read_task

ID = os.urandom(32).hex()  # what dumps it is looked for among all processes of this machine
JOB = Container(id=ID, namespace="tests", pod="pod", name="job", image="image", state="running")
TIMEOUT_S = 30.0


class Shim:
    """Of the container, by itself: what is thawed in another way stays paused to it."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.paused = False

    def is_paused(self) -> bool:
        return self.paused

    def resume(self) -> None:
        self.paused = False
        self.node.thaw("shim")


class Node:
    """A runtime with one container. answers: whether it lists any; listed: whether that one.
    resumed: by which ways it was, in order. place: an empty directory."""

    thread: Thread  # the watch

    def __init__(self, place: Path) -> None:
        self._place = place
        (place / ID).mkdir()
        sleep = shutil.which("sleep")
        assert sleep is not None
        for name in ("criu", "crio"):
            shutil.copy(sleep, place / name)
        self.runtime: subprocess.Popen[bytes] | None = None
        self.frozen = False
        self.shim = Shim(self)
        self.resumed: list[str] = []
        self.answers = self.listed = True
        self._go_on = Flag()  # clear: the watch is held up, or will be
        self._go_on.set()
        self._held = Flag()
        self.events: list[Event] = []
        self._looks = 0
        self.hold_at = ""  # the event at which the watch is held up

    def tell(self, event: Event) -> None:
        self.events.append(event)
        while event.what == self.hold_at:
            time.sleep(0.02)

    def start(self) -> None:
        self.runtime = subprocess.Popen(["sleep", "1000"])

    def kill(self) -> None:
        ended, self.runtime = self.runtime, None
        assert ended is not None
        ended.kill()
        ended.wait()

    def find_instance(self, path: str) -> Instance | str:
        found = self.runtime
        if found is None:
            return "nobody listens"
        try:
            start_time, handle = read_task(found.pid).start_time, os.pidfd_open(found.pid)
        except (CheckpointError, ProcessLookupError):
            return "it has just ended"
        return Instance(found.pid, start_time, handle)

    def hold(self) -> None:
        """The watch, before it looks again; until go_on()."""
        self._held.clear()
        self._go_on.clear()
        assert self._held.wait(TIMEOUT_S), self.events

    def go_on(self) -> None:
        self._go_on.set()

    def _pass(self) -> None:
        while not self._go_on.wait(0.02):
            self._held.set()

    def containers(self, *_: object) -> list[Container]:
        self._pass()
        if not self.answers:
            raise EngineError("server is not initialized yet")
        return [JOB] if self.listed else []

    @contextmanager
    def open_in(self, name: str) -> Iterator[None]:
        """A program of that name has a file of the container's open. It is younger than the
        runtime, whose child a real criu is."""
        with (
            (self._place / ID / "file").open("w") as file,
            subprocess.Popen([self._place / name, "1000"], stdout=file) as process,
        ):
            try:
                yield
            finally:
                process.kill()

    def wait(self, *words: float) -> bool:
        self._looks += words[0] > 0  # it has looked, and waits until it looks again
        found = instance.wait(*words)
        self._pass()
        return found or instance.wait(0, *words[1:])

    def change(self) -> None:
        """The next runtime is there at once."""
        ended, self.runtime = self.runtime, None
        self.start()
        assert ended is not None
        ended.kill()
        ended.wait()

    def pause(self) -> None:
        """As a runtime or somebody does it."""
        self.frozen = self.shim.paused = True

    def resume_task(self, *_: object) -> None:
        """The runtime's own way, which its shims learn of."""
        self.shim.paused = False
        self.thaw("runtime")

    def thaw(self, way: str) -> None:
        self.resumed.append(way)
        self.frozen = False

    def said(self) -> list[str]:
        return [event.what for event in self.events]

    def wait_for(self, what: str, count: int = 1) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while self.said().count(what) < count:
            assert time.monotonic() < deadline, self.events
            time.sleep(0.02)

    def wait_for_look(self, count: int = 2) -> None:
        """Until what is the case now was seen: a look under way may have begun before."""
        wanted, deadline = self._looks + count, time.monotonic() + TIMEOUT_S
        while self._looks < wanted:
            assert time.monotonic() < deadline, self.events
            time.sleep(0.02)

    def require_paused(self, seconds: float) -> None:
        """It stands still for so long, and nobody has touched it."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.frozen and "resumed" not in self.said() and not self.resumed, self.events
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
