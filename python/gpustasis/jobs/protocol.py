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

from dataclasses import replace

from gpustasis.jobs.messages import (
    BEFORE,
    WORK,
    Action,
    Do,
    Dumped,
    Ended,
    Epoch,
    Event,
    Join,
    Limits,
    Move,
    Output,
    Phase,
    Place,
    Rank,
    Report,
    Result,
    Seen,
    Settle,
    Step,
    Stop,
    StoreBack,
    StoreLost,
    Tick,
    Trouble,
    Write,
    Written,
)

_WITHOUT_IT = "the epoch was committed without this rank's dump"
_TOO_EARLY = "the store says that it has settled, and the epoch is not decided"
_TAKEN = "another process is this rank, or was in an older epoch of this number"


def returned(
    limits: Limits, epoch: Epoch, *, joined: bool, dumped: bool, settled: bool, now: float
) -> Result:
    """A rank whose keeper starts, with what the store says of it: the epoch, and whether the rank
    had joined it, stored the record of its dump, and settled. The tasks are as they were left.

    Whoever had joined is bound, even without a record in the store: one may be on its way. It is
    not when the epoch is committed: then this rank's record is not what was committed.
    """
    if settled and not epoch.phase.is_final:
        return Rank(place=Place.BROKEN, epoch=epoch, problem=_TOO_EARLY), ()
    if settled:
        return Rank(place=Place.OVER, epoch=epoch), ()
    if joined and not dumped and epoch.phase is Phase.COMMITTED:
        return Rank(place=Place.BROKEN, epoch=epoch, problem=_WITHOUT_IT), ()
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
    if me.place is Place.WAITING and me.step is BEFORE[epoch.phase]:
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
            return replace(me, place=Place.BROKEN, problem=_WITHOUT_IT), ()
        case Place.WITHDRAWN:
            return replace(me, place=Place.SETTLING), (Settle(me.problem, me.excuse),)
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
    epoch = me.epoch
    if me.place is Place.OUT or me.aborting or epoch is None or epoch.phase.is_final:
        return me, ()
    me = replace(me, aborting=reason, deadline=None)
    outputs: tuple[Output, ...] = ()
    if me.place is Place.ACTING and me.action not in {Action.RELEASE, Action.FINISH}:
        me, outputs = _stop(me)
    if me.reachable:
        outputs = (*outputs, Move(epoch.revision, Phase.ABORTED, reason))
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
            return replace(me, place=Place.OVER, problem=_TAKEN), ()
    # A refused write: the epoch has gone on, and what it is now says what to do.
    return _read(limits, me, event.epoch, now)


def _ended(me: Rank, event: Ended) -> Result:
    epoch = me.epoch
    if me.place is not Place.ACTING or event.action is not me.action or epoch is None:
        return me, ()
    me = replace(me, place=Place.WAITING, action=None, stopping=False)
    if event.action in {Action.RELEASE, Action.FINISH}:
        place = Place.SETTLING if epoch.phase.is_final else Place.WITHDRAWN
        me = replace(me, place=place, problem=event.problem, excuse=event.excuse)
        return me, _unanswered(me)
    if epoch.phase.is_final:
        return _obey(me, epoch)
    if event.problem and not me.aborting:
        me, outputs = _abort(me, event.problem)
        return (me, outputs) if me.reachable else _lost(me)
    if not me.reachable:
        return _lost(me)
    if me.aborting:
        return me, ()  # the decision is awaited
    step = WORK[epoch.phase][1]
    if step is Step.DUMPED:
        me = replace(me, step=step, record=event.record, bound=True)
        return me, (Dumped(epoch.revision, event.record),)
    return replace(me, step=step), (Report(epoch.revision, step),)


def _unanswered(me: Rank) -> tuple[Write, ...]:
    """What the store has to know of a rank that can reach it, and perhaps does not."""
    if me.epoch is None or not me.reachable:
        return ()
    if me.place is Place.SETTLING:
        return (Settle(me.problem, me.excuse),)
    if me.epoch.phase.is_final:
        return ()
    writes: list[Write] = []
    if me.aborting:
        writes.append(Move(me.epoch.revision, Phase.ABORTED, me.aborting))
    elif me.step is Step.DUMPED and me.record:
        writes.append(Dumped(me.epoch.revision, me.record))
    return tuple(writes)
