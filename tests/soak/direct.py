# SPDX-License-Identifier: Apache-2.0
"""Campaigns over dumps with gpu_memory = "direct", on an emulated driver that copies slowly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from campaigns import (
    damage,
    direct_faults,
    direct_kills,
    direct_restore_kills,
    driver_faults,
    kill_restore,
)
from campaigns.direct_dump import DRIVER, slow_direct
from campaigns.direct_kills import OF_WORKER
from campaigns.tally import Tally
from campaigns.victims import Victims
from soak.bench import KILLS_EACH_PHASE, Bench, Campaign

KILLED_RESTORES = 60
CODES = driver_faults.CODES[::2]


def _kills(bench: Bench, name: str, victims: Sequence[Victims]) -> Iterator[tuple[str, Tally]]:
    """Each phase is hit KILLS_EACH_PHASE times by all parts together."""
    each = -(-KILLS_EACH_PHASE // len(bench.rigs))
    for rig in bench.rigs:
        part = f"criu {rig.criu.version_text}, driver {DRIVER}"
        with slow_direct(rig) as slow:
            yield part, direct_kills.run(slow, bench.random(f"{name} {part}"), each, victims)


def kill(bench: Bench) -> Iterator[tuple[str, Tally]]:
    yield from _kills(bench, "kill-direct", [Victims.CRIU])


def kill_worker(bench: Bench) -> Iterator[tuple[str, Tally]]:
    yield from _kills(bench, "kill-direct-worker", OF_WORKER)


def kill_restores(bench: Bench) -> Iterator[tuple[str, Tally]]:
    for rig in bench.rigs:
        part = f"criu {rig.criu.version_text}, driver {DRIVER}"
        random = bench.random(f"kill-restore-direct {part}")
        with slow_direct(rig) as slow:
            checkpoint = damage.take(slow, mib=16, children=1)
            yield f"{part}, criu", kill_restore.run(slow, random, KILLED_RESTORES, checkpoint)
            tally = direct_restore_kills.run(
                slow, random, KILLED_RESTORES, KILLS_EACH_PHASE, checkpoint
            )
            yield f"{part}, criu, the worker and both", tally


def fail_driver(bench: Bench) -> Iterator[tuple[str, Tally]]:
    rig = bench.newest
    part = f"criu {rig.criu.version_text}, driver {DRIVER}"
    random = bench.random("driver-faults-direct")
    with slow_direct(rig) as slow:
        of_dump = direct_faults.dump_faults(CODES, slow=True)
        yield f"{part}, dump", direct_faults.run(slow, of_dump, random)
        on_the_way = direct_faults.back_faults(CODES, slow=True)
        yield f"{part}, the way back", direct_faults.run(slow, on_the_way, random, back=True)
        of_restore = direct_faults.restore_faults(CODES, slow=True)
        yield f"{part}, restore", driver_faults.refuse_restores(slow, of_restore)


CAMPAIGNS: dict[str, tuple[str, Campaign]] = {
    "kill-direct": (
        (
            "criu is killed with SIGKILL during a dump with direct GPU memory, at least "
            f"{KILLS_EACH_PHASE} times in each phase; no job may be lost but to code of CRIU's "
            "own, which is seen in each task that dies; those are counted, and LOST above"
        ),
        kill,
    ),
    "kill-direct-worker": (
        (
            "the worker of such a dump is killed, alone, with criu, before it and after it; in "
            f"each phase each of these at least once, and all of them together {KILLS_EACH_PHASE} "
            "times; what was not stored is lost, is said to be, and never runs; all else comes "
            "back, by criu, `gpustasis recover` or a restore; but what is lost to code of CRIU's "
            "own, as in kill-direct"
        ),
        kill_worker,
    ),
    "kill-restore-direct": (
        (
            "criu, the worker and both are killed during a restore of direct GPU memory, at any "
            f"moment, and until {KILLS_EACH_PHASE} of them were killed while memory was put back; "
            "nothing may run on wrong memory, and the checkpoint is restored afterwards"
        ),
        kill_restores,
    ),
    "driver-faults-direct": (
        (
            "each driver call of dumps and restores with direct GPU memory fails, hangs, lies or "
            "kills the process; what is reported as dumped comes back exact, and what the driver "
            "has lost is said to be, and never runs"
        ),
        fail_driver,
    ),
}
