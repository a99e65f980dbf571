# SPDX-License-Identifier: Apache-2.0
"""The lead of an epoch: rank 0's keeper, which moves the phase forward when all ranks are there.

It remembers nothing: whatever it asks for follows from what is stored. What it has read may be old.
That does no harm: what ranks have said stays true until the phase changes, and a move names the
revision that it replaces.
"""

from __future__ import annotations

import hashlib
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


def next_move(
    epoch: Epoch, world: int, steps: Mapping[int, Step], records: Mapping[int, str]
) -> Move | None:
    """What the lead asks for. None: nothing yet.

    steps: what the ranks say, of those whose lease lives. records: what they have dumped. A rank
    whose record is there is not needed any more.
    """
    if epoch.phase.is_final:
        return None
    if epoch.phase is not Phase.LOOK:  # all had joined
        for rank in range(world):
            if rank not in steps and rank not in records:
                reason = f"rank {rank} lost its lease in phase {epoch.phase}"
                return Move(epoch.revision, Phase.ABORTED, reason)
    if not all(_is_there(epoch.phase, rank, steps, records) for rank in range(world)):
        return None
    phase = _NEXT[epoch.phase]
    return Move(epoch.revision, phase, digest_of(records) if phase is Phase.COMMITTED else "")


def _is_there(
    phase: Phase, rank: int, steps: Mapping[int, Step], records: Mapping[int, str]
) -> bool:
    if phase is Phase.DUMP:
        return rank in records
    wanted = WORK[phase][1]
    return rank in steps and _ORDER.index(steps[rank]) >= _ORDER.index(wanted)


def digest_of(records: Mapping[int, str]) -> str:
    """What a commit says of all ranks' records: none of them can be exchanged afterwards."""
    digest = hashlib.sha256()
    for rank, record in sorted(records.items()):
        digest.update(f"{rank} {len(record.encode())} {record}\n".encode())
    return digest.hexdigest()
