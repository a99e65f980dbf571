# SPDX-License-Identifier: Apache-2.0
"""Podman's containers that are ranks of a job: all are in a checkpoint, or all run on. Engines,
CRIU and its action scripts are real."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from support.container_ranks import Asking, Node, annotations, ask_all, log_of
from support.engine_gpu import Steady, SteadyContainer, start_podman
from support.engine_root import EngineRoot

RUNTIMES = ["runc", "crun"]
LOOK_S = 8
STORE = ("--store", "/run/gpustasis/jobs.sock")


@pytest.fixture
def node(engines: EngineRoot) -> Iterator[Node]:
    url = start_podman(engines, "runc")
    made = Node(engines, "node", LOOK_S, f'podman = "{url}"\n')
    made.start_agent()
    yield made
    made.close()


def start(steady: Steady, job: str, runtime: str = "runc", world: int = 2) -> list[SteadyContainer]:
    return [
        steady(f"{job}-{rank}", runtime, *annotations(job, rank, world), mib=8, seed=rank + 3)
        for rank in range(world)
    ]


def epochs_of(node: Node, job: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = node.job("list", job)["epochs"]
    return found


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_all_are_in_it(node: Node, steady: Steady, runtime: str) -> None:
    job = f"all-{runtime}"
    ranks = start(steady, job, runtime)
    for done in ask_all(ranks, "checkpoint", "--leave-running"):
        assert done.returncode == 0, done.stderr
    for one in ranks:
        one.run_on()
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
def test_one_alone_is_not_checkpointed(node: Node, steady: Steady, runtime: str) -> None:
    job = f"alone-{runtime}"
    ranks = start(steady, job, runtime)
    begin = time.monotonic()
    done = ask_all(ranks[:1], "checkpoint")[0]
    assert done.returncode != 0
    assert time.monotonic() - begin >= LOOK_S
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
