# SPDX-License-Identifier: Apache-2.0
"""Four ranks that are real: CRIU, emulated GPUs, TCP between network namespaces, and etcd."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpustasis.emulator import Emulator
from gpustasis.errors import JobError
from gpustasis.jobs.gate import Gate
from gpustasis.jobs.server import Server
from gpustasis.task import read_task
from support.etcd import EtcdCluster
from support.json_output import check_document
from support.ring import WORLD, Network, Ring, ring_of

PROGRAMS = Path(__file__).resolve().parent.parent / "programs"


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    network = Network()
    yield network
    network.close()


@pytest.fixture(scope="module")
def store(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    cluster = EtcdCluster(tmp_path_factory.mktemp("etcd"), host=network.host)
    try:
        cluster.wait()
        yield ["--store", cluster.endpoints[0]]
    finally:
        cluster.close()


@pytest.fixture
def ring(
    network: Network,
    store: list[str],
    compile_cuda: Callable[..., Path],
    emulator_environ: dict[str, str],
    tmp_path: Path,
) -> Iterator[Ring]:
    program = compile_cuda(PROGRAMS / "ring_rank.c")
    with ring_of(tmp_path, network, program, emulator_environ, store) as ring:
        ring.name = f"ring-{tmp_path.name}"
        yield ring


def assert_ended(statuses: list[int]) -> None:
    """By the signal; or, status 1, because a neighbour's end was seen before."""
    by_signal = 128 + signal.SIGTERM
    assert by_signal in statuses
    assert set(statuses) <= {by_signal, 1}


def test_a_job_is_checkpointed_killed_and_restored(ring: Ring) -> None:
    ring.start_all()
    ring.wait(lambda: min(ring.steps_now()) > 100)

    left = ring.job("checkpoint", "--world", str(WORLD), "--leave-running", "--json")
    assert left.returncode == 0, left.stderr + ring.logs()
    assert check_document(left.stdout, "job checkpoint")["state"] == "committed"
    ring.wait_for_progress()

    made = ring.job("checkpoint")
    assert made.returncode == 0, made.stderr + ring.logs()
    assert ring.ends() == [0] * WORLD
    assert ring.pids() == []
    assert ring.locked() == []

    ring.start_restoring()
    back = ring.job("restore", "--json")
    assert back.returncode == 0, back.stderr + ring.logs()
    assert check_document(back.stdout, "job restore")["restores"] == 2
    ring.wait_for_progress()
    assert ring.locked() == []
    assert_ended(ring.end())


def test_a_rank_whose_dump_fails_lets_all_run_on(ring: Ring, emulator: Emulator) -> None:
    ring.start_all()
    ring.wait(lambda: min(ring.steps_now()) > 100)
    emulator.add_fault("checkpoint", "error", code=999, count=1)
    made = ring.job("checkpoint", "--world", str(WORLD))
    assert made.returncode == JobError.exit_code, made.stderr
    assert "was aborted: criu" in made.stderr
    ring.wait_for_progress()
    assert ring.locked() == []
    assert list(ring.directory.glob("kept/rank-*/epoch-*")) == []

    again = ring.job("checkpoint", "--leave-running")  # nothing of it is left in the way
    assert again.returncode == 0, again.stderr + ring.logs()
    ring.wait_for_progress()
    listed = check_document(ring.job("list", "--json").stdout, "job list")["epochs"]
    assert [one["state"] for one in listed] == ["aborted", "committed"]


def test_a_rank_that_says_no_is_not_locked(ring: Ring) -> None:
    (ring.directory / "kept/rank-2/epoch-00000001").mkdir(parents=True)
    ring.start_all()
    ring.wait(lambda: min(ring.steps_now()) > 100)
    made = ring.job("checkpoint", "--world", str(WORLD))
    assert made.returncode == JobError.exit_code, made.stderr
    assert "aborted: rank 2: " in made.stderr
    assert "exists: a job of this name has left it there" in made.stderr
    assert not any("lock-cuda" in ring.log_whole(rank) for rank in range(WORLD))
    assert (ring.directory / "kept/rank-2/epoch-00000001").is_dir()  # it is none of ours
    ring.wait_for_progress()


def slow_down_rank_1(ring: Ring, emulator: Emulator) -> None:
    emulator.add_fault("checkpoint", "delay", delay_ms=3000, pid=ring.program_of(1))


def stop_rank_1(ring: Ring) -> None:
    """Its keeper, while its criu is at work; rank 2 has dumped then, and waits."""
    ring.wait(lambda: "acting dump" in ring.log_whole(1))
    ring.signal(1, signal.SIGSTOP)
    ring.wait(Gate(ring.directory / "run" / ring.name / "2", Path("/none")).is_held)
    ring.wait(lambda: "is waiting" in ring.log_whole(2).partition("acting dump")[2])


def test_the_next_keeper_finds_the_tasks_as_they_were_left(ring: Ring, emulator: Emulator) -> None:
    ring.ttl = 30  # rank 1 keeps its lease while it is stopped
    ring.start_all()
    ring.wait(lambda: min(ring.steps_now()) > 100)
    slow_down_rank_1(ring, emulator)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(ring.job, "checkpoint", "--world", str(WORLD), "--leave-running")
        stop_rank_1(ring)
        gate = Gate(ring.directory / "run" / ring.name / "2", Path("/none"))
        ring.signal(2, signal.SIGKILL)
        ring.wait(lambda: ring.status(2) is not None)
        stands = ring.step(2)
        time.sleep(0.5)
        assert gate.is_held()
        assert ring.step(2) == stands
        ring.start(2, command=False)
        ring.signal(1, signal.SIGCONT)
        done = asked.result()
    listed = check_document(ring.job("list", "--json").stdout, "job list")["epochs"]
    assert listed[0]["state"] == ("committed" if done.returncode == 0 else "aborted"), done.stderr
    ring.wait_for_progress()
    assert ring.locked() == []
    assert not gate.is_held()
    again = ring.job("checkpoint")
    assert again.returncode == 0, again.stderr + ring.logs()
    assert ring.ends() == [0] * WORLD


def test_one_host_needs_no_etcd(ring: Ring, journal: Path) -> None:
    """The same with the store for one host. A rank that ends is reported with its own status."""
    server = Server(ring.directory / "store", journal)
    try:
        ring.store = ["--store", str(ring.directory / "store")]
        ring.start_all("--json")
        ring.wait(lambda: min(ring.steps_now()) > 100)
        left = ring.job("checkpoint", "--world", str(WORLD), "--leave-running")
        assert left.returncode == 0, left.stderr + ring.logs()
        ring.wait_for_progress()
        statuses = ring.end()
        assert_ended(statuses)
        document = ring.log(0)[ring.log(0).rindex("\n{") :]
        found = check_document(document, "job run")
        assert (found["rank"], found["status"], found["epoch"]) == (0, statuses[0], None)
    finally:
        server.close()


def test_a_job_without_keepers_is_not_checkpointed(ring: Ring) -> None:
    made = ring.job("checkpoint", "--world", str(WORLD), "--look-limit", "1")
    assert made.returncode == JobError.exit_code
    assert "4 ranks not joined within 1 s: 0, 1, 2, 3" in made.stderr
    unknown = ring.job("restore")
    assert unknown.returncode == JobError.exit_code
    assert "no epoch is a whole checkpoint" in unknown.stderr


def test_a_criu_that_dies_before_the_decision_aborts_the_epoch(
    ring: Ring, emulator: Emulator
) -> None:
    """Its rank has run on meanwhile; with a connection it may not come far (docs/jobs.md)."""
    ring.ttl = 30  # as above
    ring.start_all()
    ring.wait(lambda: min(ring.steps_now()) > 100)
    slow_down_rank_1(ring, emulator)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(ring.job, "checkpoint", "--world", str(WORLD))
        stop_rank_1(ring)
        place = ring.directory / "run" / ring.name / "2"
        criu = read_task(json.loads((place / "state.json").read_text())["pid"]).tracer
        os.kill(criu, signal.SIGKILL)
        ring.wait(lambda: "acting release" in ring.log(2))
        ring.signal(1, signal.SIGCONT)
        done = asked.result()
    assert done.returncode == JobError.exit_code, done.stderr
    assert "rank 2: criu has ended before anything was decided" in done.stderr
    ring.wait(lambda: ring.locked() == [])
    assert not Gate(place, Path("/none")).is_held()
    assert not (ring.directory / "kept/rank-0/epoch-00000001").exists()
