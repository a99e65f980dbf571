# SPDX-License-Identifier: Apache-2.0
"""The words of the protocol of a coordinated checkpoint: phases, steps, what happens to a rank,
what it does and writes, and its state. protocol.py says how they belong together."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from gpustasis.jobs.work import Excuse


class Phase(StrEnum):
    """Of an epoch, in order; the last two are the decision and never change."""

    LOOK = "look"
    LOCK_CUDA = "lock-cuda"
    LOCK_NETWORK = "lock-network"
    DUMP = "dump"
    COMMITTED = "committed"
    ABORTED = "aborted"

    @property
    def is_final(self) -> bool:
        return self in {Phase.COMMITTED, Phase.ABORTED}


class Step(StrEnum):
    """How far a rank says that it has come."""

    JOINED = "joined"
    READY = "ready"
    CUDA_LOCKED = "cuda-locked"
    NETWORK_LOCKED = "network-locked"
    DUMPED = "dumped"


class Action(StrEnum):
    """What is done with the rank's tasks; one at a time.

    LOOK: may they be checkpointed? Touches nothing. RELEASE: bring them back, whatever was done
    before, and let them run on; again is no harm. FINISH: do what the commit asks for: kill them,
    or let them run on; again is no harm.
    """

    LOOK = "look"
    LOCK_CUDA = "lock-cuda"
    LOCK_NETWORK = "lock-network"
    DUMP = "dump"
    RELEASE = "release"
    FINISH = "finish"


# What each phase asks of a rank, and what the rank has reached then.
WORK = {
    Phase.LOOK: (Action.LOOK, Step.READY),
    Phase.LOCK_CUDA: (Action.LOCK_CUDA, Step.CUDA_LOCKED),
    Phase.LOCK_NETWORK: (Action.LOCK_NETWORK, Step.NETWORK_LOCKED),
    Phase.DUMP: (Action.DUMP, Step.DUMPED),
}
BEFORE = {
    Phase.LOOK: Step.JOINED,
    Phase.LOCK_CUDA: Step.READY,
    Phase.LOCK_NETWORK: Step.CUDA_LOCKED,
    Phase.DUMP: Step.NETWORK_LOCKED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Seconds that a rank stays in each phase, from the moment it has read it until the next one:
    its own work, and waiting for the others. After that it aborts the epoch."""

    look_s: float = 30.0
    lock_cuda_s: float = 30.0
    lock_network_s: float = 10.0
    dump_s: float = 1800.0

    def of(self, phase: Phase) -> float:
        """Of a phase that is not final."""
        return {
            Phase.LOOK: self.look_s,
            Phase.LOCK_CUDA: self.lock_cuda_s,
            Phase.LOCK_NETWORK: self.lock_network_s,
            Phase.DUMP: self.dump_s,
        }[phase]


@dataclass(frozen=True, slots=True)
class Epoch:
    """The epoch as it stands in the store. revision: of the store, when this was written.
    leave_running: what a commit asks for. note: why it was aborted, or the digest of what was
    committed (lead.digest_of). restores: the epoch that is restored by this one; 0: it is a
    checkpoint."""

    phase: Phase
    revision: int
    leave_running: bool = False
    note: str = ""
    restores: int = 0


# What a rank, or the lead, asks the store to write. Each is refused unless the epoch still has
# revision `expect`. It may be written again when it is not known whether it was: the second one is
# refused or changes nothing.


@dataclass(frozen=True, slots=True)
class Join:
    """Be this rank of the epoch, unless somebody else is."""

    expect: int


@dataclass(frozen=True, slots=True)
class Report:
    """Say, for as long as the lease lives, that the rank has reached `step`."""

    expect: int
    step: Step


@dataclass(frozen=True, slots=True)
class Dumped:
    """Store the record of a complete and durable dump, whose tasks stand still. It has no lease."""

    expect: int
    record: str


@dataclass(frozen=True, slots=True)
class Move:
    """Give the epoch another phase, and its note."""

    expect: int
    phase: Phase
    note: str = ""


@dataclass(frozen=True, slots=True)
class Settle:
    """Say that the rank has done what was decided; problem: what went wrong with that, with its
    excuse (work.Excuse). The epoch's phase is final: there is nothing to expect."""

    problem: str = ""
    excuse: Excuse = Excuse.NONE


Write = Join | Report | Dumped | Move | Settle


# What happens to a rank.


@dataclass(frozen=True, slots=True)
class Seen:
    """The epoch was read."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Written:
    """The store has answered a write. epoch: as it was then, after it."""

    write: Write
    applied: bool
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Ended:
    """An action has ended. record: of a dump. problem: what went wrong; "": nothing. excuse: as
    Settle's."""

    action: Action
    record: str = ""
    problem: str = ""
    excuse: Excuse = Excuse.NONE


@dataclass(frozen=True, slots=True)
class Trouble:
    """The epoch cannot go on: the rank's lease is gone, or the lead's, or the tasks do not stand
    still any more after their dump."""

    reason: str


@dataclass(frozen=True, slots=True)
class StoreLost:
    """The store has not been reached for as long as is allowed. What was written and not answered
    may be stored, now or later."""


@dataclass(frozen=True, slots=True)
class StoreBack:
    """It is reached again; epoch: as it is now."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Seen | Written | Ended | Trouble | StoreLost | StoreBack | Tick


class Place(StrEnum):
    """Where a rank is in the epoch."""

    OUT = "out"  # has not joined
    JOINING = "joining"
    ACTING = "acting"  # an action is being done
    WAITING = "waiting"  # for the next phase, or for the decision
    WITHDRAWN = "withdrawn"  # brought back without a decision; the epoch cannot be committed
    SETTLING = "settling"  # has done what was decided, and tells the store
    OVER = "over"
    BROKEN = "broken"  # the store says what cannot be: the tasks are not touched


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One rank's state.

    epoch: as last read. action: the one that is being done. stopping: it was asked to end early.
    bound: a commit may be made, or have been made, with this rank in it. aborting: why the rank
    wants the epoch aborted; "": it does not. problem, excuse: what settling tells.
    """

    place: Place = Place.OUT
    epoch: Epoch | None = None
    step: Step | None = None
    action: Action | None = None
    stopping: bool = False
    bound: bool = False
    reachable: bool = True
    aborting: str = ""
    record: str = ""
    problem: str = ""
    excuse: Excuse = Excuse.NONE
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class Do:
    """Begin an action. leave_running: what FINISH is to do."""

    action: Action
    leave_running: bool = False


@dataclass(frozen=True, slots=True)
class Stop:
    """The action that is being done is to end early, if it can; Ended comes in any case."""


Output = Do | Stop | Write
Result = tuple[Rank, tuple[Output, ...]]
