# SPDX-License-Identifier: Apache-2.0
"""What one rank does in a coordinated checkpoint: a state machine without I/O and without a clock.

One word in the store decides, the epoch's phase. The lead moves it forward when all ranks have
said that they are where they should be (lead.py); anybody may move it to `aborted`; whoever is
first wins, since each move names the revision that it replaces. A rank acts only on what it has
read there, or on its own before it is bound.

A rank is bound from the moment at which it sends the record of its dump: from then on a commit may
have been made, and it neither runs on nor ends before it has read the decision, however long the
store is away. Before that nothing can be committed without it: if the store is lost, it brings its
tasks back by itself and takes no part in this epoch any more.

advance() takes the rank's state, an event and the time, and returns the next state, and what is to
be done and written. docs/jobs.md has the phases and what a crash in each leads to; tests explore
all states of three ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


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
_BEFORE = {
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
    committed (lead.digest_of)."""

    phase: Phase
    revision: int
    leave_running: bool = False
    note: str = ""


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
    """Say that the rank has done what was decided; problem: what went wrong with that. The epoch's
    phase is final: there is nothing to expect."""

    problem: str = ""


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
    """An action has ended. record: of a dump. problem: what went wrong; "": nothing."""

    action: Action
    record: str = ""
    problem: str = ""


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
    wants the epoch aborted; "": it does not. problem: what settling tells.
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


def returned(
    limits: Limits, epoch: Epoch, *, joined: bool, dumped: bool, settled: bool, now: float
) -> Result:
    """A rank whose keeper starts, with what the store says of it: the epoch, and whether the rank
    had joined it, stored the record of its dump, and settled. The tasks are as they were left.

    Whoever had joined is bound, even without a record in the store: one may be on its way.
    """
    if settled:
        return Rank(place=Place.OVER, epoch=epoch), ()
    if not joined:
        return _read(limits, Rank(), epoch, now)
    me = Rank(place=Place.WAITING, bound=True, step=Step.DUMPED if dumped else Step.JOINED)
    if not dumped:
        me = replace(me, aborting="the rank's keeper has crashed")
    return _read(limits, me, epoch, now)


def advance(limits: Limits, me: Rank, event: Event, now: float) -> Result:
    """What `event` leads to. An event that no longer matters changes nothing."""
    if me.place in {Place.OVER, Place.BROKEN}:
        return me, ()
    match event:
        case Seen(epoch):
            return _read(limits, me, epoch, now)
        case StoreBack(epoch):
            back = replace(me, reachable=True)
            after, outputs = _read(limits, back, epoch, now)
            # What _read has not written by itself may have been lost with the store.
            return after, outputs or _unanswered(after)
        case StoreLost():
            return _lost(replace(me, reachable=False))
        case Written():
            return _answered(limits, me, event, now)
        case Ended():
            return _ended(me, event)
        case Trouble(reason):
            return _abort(me, reason)
        case Tick():
            if me.deadline is None or now < me.deadline or me.epoch is None:
                return me, ()
            return _abort(me, f"phase {me.epoch.phase} took too long")


def _read(limits: Limits, me: Rank, epoch: Epoch, now: float) -> Result:
    """The epoch is so. An older reading than the last one says nothing."""
    if me.epoch is not None and epoch.revision <= me.epoch.revision:
        return me, ()
    deadline = None if epoch.phase.is_final else now + limits.of(epoch.phase)
    me = replace(me, epoch=epoch, deadline=deadline)
    if epoch.phase.is_final:
        return _decided(me, epoch)
    if me.aborting:
        return replace(me, deadline=None), (Move(epoch.revision, Phase.ABORTED, me.aborting),)
    if me.place is Place.OUT:
        if epoch.phase is not Phase.LOOK:  # it went on without this rank: another one has its name
            return me, ()
        return replace(me, place=Place.JOINING), (Join(epoch.revision),)
    if me.place is Place.WAITING and me.step is _BEFORE[epoch.phase]:
        return _do(me, WORK[epoch.phase][0])
    if me.place is Place.WAITING and me.step is Step.DUMPED and epoch.phase is Phase.DUMP:
        return me, ()  # came back, and waits for the decision
    return _abort(me, f"phase {epoch.phase} came while the rank was {me.place}")


def _decided(me: Rank, epoch: Epoch) -> Result:
    match me.place:
        case Place.OUT | Place.JOINING:  # nothing was touched
            return replace(me, place=Place.OUT), ()
        case Place.SETTLING:
            return me, ()
        case _ if epoch.phase is Phase.COMMITTED and not me.bound:
            # Somebody else's record stands for this rank. Neither to kill nor to run on is safe.
            problem = "the epoch was committed without this rank's dump"
            return replace(me, place=Place.BROKEN, problem=problem), ()
        case Place.WITHDRAWN:
            return replace(me, place=Place.SETTLING), (Settle(me.problem),)
        case Place.ACTING if me.action in {Action.RELEASE, Action.FINISH}:
            return me, ()  # withdraws already: what it has to do is the same
        case Place.ACTING:
            return _stop(me)
        case _:
            return _obey(me, epoch)


def _obey(me: Rank, epoch: Epoch) -> Result:
    if epoch.phase is Phase.COMMITTED:
        me, _ = _do(me, Action.FINISH)
        return me, (Do(Action.FINISH, epoch.leave_running),)
    return _do(me, Action.RELEASE)


def _do(me: Rank, action: Action) -> Result:
    return replace(me, place=Place.ACTING, action=action, stopping=False), (Do(action),)


def _stop(me: Rank) -> Result:
    """Have the action end, if it was not told before."""
    return (me, ()) if me.stopping else (replace(me, stopping=True), (Stop(),))


def _lost(me: Rank) -> Result:
    if me.place in {Place.OUT, Place.WITHDRAWN, Place.SETTLING} or me.bound:
        return me, ()
    if me.action in {Action.RELEASE, Action.FINISH}:
        return me, ()
    me = replace(me, aborting=me.aborting or "the store cannot be reached", deadline=None)
    return _stop(me) if me.place is Place.ACTING else _do(me, Action.RELEASE)


def _abort(me: Rank, reason: str) -> Result:
    """Want the epoch aborted. A rank that has nothing in it does not care."""
    if me.place is Place.OUT or me.aborting or me.epoch is None or me.epoch.phase.is_final:
        return me, ()
    me = replace(me, aborting=reason, deadline=None)
    outputs: tuple[Output, ...] = ()
    if me.place is Place.ACTING and me.action not in {Action.RELEASE, Action.FINISH}:
        me, outputs = _stop(me)
    if me.reachable:
        outputs = (*outputs, Move(me.epoch.revision, Phase.ABORTED, reason))
    return me, outputs


def _answered(limits: Limits, me: Rank, event: Written, now: float) -> Result:
    match event.write:
        case Settle():
            return replace(me, place=Place.OVER), ()
        case Join(expect) if me.place is Place.JOINING and event.applied:
            me = replace(me, step=Step.JOINED)
            if event.epoch.revision == expect and not me.aborting:
                return _do(me, Action.LOOK)
            me = replace(me, place=Place.WAITING)
        case Join(expect) if me.place is Place.JOINING and event.epoch.revision == expect:
            return replace(me, place=Place.OVER, problem="another process is this rank"), ()
    # A refused write: the epoch has gone on, and what it is now says what to do.
    return _read(limits, me, event.epoch, now)


def _ended(me: Rank, event: Ended) -> Result:
    if me.place is not Place.ACTING or event.action is not me.action or me.epoch is None:
        return me, ()
    me = replace(me, place=Place.WAITING, action=None, stopping=False)
    if event.action in {Action.RELEASE, Action.FINISH}:
        place = Place.SETTLING if me.epoch.phase.is_final else Place.WITHDRAWN
        me = replace(me, place=place, problem=event.problem)
        return me, _unanswered(me)
    if me.epoch.phase.is_final:
        return _obey(me, me.epoch)
    if event.problem and not me.aborting:
        me, outputs = _abort(me, event.problem)
        return (me, outputs) if me.reachable else _lost(me)
    if not me.reachable:
        return _lost(me)
    if me.aborting:
        return me, ()  # the decision is awaited
    step = WORK[me.epoch.phase][1]
    if step is Step.DUMPED:
        me = replace(me, step=step, record=event.record, bound=True)
        return me, (Dumped(me.epoch.revision, event.record),)
    return replace(me, step=step), (Report(me.epoch.revision, step),)


def _unanswered(me: Rank) -> tuple[Write, ...]:
    """What the store has to know of a rank that can reach it, and perhaps does not."""
    if me.epoch is None or not me.reachable:
        return ()
    if me.place is Place.SETTLING:
        return (Settle(me.problem),)
    if me.epoch.phase.is_final:
        return ()
    writes: list[Write] = []
    if me.aborting:
        writes.append(Move(me.epoch.revision, Phase.ABORTED, me.aborting))
    elif me.step is Step.DUMPED and me.record:
        writes.append(Dumped(me.epoch.revision, me.record))
    return tuple(writes)
