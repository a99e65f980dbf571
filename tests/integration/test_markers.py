# SPDX-License-Identifier: Apache-2.0
"""Nothing that a process has in memory is in the clear in a file, while it is dumped sealed and
restored, and when that is killed; the long form is the campaign markers of make soak."""

from __future__ import annotations

from random import Random

from campaigns import markers, tampering
from campaigns.rig import Rig
from support.certificates import Pair

SEED = 20261124
KILLS = 6


def test_no_file_shows_what_the_process_had(newest_rig: Rig, me: Pair) -> None:
    tally = markers.run(newest_rig, Random(SEED), tampering.sealed_for(me), KILLS)
    tally.require_clean()
    assert tally.counts["dumps killed"] >= KILLS and tally.counts["restores killed"] == KILLS // 2
