# SPDX-License-Identifier: Apache-2.0
"""Podman's containers that are ranks of a job: all are in a checkpoint, or all run on. Engines,
CRIU and its action scripts are real."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpustasis.criu.plugin import rank_script
from support.container_ranks import (
    Asking,
    EtcdIn,
    Hold,
    Node,
    ask_all,
    log_of,
    log_of_agent,
    log_path,
    rank_annotations,
    root_of,
    tables,
)
from support.engine_gpu import Steady, SteadyContainer, start_podman
from support.engine_image import IMAGE
from support.engine_root import EngineRoot

PROGRAMS = Path(__file__).resolve().parent.parent / "programs"
RUNTIMES = ["runc", "crun"]
LOOK_S = 30
ALONE_S = 15  # where one waits in vain
# Each step that does not wait for others: the median of so many, in a moment that is quiet enough.
TIMED = """
import json, os, statistics, subprocess, sys, time, timeit
script, root = sys.argv[1:]
found, end = {}, time.monotonic() + 60
for name, action, pid in (
    ("no step of ours", "network-lock", root),
    ("no rank", "pre-dump", str(os.getpid())),
    ("a rank", "pre-dump", root),
):
    environ = {"CRTOOLS_SCRIPT_ACTION": action, "CRTOOLS_INIT_PID": pid}
    run = lambda: subprocess.run([script], env=environ, capture_output=True)
    found[name] = 60.0
    while found[name] > 0.030 and time.monotonic() < end:
        found[name] = statistics.median(timeit.repeat(run, number=1, repeat=41))
print(json.dumps(found))
"""
STORE = ("--store", "/run/gpustasis/jobs.sock")


@pytest.fixture
def node(engines: EngineRoot, request: pytest.FixtureRequest) -> Iterator[Node]:
    url = start_podman(engines, "runc")
    made = Node(engines, "node", getattr(request, "param", LOOK_S), f'podman = "{url}"\n')
    made.start_agent()
    yield made
    made.close()


alone = pytest.mark.parametrize("node", [ALONE_S], indirect=True)


def start(steady: Steady, job: str, runtime: str = "runc", world: int = 2) -> list[SteadyContainer]:
    return [
        steady(f"{job}-{rank}", runtime, *rank_annotations(job, rank, world), mib=8, seed=rank + 3)
        for rank in range(world)
    ]


def epochs_of(node: Node, job: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = node.job("list", job)["epochs"]
    return found


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_all_are_in_it(engines: EngineRoot, node: Node, steady: Steady, runtime: str) -> None:
    job = f"all-{runtime}"
    ranks = start(steady, job, runtime)
    for done in ask_all(ranks, "checkpoint", "--leave-running"):
        assert done.returncode == 0, done.stderr
    for one in ranks:
        one.run_on()
        report = engines.path(one.images()) / "gpustasis-dump.json"
        (task,) = json.loads(report.read_text())["tasks"]
        assert task["state_before"] == "locked"  # before any criu has begun
    for done in ask_all(ranks, "checkpoint"):
        assert done.returncode == 0, done.stderr
    assert [one.state() for one in ranks] == ["exited"] * 2
    for done in ask_all(ranks, "restore"):
        assert done.returncode == 0, done.stderr
    for one in ranks:
        one.run_on()  # every byte is compared with what it should be
    states = [(one["kind"], one["state"]) for one in epochs_of(node, job)]
    assert states == [("checkpoint", "committed")] * 2 + [("restore", "committed")]


@pytest.mark.parametrize("runtime", RUNTIMES)
@alone
def test_one_alone_is_not_checkpointed(node: Node, steady: Steady, runtime: str) -> None:
    job = f"alone-{runtime}"
    ranks = start(steady, job, runtime)
    begin = time.monotonic()
    done = ask_all(ranks[:1], "checkpoint")[0]
    assert done.returncode != 0
    assert time.monotonic() - begin >= ALONE_S
    assert f"gpustasis: job {job}, rank 0: epoch 1 is aborted: phase look took too" in log_of(
        ranks[0]
    )
    for one in ranks:
        one.run_on()
    for done in ask_all(ranks, "checkpoint", "--leave-running"):  # nothing is left of it
        assert done.returncode == 0, done.stderr
    for one in ranks:
        one.run_on()


def test_without_an_agent_there_is_no_checkpoint(node: Node, steady: Steady) -> None:
    ranks = start(steady, "orphans")
    node.kill_agent()
    for one, done in zip(ranks, ask_all(ranks, "checkpoint"), strict=True):
        assert done.returncode != 0
        said = log_of(one)
        assert "gpustasis: job orphans, rank " in said and "start gpustasis-agent" in said
        one.run_on()


def test_others_are_not_asked(node: Node, steady: Steady) -> None:
    """Whether or not there is an agent."""
    node.kill_agent()
    container = steady("no-rank", "runc", mib=4)
    assert ask_all([container], "checkpoint")[0].returncode == 0
    assert ask_all([container], "restore")[0].returncode == 0
    container.run_on()


def test_a_killed_script_is_a_no(node: Node, steady: Steady) -> None:
    ranks = start(steady, "script")
    asked = Asking(ranks[0].root, "podman", "container", "checkpoint", ranks[0].name)
    node.wait_for(lambda: node.pids("rank-script"))
    for pid in node.pids("rank-script"):
        node.root.run("kill", "-KILL", str(pid))
    assert asked.ended().returncode != 0
    for one in ranks:
        one.run_on()


@alone
def test_one_alone_is_not_restored(node: Node, steady: Steady) -> None:
    ranks = start(steady, "back")
    for done in ask_all(ranks, "checkpoint", "--keep"):
        assert done.returncode == 0, done.stderr
    assert ask_all(ranks[:1], "restore", "--keep")[0].returncode != 0
    assert ranks[0].state() != "running"
    for done in ask_all(ranks, "restore", "--keep"):
        assert done.returncode == 0, done.stderr
    for one in ranks:
        one.run_on()


@pytest.mark.parametrize("runtime", RUNTIMES)
@alone
def test_one_that_has_ended_by_itself_is_not_restored_alone(
    node: Node, steady: Steady, runtime: str
) -> None:
    """Not by crun either, which runs no hook at a restore that could tell again what it is."""
    ranks = start(steady, f"ended-{runtime}", runtime)
    for done in ask_all(ranks, "checkpoint", "-R", "--keep"):
        assert done.returncode == 0, done.stderr
    node.root.run("podman", "kill", ranks[0].name)
    node.wait_for(lambda: ranks[0].state() == "exited")
    assert ask_all(ranks[:1], "restore", "--keep")[0].returncode != 0
    assert ranks[0].state() != "running"
    ranks[1].run_on()


def test_a_second_call_is_not_taken_for_the_first(node: Node, steady: Steady) -> None:
    """The first one's criu has waited for the other rank, and was killed; its epoch goes on."""
    ranks = start(steady, "twice")
    words = ("podman", "container", "checkpoint", "-R")
    asked = Asking(node.root, *words, ranks[0].name)
    node.wait_for(lambda: "job twice, epoch 1, rank 0 is waiting" in log_of_agent(node))
    for script in node.pids("rank-script"):
        node.kill_parent(script)
    assert asked.ended().returncode != 0
    node.wait_for(lambda: not node.pids("rank-script"))
    again = []
    for one in ranks:  # in time for that epoch, or for another one
        again.append(Asking(node.root, *words, one.name))
        node.wait_for(lambda: node.pids("rank-script"))
    assert all(one.ended().returncode >= 0 for one in again), "one has not ended"
    for one in ranks:
        one.run_on()
    for done in ask_all(ranks, "checkpoint", "-R"):
        assert done.returncode == 0, done.stderr


def test_a_container_in_a_pod_is_a_rank(node: Node, steady: Steady) -> None:
    """Its cgroup is below that of the pod, which has an id as well."""
    node.root.run("podman", "pod", "create", "--infra=false", "--name", "pod")
    try:
        words = rank_annotations("in-pod", 0, 1)
        container = steady("in-pod", "runc", "--pod", "pod", *words, mib=4)
        node.kill_agent()
        assert ask_all([container], "checkpoint", "-R")[0].returncode != 0
        assert "gpustasis: job in-pod, rank 0: " in log_of(container)
        node.start_agent()
        assert ask_all([container], "checkpoint", "-R")[0].returncode == 0
        container.run_on()
        container.remove()
    finally:
        node.root.run("podman", "pod", "rm", "--force", "--time", "0", "pod")


def test_a_rank_that_is_lost_in_a_restore_takes_the_others_with_it(
    node: Node, steady: Steady
) -> None:
    """One is complete and stands, at a step whose failure CRIU does not heed."""
    ranks = start(steady, "lost")
    for done in ask_all(ranks, "checkpoint", "--keep"):
        assert done.returncode == 0, done.stderr
    before = ranks[0].output()
    hold = Hold(node, ranks[1], "pre-resume")
    asked = [
        Asking(one.root, "podman", "container", "restore", "--keep", one.name) for one in ranks
    ]
    node.wait_for(hold.is_reached)
    node.wait_for(lambda: node.pids("rank-script"))
    hold.kill_criu()
    assert all(one.ended().returncode != 0 for one in asked)
    assert ranks[0].output() == before
    for done in ask_all(ranks, "restore", "--keep"):
        assert done.returncode == 0, done.stderr
    for one in ranks:
        one.run_on()


def test_the_whole_job_is_asked_for(node: Node, steady: Steady) -> None:
    """Nobody speaks to an engine but the agent."""
    ranks = start(steady, "whole")
    node.root.run("gpustasis", "job", "checkpoint", "whole", "--world", "2", "-R", *STORE)
    for one in ranks:
        one.run_on()
    node.root.run("gpustasis", "job", "checkpoint", "whole", *STORE)
    assert [one.state() for one in ranks] == ["exited"] * 2
    for done in ask_all(ranks, "restore", "--tcp-established"):
        assert done.returncode == 0, done.stderr
    for one in ranks:
        one.run_on()


def test_connections_are_locked_and_live_on(
    engines: EngineRoot, node: Node, shared: Path, compile_c: Callable[..., Path]
) -> None:
    """In the network namespace of each container, from before the first dump to the decision."""
    program = shared / "tcp_counter"
    shutil.copy(compile_c(PROGRAMS / "tcp_counter.c"), program)
    names = ["net-0", "net-1"]
    ranks = [SteadyContainer(engines, name) for name in names]
    try:
        for rank, name in enumerate(names):
            engines.run(
                *("podman", "run", "--detach", "--name", name, "--network", "none"),
                *("--volume", f"/mnt/shared/{program.name}:/bin/tcp_counter"),
                *(*rank_annotations("net", rank), IMAGE, "/bin/tcp_counter"),
            )
        for one in ranks:
            wait_for_words(node, one, 5)
        pids = [root_of(one) for one in ranks]  # later Podman waits for its checkpoints
        hold = Hold(node, ranks[1])
        words = ("podman", "container", "checkpoint", "-R", "--tcp-established")
        asked = [Asking(engines, *words, name) for name in names]
        node.wait_for(hold.is_reached)
        held = [tables(engines, pid) for pid in pids]
        hold.release()
        assert all("table inet gpustasis_" in found for found in held), held
        for done in [one.ended() for one in asked]:
            assert done.returncode == 0, done.stderr
        for one in ranks:
            wait_for_words(node, one, len(one.output().split()) + 5)
            said = one.output().split()
            assert said == [str(number + 1) for number in range(len(said))]
        assert not any("gpustasis" in tables(engines, pid) for pid in pids)
    finally:
        for one in ranks:
            one.remove()


def wait_for_words(node: Node, container: SteadyContainer, count: int) -> None:
    """Until it has said so many."""

    def has_said() -> bool:
        assert container.state() == "running", container.output()
        return len(container.output().split()) > count

    node.wait_for(has_said)


def begin_held(node: Node, ranks: list[SteadyContainer]) -> tuple[Hold, list[Asking]]:
    """Both are being checkpointed. The first is dumped and has said so; the second is just not."""
    hold, log = Hold(node, ranks[1]), log_path(ranks[0])
    asked = [Asking(one.root, "podman", "container", "checkpoint", "-R", one.name) for one in ranks]
    node.wait_for(hold.is_reached)
    node.wait_for(lambda: log.exists() and "Running post-dump scripts" in log.read_text())
    node.wait_for(lambda: node.pids("rank-script"))
    return hold, asked


def assert_none_is_in_it(ranks: list[SteadyContainer], asked: list[Asking]) -> None:
    assert all(one.ended().returncode != 0 for one in asked)
    for one in ranks:
        one.run_on()


def assert_they_stand(node: Node, rank: SteadyContainer, before: int) -> None:
    """Both scripts wait, and the rank has not gone on since it had taken so many steps."""
    node.wait_for(lambda: len(node.pids("rank-script")) == 2)
    time.sleep(1)
    assert len(node.pids("rank-script")) == 2
    assert rank.steps() == before


def test_a_killed_agent_is_waited_for(node: Node, steady: Steady) -> None:
    """By a script whose tasks stand: what is decided about them, the next agent knows."""
    ranks = start(steady, "agent")
    hold, asked = begin_held(node, ranks)
    before = ranks[0].steps()
    node.kill_agent()
    hold.release()
    assert_they_stand(node, ranks[0], before)
    node.start_agent()
    assert_none_is_in_it(ranks, asked)
    for done in ask_all(ranks, "checkpoint", "-R"):
        assert done.returncode == 0, done.stderr


def test_a_killed_script_of_a_dumped_rank_aborts(node: Node, steady: Steady) -> None:
    ranks = start(steady, "gone")
    hold, asked = begin_held(node, ranks)
    for pid in node.pids("rank-script"):
        node.root.run("kill", "-KILL", str(pid))
    ranks[0].run_on()
    hold.release()
    assert_none_is_in_it(ranks, asked)


def test_a_killed_criu_aborts(node: Node, steady: Steady) -> None:
    ranks = start(steady, "criu")
    hold, asked = begin_held(node, ranks)
    hold.kill_criu()
    assert_none_is_in_it(ranks, asked)


def test_with_etcd(engines: EngineRoot, steady: Steady) -> None:
    """Killed when one rank is bound: all stand still, and it is decided when it is back. Without it
    there is no checkpoint."""
    program = shutil.which("etcd")
    assert program is not None
    etcd = EtcdIn(engines, Path(program), "/tmp/etcd-ranks")
    node = Node(engines, "etcd-node", LOOK_S, f'jobs_store = ["{etcd.url}"]\njobs_socket = ""\n')
    try:
        node.start_agent()
        ranks = start(steady, "stored")
        hold, asked = begin_held(node, ranks)
        before = ranks[0].steps()
        etcd.kill()
        hold.release()
        assert_they_stand(node, ranks[0], before)
        etcd.start()
        assert [one.ended().returncode for one in asked] == [0, 0]
        for one in ranks:
            one.run_on()
        states = [one["state"] for one in node.job("list", "stored", store=etcd.url)["epochs"]]
        assert states == ["committed"]
        etcd.kill()
        assert ask_all(ranks[:1], "checkpoint")[0].returncode != 0
        said = log_of(ranks[0])
        assert f"job stored, rank 0: the store {etcd.url} cannot be reached: " in said
        ranks[0].run_on()
    finally:
        etcd.kill()
        node.close()


def test_the_script_starts_in_30_ms(engines: EngineRoot, node: Node, steady: Steady) -> None:
    """Of a container that is a rank, until its agent has answered; and of one that is none."""
    steady("timed", "runc", *rank_annotations("timed", 0, 1), mib=4)
    root = engines.run(*["podman", "inspect", "--format", "{{.State.Pid}}", "timed"]).stdout.strip()
    found = json.loads(engines.run(sys.executable, "-c", TIMED, str(rank_script()), root).stdout)
    print(found)
    assert all(found[one] <= 0.030 for one in found), found
