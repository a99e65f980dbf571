# SPDX-License-Identifier: Apache-2.0
"""The lead of an epoch: rank 0's keeper, which moves the phase forward when all ranks are there.

It remembers nothing: whatever it asks for follows from what is stored. What it has read may be old.
That does no harm: what ranks have said stays true until the phase changes, and a move names the
revision that it replaces.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping

from gpustasis.jobs.messages import WORK, Epoch, Move, Phase, Step

LEAD = 0
_ORDER = list(Step)
_NEXT = {
    Phase.LOOK: Phase.LOCK_CUDA,
    Phase.LOCK_CUDA: Phase.LOCK_NETWORK,
    Phase.LOCK_NETWORK: Phase.DUMP,
    Phase.DUMP: Phase.COMMITTED,
}


class Roll:
    """What the ranks of an epoch have said, counted as it comes: what follows from it is found as
    quickly with many ranks as with few."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._steps: dict[int, Step] = {}
        self._records: dict[int, str] = {}
        self._counts = Counter[Step]()
        self._known = 0  # ranks of which there is a step or a record
        self._digest = ""

    def note_step(self, rank: int, step: Step | None) -> None:
        """What a rank says; None: its lease is gone."""
        before = self._steps.pop(rank, None)
        if before is not None:
            self._counts[before] -= 1
        if step is not None:
            self._steps[rank] = step
            self._counts[step] += 1
        if rank not in self._records:
            self._known += (step is not None) - (before is not None)

    def note_record(self, rank: int, record: str) -> None:
        """What it has dumped. It is not needed any more."""
        self._known += rank not in self._records and rank not in self._steps
        self._records[rank] = record
        self._digest = ""

    def missing(self) -> int | None:
        """A rank of which nothing is there; None: there is none."""
        if self._known == self.world:
            return None
        return next(
            rank
            for rank in range(self.world)
            if rank not in self._steps and rank not in self._records
        )

    def have_reached(self, wanted: Step) -> bool:
        """Whether every rank has come so far, and its lease lives."""
        return sum(self._counts[step] for step in _ORDER[_ORDER.index(wanted) :]) == self.world

    def have_dumped(self) -> bool:
        return len(self._records) == self.world

    def digest(self) -> str:
        """Of all records."""
        self._digest = self._digest or digest_of(self._records)
        return self._digest


def next_move(epoch: Epoch, roll: Roll) -> Move | None:
    """What the lead asks for. None: nothing yet."""
    if epoch.phase.is_final:
        return None
    if epoch.phase is not Phase.LOOK and (rank := roll.missing()) is not None:  # all had joined
        reason = f"rank {rank} lost its lease in phase {epoch.phase}"
        return Move(epoch.revision, Phase.ABORTED, reason)
    if not _are_there(epoch.phase, roll):
        return None
    phase = _NEXT[epoch.phase]
    return Move(epoch.revision, phase, roll.digest() if phase is Phase.COMMITTED else "")


def _are_there(phase: Phase, roll: Roll) -> bool:
    return roll.have_dumped() if phase is Phase.DUMP else roll.have_reached(WORK[phase][1])


def digest_of(records: Mapping[int, str]) -> str:
    """What a commit says of all ranks' records: none of them can be exchanged afterwards."""
    digest = hashlib.sha256()
    for rank, record in sorted(records.items()):
        digest.update(f"{rank} {len(record.encode())} {record}\n".encode())
    return digest.hexdigest()
