# SPDX-License-Identifier: Apache-2.0
"""The driver refuses, hangs, fails or dies; the whole matrix is in make soak."""

from __future__ import annotations

from random import Random

from campaigns import driver_faults
from campaigns.rig import Rig

SEED = 20261122


def test_a_dump_meets_every_kind_of_fault(newest_rig: Rig) -> None:
    driver_faults.run_dumps(
        newest_rig, codes=(304, 600), slow=False, random=Random(SEED)
    ).require_clean()


def test_a_restore_meets_every_kind_of_fault(newest_rig: Rig) -> None:
    driver_faults.run_restores(newest_rig, codes=(2, 801), slow=False).require_clean()


def test_a_fault_on_the_way_back_is_made_good(newest_rig: Rig) -> None:
    driver_faults.run_undos(newest_rig, codes=(304,)).require_clean()
