# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of processes that an agent is asked for, with real CRIU and emulated GPUs."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

import gpustasis
from gpustasis.agent.client import Client
from gpustasis.agent.config import Config, Target
from gpustasis.agent.operations import Operation
from gpustasis.agent.subjects import Subject
from gpustasis.agent.work import Work
from gpustasis.emulator import Emulator
from gpustasis.errors import AgentError
from gpustasis.task import read_task
from support.agent import Agent, ask
from support.criu_roots import newest_criu
from support.faults import await_hit
from support.job import Job, check_memory
from support.json_output import check_document
from support.pids import sleep_as

Agents = Callable[..., Agent]
Generations = Callable[..., Job]
_PTRACE_SEIZE = 0x4206  # linux/ptrace.h
COUNTER = "import time\nprint('ready', flush=True)\nwhile True: time.sleep(0.01)"


@pytest.fixture
def plain_job(launch: Callable[..., Job]) -> Callable[[], Job]:
    """A process without CUDA."""

    def start() -> Job:
        job = launch([sys.executable, "-c", COUNTER])
        job.wait_for("ready")
        return job

    return start


def test_a_job_s_life(
    agents: Agents, gpu_generations: Generations, gpustasis: Callable[..., CompletedProcess[str]]
) -> None:
    """With the commands: left running, then ended, then restored."""
    agent, job = agents(), gpu_generations()
    words = ("--socket", agent.socket, "--json")
    said = gpustasis("agent", "checkpoint", str(job.pid), *words)
    first = check_document(said.stdout, "agent checkpoint")["operation"]
    assert first["state"] == "done", first
    figures = first["figures"]
    assert figures["gpu_bytes"] >= 8 << 20 and figures["emulated"]
    assert figures["size_bytes"] >= figures["gpu_bytes"] > figures["stored_bytes"] > 0
    assert 0 < figures["downtime_s"] <= figures["duration_s"]
    check_memory(job, 0)
    said = gpustasis("agent", "checkpoint", str(job.pid), "--stop", *words)
    second = check_document(said.stdout, "agent checkpoint")["operation"]
    assert second["state"] == "done", second
    assert job.wait() == -signal.SIGKILL
    status = check_document(gpustasis("agent", "status", *words).stdout, "agent status")
    assert [one["id"] for one in status["operations"]] == [first["id"], second["id"]]
    assert agent.metric('gpustasis_checkpoint_duration_seconds_count{target=""}') == 2
    done = 'gpustasis_checkpoint_operations_total{operation="checkpoint",result="done"}'
    assert agent.metric(done) == 2
    assert (
        agent.metric('gpustasis_checkpoint_last_success_timestamp_seconds{target=""}')
        == (second["ended"])
    )
    over = gpustasis("agent", "cancel", first["id"], *words)
    assert check_document(over.stdout, "agent cancel")["error"]["code"] == over.returncode == 23
    assert agent.stop() == 0
    gone = gpustasis("agent", "status", *words)
    assert check_document(gone.stdout, "agent status")["error"]["code"] == 23
    restored = gpustasis("restore", "-D", second["place"], "--criu", criu_of(agent))
    assert restored.returncode == 0, restored.stderr
    check_memory(job, 0)


def criu_of(agent: Agent) -> str:
    line = next(one for one in agent.config.read_text().splitlines() if one.startswith("criu"))
    return str(json.loads(line.partition(" = ")[2]))


def test_only_the_last_are_kept_and_all_are_whole(
    agents: Agents, plain_job: Callable[[], Job]
) -> None:
    agent, job = agents("keep_last = 2\n"), plain_job()
    with agent.client() as client:
        places = [Path(client.checkpoint(pid=job.pid)["place"]) for _ in range(4)]
    assert [place.is_dir() for place in places] == [False, False, True, True]
    for place in places[2:]:
        assert gpustasis.open(place).verify().problems == []


def test_one_that_fails_removes_no_good_one(agents: Agents, plain_job: Callable[[], Job]) -> None:
    agent, job = agents("keep_last = 1\n"), plain_job()
    with agent.client() as client:
        good = client.checkpoint(pid=job.pid)
        failed = checkpoint_of_a_traced(job, client)
        assert failed["state"] == "failed" and "criu" in failed["error"], failed
        # Its log is named by the error. The rest would fill the disk, and one log is enough.
        (left,) = Path(failed["place"]).iterdir()
        assert left.name == "dump.log" and str(left) in failed["error"]
        second = checkpoint_of_a_traced(job, client)
        assert not Path(failed["place"]).exists() and Path(second["place"]).exists()
        assert gpustasis.open(good["place"]).verify().problems == []
        again = client.checkpoint(pid=job.pid)
    assert again["state"] == "done", again
    assert not Path(good["place"]).exists() and not Path(second["place"]).exists()
    assert job.alive()


def checkpoint_of_a_traced(job: Job, client: Client) -> dict[str, Any]:
    """It fails: another program traces the process."""
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).ptrace(_PTRACE_SEIZE, job.pid, 0, 0)
        time.sleep(60)
        os._exit(0)
    try:
        deadline = time.monotonic() + 10
        while read_task(job.pid).tracer != pid:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        found: dict[str, Any] = client.checkpoint(pid=job.pid)
        return found
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_damaged_one_does_not_count(plain_job: Callable[[], Job], tmp_path: Path) -> None:
    """It would be kept in place of a good one."""
    job, images = plain_job(), tmp_path / "images"
    criu = newest_criu()
    place = str(criu.root or criu.program)
    gpustasis.checkpoint(job.pid, images, leave_running=True, layout="packed", criu=place)
    target = Target(name="job", pidfile=tmp_path / "pid", verify=True)
    operation = Operation(subject=Subject(pid=job.pid), uid=0)
    work = Work(operation, Config(), target)
    assert work._verify(images)
    pack = images / "gpustasis-files.img"
    with pack.open("r+b") as file:
        file.seek(pack.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    operation.stop = True
    with pytest.raises(AgentError, match=r"is damaged: .*it was left there"):
        work._verify(images)
    operation.stop = False
    with pytest.raises(AgentError, match=r"is damaged: .*it was removed"):
        work._verify(images)
    assert not images.exists()


def test_one_tree_is_never_dumped_twice_at_once(
    agents: Agents, gpu_generations: Generations, emulator: Emulator
) -> None:
    """Of six requests for two jobs, four at work at once: those of one job one after the other, the
    two jobs beside each other."""
    agent = agents("concurrency = 4\n")
    jobs = [gpu_generations(), gpu_generations()]
    emulator.set("delay_ms", "50")
    # The first one's, so that it is at work however late the second is asked for.
    emulator.add_fault("checkpoint", "delay", delay_ms=6000, pid=jobs[0].pid)
    with agent.client() as client:
        asked = [
            client.checkpoint(pid=jobs[number % 2].pid, wait=False)["id"] for number in range(6)
        ]
        done = [client.show(one, wait=True) for one in asked]
    assert [one["state"] for one in done] == ["done"] * 6, done
    for job in jobs:
        spans = [(one["began"], one["ended"]) for one in done if one["subject"]["pid"] == job.pid]
        assert len(spans) == 3
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
        check_memory(job, 0)
    first, second = done[0], done[1]
    assert second["began"] < first["ended"], "the two jobs have waited for each other"


def test_a_child_s_tree_waits_for_its_parent_s(agents: Agents, launch: Callable[..., Job]) -> None:
    """The child is in the tree of the parent: both at once would be two dumps of one tree."""
    code = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {COUNTER!r}]).wait()"
    agent, job = agents("concurrency = 2\n"), launch([sys.executable, "-c", code])
    job.wait_for("ready")
    child = int(Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text())
    with agent.client() as client:
        ids = [client.checkpoint(pid=pid, wait=False)["id"] for pid in (job.pid, child)]
        parent, of_child = (client.show(one, wait=True) for one in ids)
    assert parent["state"] == of_child["state"] == "done", (parent, of_child)
    assert parent["ended"] <= of_child["began"]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ('memory_reserve = "900T"\n', "of memory"),
        ('disk_reserve = "900T"\n', "are free beyond disk_reserve"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_figure(
    agents: Agents, gpu_generations: Generations, lines: str, said: str
) -> None:
    agent, job = agents(lines), gpu_generations()
    with agent.client() as client:
        refused = client.checkpoint(pid=job.pid)
    assert refused["state"] == "refused"
    assert said in refused["error"] and "MiB" in refused["error"]
    assert refused["place"] == "" and not (agent.store / "users").exists()
    check_memory(job, 0)


def test_a_client_that_goes_away_breaks_nothing(
    agents: Agents, gpu_generations: Generations, emulator: Emulator
) -> None:
    agent, job = agents(), gpu_generations()
    emulator.add_fault("checkpoint", "delay", delay_ms=6000)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(agent.socket))
        request = {"version": 1, "do": "checkpoint", "pid": job.pid, "wait": True}
        sock.sendall(json.dumps(request).encode() + b"\n")
        agent.wait_for(lambda: any(one["message"] == "operation begun" for one in agent.lines()))
        await_hit(emulator)
    with agent.client() as client:
        (asked,) = client.status()["operations"]
        assert asked["state"] == "running"
        done = client.show(asked["id"], wait=True)
    assert done["state"] == "done", done
    assert gpustasis.open(done["place"]).verify().problems == []
    check_memory(job, 0)


def test_cancelling(agents: Agents, gpu_generations: Generations, emulator: Emulator) -> None:
    """One that waits; one that is to end its job and is at work; not one that leaves it running."""
    agent, job = agents(), gpu_generations()
    emulator.add_fault("checkpoint", "delay", delay_ms=6000)
    with agent.client() as client:
        first = client.checkpoint(pid=job.pid, wait=False)["id"]
        waiting = client.checkpoint(pid=job.pid, wait=False)["id"]
        agent.wait_for_state(first, "running")
        await_hit(emulator)
        with pytest.raises(AgentError, match="ends by itself"):
            client.cancel(first)
        assert "had not begun" in client.cancel(waiting)["done"]
        assert client.show(waiting)["state"] == "cancelled"
        assert client.show(first, wait=True)["state"] == "done"
        emulator.add_fault("checkpoint", "delay", delay_ms=6000)
        ending = client.checkpoint(pid=job.pid, stop=True, wait=False)["id"]
        agent.wait_for_state(ending, "running")
        await_hit(emulator)
        assert "let the job run on" in client.cancel(ending)["done"]
        found = client.show(ending, wait=True)
    assert found["state"] == "failed"
    assert "it was cancelled; the job runs on: all 1 of its processes" in found["error"]
    check_memory(job, 0)


def test_the_queue_has_an_end(
    agents: Agents, gpu_generations: Generations, emulator: Emulator
) -> None:
    agent, job = agents("queue = 2\n"), gpu_generations()
    emulator.add_fault("checkpoint", "delay", delay_ms=6000)
    with agent.client() as client:
        first = client.checkpoint(pid=job.pid, wait=False)["id"]
        agent.wait_for_state(first, "running")
        last = [client.checkpoint(pid=job.pid, wait=False)["id"] for _ in range(2)][-1]
        with pytest.raises(AgentError, match="the queue is full: 2 wait already"):
            client.checkpoint(pid=job.pid)
        assert client.show(last, wait=True)["state"] == "done"


def test_the_agent_does_not_freeze_itself(agents: Agents) -> None:
    """Nobody would be left to let it go."""
    agent = agents()
    assert agent.process is not None
    for pid in (agent.process.pid, os.getpid()):
        (refused,) = ask(agent.socket, {"do": "checkpoint", "pid": pid, "wait": True})
        assert "it cannot checkpoint itself" in refused["error"]["message"]


def test_another_process_is_not_taken_for_the_one_that_was_meant(
    agents: Agents, plain_job: Callable[[], Job]
) -> None:
    """What a client has looked at, and what has the pid when the agent looks."""
    agent, job = agents(), plain_job()
    start = read_task(job.pid).start_time
    request = {"do": "checkpoint", "pid": job.pid, "start_time": start - 1, "wait": True}
    (refused,) = ask(agent.socket, request)
    assert "is another one than was meant" in refused["error"]["message"]


@contextmanager
def started_as(pid: int) -> Iterator[None]:
    """A process that sleeps, with that pid."""
    sleep_as(pid)
    try:
        yield
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "it was ended"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_pid_that_got_free_in_the_queue_is_nobody_s(
    agents: Agents, gpu_generations: Generations, emulator: Emulator, plain_job: Callable[[], Job]
) -> None:
    """The process ends while its request waits, and another one gets its pid."""
    agent, slow, job = agents(), gpu_generations(), plain_job()
    emulator.add_fault("checkpoint", "delay", delay_ms=6000)
    with agent.client() as client:
        first = client.checkpoint(pid=slow.pid, wait=False)["id"]
        waits = client.checkpoint(pid=job.pid, wait=False)["id"]
        agent.wait_for_state(first, "running")
        await_hit(emulator)
        job.signal(signal.SIGKILL)
        job.wait()
        with started_as(job.pid):
            found = client.show(waits, wait=True)
            assert found["state"] == "failed" and "has ended" in found["error"], found
            assert not Path(found["place"]).exists()
            assert read_task(job.pid).tracer == 0
