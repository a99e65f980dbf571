# SPDX-License-Identifier: Apache-2.0
"""A few trials of the campaigns over checkpoints that are in memory first; all of them are in make
soak."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from campaigns import agent_kills, drain_kills, pair_kills, peer_kills, ram_kills
from campaigns.pair_kills import PAIRS
from campaigns.ram_dump import STORING, slow_ram
from campaigns.rig import Rig
from campaigns.tally import RESTORED
from campaigns.victims import Victims

SEED = 21
OF_DUMP = ("lock", STORING, "drop", "finish", "refill")
OF_WORKER = (Victims.WORKER, Victims.BOTH)


@pytest.fixture
def place(newest_rig: Rig) -> Iterator[tuple[Rig, Path]]:
    with slow_ram(newest_rig) as found:
        yield found


def test_no_job_is_lost_and_no_part_of_a_checkpoint_is_left(place: tuple[Rig, Path]) -> None:
    tally = ram_kills.run(*place, Random(SEED), 1, phases=OF_DUMP)
    tally.require_clean()
    assert all(tally.counts[f"in {phase}"] for phase in OF_DUMP), tally.counts
    assert tally.counts[RESTORED] > 0, tally.counts


def test_recover_has_its_memory_when_the_worker_is_killed(place: tuple[Rig, Path]) -> None:
    tally = ram_kills.run(*place, Random(SEED), 2, OF_WORKER, (STORING, "drop"))
    tally.require_clean()
    assert all(tally.counts[f"killed: {victim}"] for victim in OF_WORKER), tally.counts
    assert tally.counts[ram_kills.RECOVERED] > 0, tally.counts


def test_a_drain_that_is_killed_leaves_it_local_or_durable(place: tuple[Rig, Path]) -> None:
    tally = drain_kills.run(*place, Random(SEED), 1)
    tally.require_clean()
    assert all(tally.counts[f"in {phase}"] for phase in drain_kills.PHASES), tally.counts


def test_a_drain_and_a_dump_into_the_same_arena_are_killed(place: tuple[Rig, Path]) -> None:
    tally = pair_kills.run(*place, Random(SEED), 1, phases=(STORING, "drop"))
    tally.require_clean()
    assert all(tally.counts[str(pair)] for pair in PAIRS), tally.counts
    assert tally.counts[f"the dump in {STORING}"] > 0, tally.counts


def test_an_agent_that_is_killed_leaves_all_to_the_next(place: tuple[Rig, Path]) -> None:
    tally = agent_kills.run(*place, Random(SEED), 2)
    tally.require_clean()
    hit = (*agent_kills.ALL_OF_DUMP, *agent_kills.ALONE)
    assert all(tally.counts[f"killed {phase}"] for phase in hit), tally.counts
    assert all(tally.counts[f"killed: {who}"] for who in agent_kills.Who), tally.counts
    assert tally.counts[RESTORED] > 0, tally.counts


def test_a_copy_to_a_neighbour_is_whole_or_not_there(place: tuple[Rig, Path]) -> None:
    tally = peer_kills.run(*place, Random(SEED), 1)
    tally.require_clean()
    assert all(tally.counts[f"in {phase}"] for phase in peer_kills.PHASES), tally.counts
    assert all(tally.counts[f"killed: {side}"] for side in peer_kills.Side), tally.counts
