# SPDX-License-Identifier: Apache-2.0
"""Campaigns over checkpoints that are in memory first (tier = "ram"): dumps, drains, and copies to
a neighbour."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from campaigns import agent_kills, drain_kills, pair_kills, peer_kills, ram_kills
from campaigns.direct_kills import OF_WORKER
from campaigns.ram_dump import slow_ram
from campaigns.tally import Tally
from campaigns.victims import Victims
from soak.bench import KILLS_EACH_PHASE, Bench, Campaign


def _of_dumps(bench: Bench, name: str, victims: Sequence[Victims]) -> Iterator[tuple[str, Tally]]:
    """Each phase is hit KILLS_EACH_PHASE times by all parts together."""
    each = -(-KILLS_EACH_PHASE // len(bench.rigs))
    for rig in bench.rigs:
        part = f"criu {rig.criu.version_text}"
        with slow_ram(rig) as (slow, arena):
            yield part, ram_kills.run(slow, arena, bench.random(f"{name} {part}"), each, victims)


def kill(bench: Bench) -> Iterator[tuple[str, Tally]]:
    yield from _of_dumps(bench, "kill-ram", [Victims.CRIU])


def kill_worker(bench: Bench) -> Iterator[tuple[str, Tally]]:
    yield from _of_dumps(bench, "kill-ram-worker", OF_WORKER)


def kill_drain(bench: Bench) -> Iterator[tuple[str, Tally]]:
    version = f"criu {bench.newest.criu.version_text}"
    for what, run in (("", drain_kills.run), (", with a dump", pair_kills.run)):
        part = f"{version}{what}"
        with slow_ram(bench.newest) as (slow, arena):
            random = bench.random(f"kill-drain {part}")
            yield part, run(slow, arena, random, KILLS_EACH_PHASE)


def kill_agent(bench: Bench) -> Iterator[tuple[str, Tally]]:
    part = f"criu {bench.newest.criu.version_text}"
    with slow_ram(bench.newest) as (slow, arena):
        random = bench.random(f"kill-agent {part}")
        yield part, agent_kills.run(slow, arena, random, KILLS_EACH_PHASE)


def kill_copy(bench: Bench) -> Iterator[tuple[str, Tally]]:
    part = f"criu {bench.newest.criu.version_text}"
    with slow_ram(bench.newest) as (slow, arena):
        random = bench.random(f"kill-copy {part}")
        yield part, peer_kills.run(slow, arena, random, KILLS_EACH_PHASE)


CAMPAIGNS: dict[str, tuple[str, Campaign]] = {
    "kill-ram": (
        (
            'criu is killed with SIGKILL during a dump with tier = "ram", at least '
            f"{KILLS_EACH_PHASE} times in each phase; the job runs on, what is left is a whole "
            "local checkpoint or none, some of these are restored, and the one before it is not "
            "touched. Jobs that are lost to "
            "code of CRIU's own, which is seen in each task that dies, are counted, and LOST "
            "above"
        ),
        kill,
    ),
    "kill-ram-worker": (
        (
            "the worker of such a dump is killed, alone, with criu, before it and after it; in "
            f"each phase each of these at least once, and all of them together {KILLS_EACH_PHASE} "
            "times; `gpustasis recover` brings the job back where nobody else is left, also after "
            "`gpustasis arena clean`; losses as in kill-ram"
        ),
        kill_worker,
    ),
    "kill-drain": (
        (
            f"`gpustasis drain` is killed at least {KILLS_EACH_PHASE} times in each phase; the "
            "checkpoint is local or durable, and whole; and a drain and a dump into the same "
            f"arena are killed, either first, {KILLS_EACH_PHASE} times with criu and with the "
            "worker"
        ),
        kill_drain,
    ),
    "kill-agent": (
        (
            "the agent is killed while it makes such a checkpoint, alone, with criu, with the "
            "worker, and with both, and while it writes down that one is made, and drains it; at "
            f"least {KILLS_EACH_PHASE} times in each of these phases, in half of the trials while "
            "it drains an earlier one too; the job runs on, and the next agent says of each "
            "checkpoint that is whole that it is done, and makes it durable: of each that was "
            "finished by then, or whose criu lives on; some are restored; losses as in kill-ram"
        ),
        kill_agent,
    ),
    "kill-copy": (
        (
            "either end of `gpustasis peer copy`, and both, are killed; in each phase each of "
            f"these at least once, and all of them together {KILLS_EACH_PHASE} times; the copy is "
            "there whole or not at all, and the checkpoint is not touched"
        ),
        kill_copy,
    ),
}
