# SPDX-License-Identifier: Apache-2.0
"""The agent's checkpoints with tier = "ram": in memory at first, then on the disk, whoever is
killed in between."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gpustasis
from gpustasis._core import ARENA_MARKER
from gpustasis.draining.recycle import look_into
from gpustasis.emulator import Emulator
from gpustasis.image.arena import Tier, tier_of
from gpustasis.image.directory import is_there
from support.agent import Agent
from support.faults import await_hit
from support.job import Job, check_memory, reap_workers

Agents = Callable[..., Agent]
Generations = Callable[..., Job]
RAM = 'tier = "ram"\n'
SLOW = RAM + 'drain_rate = "256K"\n'  # the jobs here have 8 MiB that are not zero
# An agent that stops drains for 80 s at most, which a busy machine may come to with SLOW.
STEADY = RAM + 'drain_rate = "1M"\n'
# A drain has the lowest priority, and its rate limit makes up for no time that it did not get.
DRAINED_S = 200.0
TARGET = """
[[target]]
name = "train"
pidfile = "{pidfile}"
verify = true
"""


def keys(arena: Path) -> dict[str, str]:
    return {"arena": str(arena)}


def tier_said(agent: Agent, id: str) -> str:
    figures = agent.operation(id)["figures"]
    return str(figures["tier"]) if figures is not None else ""


def await_durable(agent: Agent, id: str) -> None:
    agent.wait_for(lambda: tier_said(agent, id) == "durable", timeout_s=DRAINED_S)


def checkpoint(agent: Agent, **options: Any) -> dict[str, Any]:
    with agent.client() as client:
        found = client.checkpoint(**options)
    assert found["state"] == "done", found
    return found


def require_whole_on_disk(place: Path) -> None:
    assert tier_of(place) == Tier.DURABLE
    assert gpustasis.open(place).verify().problems == []


def test_it_is_in_memory_when_it_is_done_and_on_the_disk_soon_after(
    agents: Agents, gpu_generations: Generations, arena: Path, tmp_path: Path
) -> None:
    """And the next one is built on it."""
    job, pidfile = gpu_generations(), tmp_path / "train.pid"
    pidfile.write_text(str(job.pid))
    agent = agents(RAM + TARGET.format(pidfile=pidfile), config=keys(arena))
    first = checkpoint(agent, target="train")
    assert first["figures"]["tier"] in ("local", "durable") and first["figures"]["verified"]
    await_durable(agent, first["id"])
    require_whole_on_disk(Path(first["place"]))
    assert look_into(arena).kept == []
    second = checkpoint(agent, target="train")
    assert second["figures"]["incremental"]
    await_durable(agent, second["id"])
    stored = agent.operation(second["id"])["figures"]["stored_bytes"]
    assert 0 < stored < agent.operation(first["id"])["figures"]["stored_bytes"]
    require_whole_on_disk(Path(second["place"]))
    agent.wait_for(lambda: agent.metric("gpustasis_agent_local") == 0)
    check_memory(job, 0)


def test_what_is_to_end_its_job_goes_to_the_disk(
    agents: Agents, gpu_generations: Generations, arena: Path
) -> None:
    """Else memory would hold all that is left of the job."""
    agent, job = agents(SLOW, config=keys(arena)), gpu_generations()
    found = checkpoint(agent, pid=job.pid, stop=True)
    assert found["figures"]["tier"] == "durable" and not arena.exists()
    require_whole_on_disk(Path(found["place"]))


def test_the_host_s_tier_is_not_the_agent_s(
    agents: Agents, gpu_generations: Generations, arena: Path
) -> None:
    agent, job = agents(config={**keys(arena), "tier": "ram"}), gpu_generations()
    assert checkpoint(agent, pid=job.pid)["figures"]["tier"] == "durable"


def test_a_job_is_checkpointed_again_while_its_last_one_is_drained(
    agents: Agents, gpu_generations: Generations, arena: Path
) -> None:
    """The slot is free, and none of them is lost."""
    agent, job = agents(SLOW, config=keys(arena)), gpu_generations()
    found = [checkpoint(agent, pid=job.pid) for _ in range(2)]
    assert [one["figures"]["tier"] for one in found] == ["local", "local"]
    assert agent.metric("gpustasis_agent_local") == 2
    assert json.loads(agent.get("/healthz")[1])["local"] == 2
    for one in found:
        await_durable(agent, one["id"])
        require_whole_on_disk(Path(one["place"]))
    check_memory(job, 0)


def test_an_agent_that_stops_has_drained(
    agents: Agents, gpu_generations: Generations, arena: Path
) -> None:
    """The host may be about to lose its memory."""
    agent, job = agents(STEADY, config=keys(arena)), gpu_generations()
    found = checkpoint(agent, pid=job.pid)
    assert tier_of(Path(found["place"])) == Tier.LOCAL
    assert agent.stop() == 0
    require_whole_on_disk(Path(found["place"]))
    agent.start()
    assert tier_said(agent, found["id"]) == "durable"


@pytest.mark.parametrize("in_dump", [True, False])
def test_what_a_killed_agent_has_left_in_memory_is_drained_by_the_next(
    agents: Agents,
    gpu_generations: Generations,
    arena: Path,
    emulator: Emulator,
    in_dump: bool,
) -> None:
    agent, job = agents(SLOW, config=keys(arena)), gpu_generations()
    if in_dump:
        emulator.add_fault("checkpoint", "delay", delay_ms=6000)
        with agent.client() as client:
            id = client.checkpoint(pid=job.pid, wait=False)["id"]
        await_hit(emulator)
    else:
        id = checkpoint(agent, pid=job.pid)["id"]
        place = Path(agent.operation(id)["place"])
        agent.wait_for(lambda: any(place.glob(".gpustasis-*.part")))
    agent.stop(signal.SIGKILL)
    emulator.clear_faults()
    agent.start()
    found = agent.wait_for_state(id, "done")
    place = Path(found["place"])
    agent.wait_for(lambda: not is_there(place / ARENA_MARKER), timeout_s=DRAINED_S)
    require_whole_on_disk(place)
    assert not in_dump or "the checkpoint is whole" in found["note"]
    agent.wait_for(lambda: agent.metric("gpustasis_agent_local") == 0)
    assert look_into(arena).kept == []
    check_memory(job, 0)
    reap_workers()


def test_a_drain_that_fails_is_tried_again(
    agents: Agents, gpu_generations: Generations, arena: Path
) -> None:
    """The checkpoint stays in memory meanwhile."""
    agent, job = agents(SLOW, config=keys(arena)), gpu_generations()
    place = Path(checkpoint(agent, pid=job.pid)["place"])
    agent.stop(signal.SIGKILL)
    marker = os.open(place / ARENA_MARKER, os.O_RDWR)
    try:
        fcntl.flock(marker, fcntl.LOCK_EX)  # as another drain, that does not end
        agent.start()
        agent.wait_for(
            lambda: any("is not drained yet" in line["message"] for line in agent.lines())
        )
        assert tier_of(place) == Tier.LOCAL and agent.metric("gpustasis_agent_local") == 1
    finally:
        os.close(marker)
    agent.wait_for(lambda: tier_of(place) == Tier.DURABLE, timeout_s=DRAINED_S)
    require_whole_on_disk(place)
