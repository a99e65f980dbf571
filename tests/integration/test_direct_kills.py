# SPDX-License-Identifier: Apache-2.0
"""A few trials of the campaigns over dumps with gpu_memory = "direct"; all of them are in make
soak."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from campaigns import (
    damage,
    direct_faults,
    direct_kills,
    direct_restore_kills,
    driver_faults,
    kill_restore,
)
from campaigns.direct_dump import (
    HANDING_OVER,
    PHASES,
    RESTORING,
    STORED,
    STORING,
    UNLOCKING,
    slow_direct,
)
from campaigns.direct_kills import LOST_WITH_WORKER, OF_WORKER
from campaigns.rig import Rig
from campaigns.tally import RESTORED

SEED = 20
OF_DRIVER = (HANDING_OVER, STORING, STORED, RESTORING, UNLOCKING)


@pytest.fixture
def slow_rig(newest_rig: Rig) -> Iterator[Rig]:
    with slow_direct(newest_rig) as rig:
        yield rig


def test_no_job_is_lost_when_criu_is_killed(slow_rig: Rig) -> None:
    tally = direct_kills.run(slow_rig, Random(SEED), 1)
    tally.require_clean()
    assert all(tally.counts[f"in {phase}"] for phase in PHASES), tally.counts
    assert tally.counts[RESTORED] > 0, tally.counts


def test_what_the_worker_takes_along_never_runs(slow_rig: Rig) -> None:
    tally = direct_kills.run(slow_rig, Random(SEED), 1, OF_WORKER, OF_DRIVER)
    tally.require_clean()
    assert all(tally.counts[f"in {phase}"] for phase in OF_DRIVER), tally.counts
    assert all(tally.counts[f"killed: {victim}"] for victim in OF_WORKER), tally.counts
    assert tally.counts[LOST_WITH_WORKER] > 0, tally.counts
    assert tally.counts[RESTORED] > 0, tally.counts


def test_a_restore_that_breaks_off_leaves_nothing_that_runs_wrong(slow_rig: Rig) -> None:
    checkpoint = damage.take(slow_rig, mib=8, children=1)
    kill_restore.run(slow_rig, Random(SEED), 6, checkpoint).require_clean()
    tally = direct_restore_kills.run(slow_rig, Random(SEED), 3, 3, checkpoint)
    tally.require_clean()
    assert tally.counts[direct_restore_kills.PUT_BACK] >= 3, tally.counts


@pytest.mark.parametrize("call", ["checkpoint", "complete"])
def test_a_dump_meets_faults_of_the_driver(slow_rig: Rig, call: str) -> None:
    faults = [
        fault
        for fault in direct_faults.dump_faults((304,), slow=False)
        if fault.operation == call and fault.action in ("error", "oom", "lie", "die")
    ]
    direct_faults.run(slow_rig, faults, Random(SEED)).require_clean()


def test_the_way_back_meets_faults_of_the_driver(slow_rig: Rig) -> None:
    faults = [
        fault
        for fault in direct_faults.back_faults((304,), slow=False)
        if (fault.operation, fault.action) in (("complete", "fail_after"), ("restore", "error"))
    ]
    direct_faults.run(slow_rig, faults, Random(SEED), back=True).require_clean()


def test_a_restore_meets_faults_when_it_hands_memory_back(slow_rig: Rig) -> None:
    faults = [
        fault
        for fault in direct_faults.restore_faults((304,), slow=False)
        if fault.operation == "complete" or fault.action in ("oom", "fail_after")
    ]
    driver_faults.refuse_restores(slow_rig, faults).require_clean()
