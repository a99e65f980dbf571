# SPDX-License-Identifier: Apache-2.0
"""The agent as a service: its start and end, killed at work, checkpoints by the clock, metrics."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import gpustasis
from gpustasis.agent import daemon
from gpustasis.agent.config import Config
from gpustasis.agent.operations import Journal
from gpustasis.driver import ProcessState
from gpustasis.dump_records import find_begun
from gpustasis.emulator import Emulator
from gpustasis.jobs.local import Local
from gpustasis.jobs.store import Put
from gpustasis.recovery import GUARDIAN_COMM, WORKER_COMM
from gpustasis.task import find_users, read_task
from support.agent import Agent, say
from support.driver_states import driver_of
from support.faults import await_hit
from support.job import Job, check_memory, reap_workers
from support.job_ranks import ANSWER_S
from support.json_output import check_document
from support.ports import hold_port, port_of

Agents = Callable[..., Agent]
Generations = Callable[..., Job]
SETTLE_S = 30.0
LOCK_S = 6.0  # that the driver takes for it


def wait_for(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + SETTLE_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def criu_at(place: Path) -> list[int]:
    try:
        return find_users(place, "criu", "ld-linux-x86-64")
    except FileNotFoundError:
        return []


def send(pid: int, number: int) -> None:
    """To one that may have just ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def begin(agent: Agent, emulator: Emulator, pid: int, *, stop: bool) -> dict[str, Any]:
    """A checkpoint whose criu is in the middle of it."""
    emulator.add_fault("checkpoint", "delay", delay_ms=6000)
    with agent.client() as client:
        id = client.checkpoint(pid=pid, stop=stop, wait=False)["id"]
    agent.wait_for(lambda: agent.operation(id)["place"])
    found = agent.operation(id)
    await_hit(emulator)
    assert criu_at(Path(found["place"]))
    return found


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("criu_too", [False, True])
def test_a_killed_agent_leaves_no_job_frozen_and_the_next_one_says_what_became_of_it(
    agents: Agents, gpu_generations: Generations, emulator: Emulator, criu_too: bool, stop: bool
) -> None:
    agent, job = agents(), gpu_generations()
    found = begin(agent, emulator, job.pid, stop=stop)
    place = Path(found["place"])
    agent.stop(signal.SIGKILL)
    if criu_too:
        for pid in criu_at(place):
            send(pid, signal.SIGKILL)
    agent.start()
    known = agent.wait_for_state(found["id"], "done", "interrupted")
    # A criu that nobody answers any more whether it may end the job gives up, with all written.
    whole = not criu_too
    assert known["state"] == ("done" if whole and not stop else "interrupted"), known
    assert ("was not ended" in known["note"]) == (whole and stop)
    assert "the agent ended while it was at work" in known["error"] + known["note"]
    assert "runs" in known["note"], known
    task = read_task(job.pid)
    assert task.tracer == 0 and task.state not in "Tt"
    check_memory(job, 0)
    if whole:
        assert gpustasis.open(place).verify().problems == []
    emulator.clear_faults()
    with agent.client() as client:
        assert client.checkpoint(pid=job.pid)["state"] == "done"
    # What failed is removed, what is whole stays.
    assert place.exists() == whole
    reap_workers()


def test_tasks_that_are_only_locked_run_on_when_all_were_killed(
    agents: Agents, gpu_generations: Generations, emulator: Emulator
) -> None:
    """No record of the dump says that they are locked: the driver does, and the agent had written
    down that they ran before."""
    agent, job = agents(), gpu_generations()
    driver = driver_of(agent._environ)
    emulator.add_fault("lock", "delay", delay_ms=int(LOCK_S * 1000))
    with agent.client() as client:
        id = client.checkpoint(pid=job.pid, wait=False)["id"]
    agent.wait_for(lambda: agent.operation(id)["place"])
    place = Path(agent.operation(id)["place"])
    await_hit(emulator)
    stopped = criu_at(place)
    try:
        # criu is stopped while a worker waits for the lock, and does nothing with its answer. Who
        # asks the driver meanwhile is answered after the worker.
        assert stopped
        for pid in stopped:
            send(pid, signal.SIGSTOP)
        wait_for(lambda: all(read_task(pid).state == "T" for pid in stopped))
        wait_for(lambda: driver.get_state(job.pid) is ProcessState.LOCKED)
        assert read_task(job.pid).tracer == 0 and find_begun(job.pid) is None
        stopped = find_users(place, "criu", "ld-linux-x86-64", WORKER_COMM, GUARDIAN_COMM)
        for pid in stopped:  # all of them first, else one would act on another's end
            send(pid, signal.SIGSTOP)
        agent.stop(signal.SIGKILL)  # which ends a criu that is stopped: it was of its session
        for pid in stopped:
            send(pid, signal.SIGKILL)
    finally:
        for pid in stopped:
            send(pid, signal.SIGCONT)
    agent.start()
    found = agent.wait_for_state(id, "interrupted")
    assert "runs again" in found["note"], found
    check_memory(job, 0)
    reap_workers()


def test_stopping_waits_for_what_is_at_work(
    agents: Agents, gpu_generations: Generations, emulator: Emulator
) -> None:
    agent, job = agents(), gpu_generations()
    found = begin(agent, emulator, job.pid, stop=False)
    with agent.client() as client:
        waits = client.checkpoint(pid=job.pid, wait=False)["id"]
    assert agent.stop() == 0
    assert not agent.socket.exists()
    states = {
        one: json.loads((agent.store / "operations" / f"{one}.json").read_text())["state"]
        for one in (found["id"], waits)
    }
    assert states == {found["id"]: "done", waits: "cancelled"}
    check_memory(job, 0)


def test_a_service_tells_systemd(agents: Agents, tmp_path: Path) -> None:
    agent = agents(ready=False)
    agent.close()
    place = agent.place / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(place))
        sock.settimeout(SETTLE_S)
        agent._environ = dict(agent._environ) | {
            "NOTIFY_SOCKET": str(place),
            "WATCHDOG_USEC": "2000000",
        }
        agent.start(ready=False)
        assert sock.recv(100) == b"READY=1"
        begun = time.monotonic()
        assert [sock.recv(100) for _ in range(4)] == [b"WATCHDOG=1"] * 4
        assert time.monotonic() - begun < 4 * 2
        assert agent.stop() == 0
        while (said := sock.recv(100)) == b"WATCHDOG=1":
            pass
        assert said == b"STOPPING=1"


def test_there_is_one_agent_at_a_socket_and_at_a_store(agents: Agents) -> None:
    agent = agents()
    elsewhere = agent.config.with_name("elsewhere.toml")
    elsewhere.write_text(agent.config.read_text().replace("/store", "/elsewhere"))
    for config, words in (
        (agent.config, "another agent uses this store"),
        (elsewhere, "there is an agent at"),
    ):
        asked = ["agent", "run", "--config", str(config), "--json"]
        argv = [sys.executable, "-m", "gpustasis", *asked]
        again = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
        found = check_document(again.stdout, "agent run")["error"]
        assert words in found["message"] and again.returncode == 23
    with agent.client() as client:
        assert client.status()["at_work"] == 0


TARGET = """
[[target]]
name = "train"
pidfile = "{pidfile}"
interval = "1s"
keep_last = 2
max_chain = 2
verify = true
"""


def test_checkpoints_by_the_clock(
    agents: Agents, gpu_generations: Generations, tmp_path: Path
) -> None:
    """Incremental, checked, the last ones kept; a request for the target is one of them."""
    job, pidfile = gpu_generations(), tmp_path / "train.pid"
    agent = agents(TARGET.format(pidfile=pidfile))
    agent.wait_for(lambda: any("cannot read the pid" in line["message"] for line in agent.lines()))
    pidfile.write_text(f"{job.pid}\n")

    def done() -> list[dict[str, Any]]:
        with agent.client() as client:
            return [one for one in client.status()["operations"] if one["state"] == "done"]

    agent.wait_for(lambda: len(done()) >= 2)
    with agent.client() as client:
        asked = client.checkpoint(target="train")
        assert asked["state"] == "done" and asked["origin"] == "request"
        assert client.status()["targets"][0]["next_due"] > asked["ended"]
    agent.wait_for(lambda: len(done()) >= 5)
    pidfile.unlink()
    assert agent.stop() == 0
    agent.start()
    found = done()
    spans = [(one["began"], one["ended"]) for one in found]
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert all(one["figures"]["verified"] for one in found)
    kinds = [one["figures"]["incremental"] for one in found]
    assert kinds[:4] == [False, True, True, False], kinds
    there = [one for one in found if Path(one["place"]).is_dir()]
    assert there[-2:] == found[-2:] and len(there) < len(found)
    for one in there:
        assert gpustasis.open(one["place"]).verify().problems == []
    check_memory(job, 0)


def test_a_target_s_pidfile_of_another_user_is_refused(
    agents: Agents, gpu_generations: Generations, tmp_path: Path
) -> None:
    """Else who may write it could have any process checkpointed."""
    job, pidfile = gpu_generations(), tmp_path / "train.pid"
    pidfile.write_text(str(job.pid))
    os.chown(pidfile, 65534, 65534)
    agent = agents(TARGET.format(pidfile=pidfile))
    refused = [f"{pidfile} is refused: it belongs to user 65534"]
    agent.wait_for(lambda: any(refused[0] in line["message"] for line in agent.lines()))
    with agent.client() as client:
        assert client.status()["operations"] == []


def test_metrics_and_health(agents: Agents, request: pytest.FixtureRequest) -> None:
    held = hold_port()
    request.addfinalizer(held.close)
    port = port_of(held)
    agent = agents(f"http_port = {port}\n")
    assert agent.get("/healthz")[0] == 200
    assert json.loads(agent.get("/healthz")[1])["healthy"] is True
    assert agent.get("/nothing")[0] == 404
    assert agent.metric("gpustasis_agent_waiting") == 0
    assert say(agent.http, b"POST /metrics HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 405 ")
    assert say(agent.http, b"nonsense\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    head = b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 12000 + b"\r\n\r\n"
    assert say(agent.http, head).startswith(b"HTTP/1.1 400 ")
    with socket.create_connection(("127.0.0.1", port), timeout=30) as tcp:
        tcp.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        found = b""
        while piece := tcp.recv(1 << 16):
            found += piece
    assert b"gpustasis_checkpoint_operations_total{" in found
    slow = [socket.socket(socket.AF_UNIX) for _ in range(40)]
    try:
        for one in slow:
            one.connect(str(agent.http))
        with agent.client() as client:
            client.status()
        wait_for(lambda: say(agent.http, b"GET /healthz HTTP/1.1\r\n\r\n"))
    finally:
        for one in slow:
            one.close()


def test_an_agent_without_room_is_not_healthy(agents: Agents) -> None:
    agent = agents('disk_reserve = "900T"\n')
    agent.wait_for(lambda: agent.get("/healthz")[0] == 503)
    assert "disk_reserve is more" in json.loads(agent.get("/healthz")[1])["wrong"]


def test_the_store_for_jobs_on_this_host(agents: Agents) -> None:
    agent = agents()
    key, place = "/gpustasis/jobs/x/newest", agent.place / "jobs.sock"
    store = Local(place, ANSWER_S)
    store.write([], [Put(key, "7", 0)])
    store.close()
    agent.stop(signal.SIGKILL)
    agent.start()
    store = Local(place, ANSWER_S)
    assert store.read(key).entries[key].value == "7"
    store.close()


def test_a_pidfile_that_does_not_answer_does_not_stop_the_watchdog_s_beat(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As one in a file system that nobody serves: whoever looks there waits."""
    config = Config(store=tmp_path / "store", socket=tmp_path / "s", http_socket=None)
    journal = Journal(config.store / "operations")
    agent = daemon._Agent(config, journal)
    answered, asked = threading.Event(), threading.Event()
    monkeypatch.setattr(agent._periodic, "submit_due", lambda _: (asked.set(), answered.wait()))
    monkeypatch.setattr(daemon, "_LOOK_S", 0.1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "n"))
        sock.settimeout(SETTLE_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "n"))
        monkeypatch.setenv("WATCHDOG_USEC", "100000")

        async def until_beaten() -> None:
            stop = asyncio.Event()
            running = asyncio.ensure_future(agent._until(stop))
            assert await asyncio.to_thread(asked.wait, SETTLE_S)
            for _ in range(4):
                assert await asyncio.to_thread(sock.recv, 100) == b"WATCHDOG=1"
            assert "has not answered" in agent._http.wrong
            stop.set()
            await running

        try:
            asyncio.run(until_beaten())
        finally:
            answered.set()
            journal.close()
