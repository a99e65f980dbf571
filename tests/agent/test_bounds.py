# SPDX-License-Identifier: Apache-2.0
"""What users ask for takes nothing away from root, from the clock and from each other."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpustasis.agent.config import Config, Target
from gpustasis.agent.operations import INTERVAL, Journal, Operation, State
from gpustasis.agent.peers import Peer
from gpustasis.agent.periodic import RETRY_S, Periodic
from gpustasis.agent.queue import Queue
from gpustasis.agent.requests import Answer, Requests
from gpustasis.agent.server import Server
from gpustasis.agent.subjects import Subject, tree_pids
from gpustasis.agent.threads import in_thread
from gpustasis.errors import AgentError

USER, OTHER = 12345, 23456
WAIT_S = 30.0


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    config = Config(store=tmp_path / "store", queue=2)
    journal = Journal(config.store / "operations")
    yield Queue(config, journal, lambda _: None)
    journal.close()


def operation(uid: int, **more: Any) -> Operation:
    return Operation(subject=Subject(engine="podman", name=os.urandom(4).hex()), uid=uid, **more)


def test_users_cannot_fill_the_queue_for_root_and_the_clock(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "_start_those_that_can", lambda: None)
    for uid in (USER, OTHER, 0, 0):
        queue.submit(operation(uid))
    for uid in (USER, 0):
        with pytest.raises(AgentError, match="the queue is full: 2 wait already"):
            queue.submit(operation(uid))
    queue.submit(operation(0, origin=INTERVAL))
    assert queue.counts() == (5, 0)


def test_a_target_that_is_refused_is_tried_again_soon(queue: Queue, tmp_path: Path) -> None:
    pidfile = tmp_path / "pid"
    pidfile.write_text(str(os.getpid()))
    target = Target(name="job", pidfile=pidfile, interval_s=86400.0)
    now = time.time()
    periodic = Periodic(Config(targets=(target,)), queue, now)
    queue.close(0)  # it takes nothing any more
    periodic.submit_due(now + 90000)
    assert periodic.next_due("job") == now + 90000 + RETRY_S


def test_a_clock_that_is_set_back_puts_no_checkpoint_off(queue: Queue, tmp_path: Path) -> None:
    target = Target(name="job", pidfile=tmp_path / "pid", interval_s=60.0)
    now = time.time()
    periodic = Periodic(Config(targets=(target,)), queue, now)
    earlier = now - 86400
    periodic.submit_due(earlier)
    assert periodic.next_due("job") == earlier + 60
    periodic.submit_due(earlier + 61)  # it is due, and the job is not there
    assert periodic.next_due("job") == earlier + 61 + 60


def test_a_tree_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    assert os.getpid() in tree_pids(os.getpid())
    monkeypatch.setattr("gpustasis.agent.subjects.MAX_THREADS", 0)
    with pytest.raises(AgentError, match="has over 0 threads"):
        tree_pids(os.getpid())


def test_what_has_ended_is_waited_for_by_nobody(queue: Queue) -> None:
    """What is remembered for each such request would never be forgotten."""

    async def run() -> Server:
        server = Server(Config(), Requests(Config(), queue, lambda _: 0.0))
        over = operation(USER, state=State.DONE)
        for _ in range(3):
            assert await server._waited(Answer({}, over), asyncio.StreamReader())
        return server

    assert asyncio.run(run())._ended == {}


def test_one_that_waits_in_a_thread_keeps_no_other_waiting() -> None:
    go_on = threading.Event()

    async def run() -> None:
        held = [asyncio.ensure_future(in_thread(go_on.wait)) for _ in range(64)]
        async with asyncio.timeout(WAIT_S):
            assert await in_thread(lambda: 7) == 7
            with pytest.raises(AgentError):
                await in_thread(lambda: tree_pids(1 << 40) and _refuse())
        go_on.set()
        assert all(await asyncio.gather(*held))

    try:
        asyncio.run(run())
    finally:
        go_on.set()


def _refuse() -> None:
    raise AgentError("no")


class Slow:
    """In place of Requests: how many are at work at once."""

    def __init__(self) -> None:
        self.at_work = self.most = 0

    def answer(self, peer: Peer, raw: dict[str, Any]) -> Answer:
        self.at_work += 1
        self.most = max(self.most, self.at_work)
        time.sleep(0.05)
        self.at_work -= 1
        return Answer({})


def test_a_user_s_requests_are_done_one_after_the_other() -> None:
    slow = Slow()

    async def ask(path: Path) -> None:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b'{"version": 1, "do": "status"}\n')
        assert json.loads(await reader.readline()) == {"version": 1}
        writer.close()

    async def run(path: Path) -> Server:
        server = Server(Config(socket=path), slow)  # type: ignore[arg-type]
        await server.start()
        await asyncio.gather(*[ask(path) for _ in range(6)])
        await server.close()
        return server

    with tempfile.TemporaryDirectory(prefix="agent-") as name:
        server = asyncio.run(run(Path(name) / "s"))
    assert slow.most == 1
    assert not server._turns and not server._open
