# SPDX-License-Identifier: Apache-2.0
"""What campaigns run on, and the counts that several of them have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from campaigns.rig import Rig
from campaigns.tally import Tally

KILLS = 120
KILLS_EACH_PHASE = 30
KILLS_WITH_WORKER = 40
STREAMS_BROKEN = 200


@dataclass(frozen=True, slots=True)
class Bench:
    """What the campaigns run on. rigs: oldest CRIU first. hook_cost: the program."""

    rigs: tuple[Rig, ...]
    hook_cost: Path
    seed: int

    @property
    def newest(self) -> Rig:
        return self.rigs[-1]

    def random(self, name: str) -> Random:
        """The same numbers for the same seed and campaign, whatever else was run."""
        return Random(f"{self.seed} {name}")


# Yields a name for each part and what it has found.
Campaign = Callable[[Bench], Iterator[tuple[str, Tally]]]
