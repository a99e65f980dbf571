# SPDX-License-Identifier: Apache-2.0
"""One rank in the model of a job: its keeper runs the protocol's own code; its tasks, what is
stored of it, what is on its way, and the faults are played here.

Faults: a keeper's crash, a lost node, a lease that expires early, a cut connection, an action that
fails, a deadline that passes early, tasks that slip out of their dump (a killed criu).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from gpustasis.jobs import lead, protocol
from gpustasis.jobs.messages import (
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

LIMITS = Limits()
AFTER_ALL_DEADLINES = 1e12
PHASES = (Phase.LOOK, Phase.LOCK_CUDA, Phase.LOCK_NETWORK, Phase.DUMP, Phase.COMMITTED)
_LOCKED = {Action.LOCK_CUDA: "cuda", Action.LOCK_NETWORK: "net"}
_UNDOING = {Action.RELEASE, Action.FINISH}


class Member(NamedTuple):
    """me: None: the keeper is down. tasks: run, cuda, net (locked so far), stand, killed, or gone
    with their node. dumped: a whole dump of them exists. ran: brought back after such a dump.
    slipped: they ran on by themselves after it. view: what the lead has read of this rank.
    """

    me: Rank | None = Rank()
    connected: bool = True
    tasks: str = "run"
    dumped: bool = False
    ran: bool = False
    slipped: bool = False
    step: Step | None = None
    joined: bool = False
    record: bool = False
    settled: bool = False
    writes: frozenset[tuple[bool, Write]] = frozenset()  # (of a keeper that is down, write)
    answers: frozenset[Written] = frozenset()
    view: tuple[Step | None, bool] = (None, False)

    @property
    def stored(self) -> tuple[Step | None, bool]:
        return self.step, self.record

    @property
    def is_disturbed(self) -> bool:
        """Its tasks need not be as the epoch's phase says."""
        return self.me is None or bool(self.me.aborting) or self.tasks == "gone" or self.slipped


class Change(NamedTuple):
    """What may happen. lead_looks: the lead has read something. starts: it was just started."""

    cost: int
    label: str
    member: Member
    epoch: Epoch
    lead_looks: bool = False
    starts: bool = False


def problem(member: Member, epoch: Epoch) -> str:
    """Of what must never be."""
    committed = epoch.phase is Phase.COMMITTED
    if member.tasks == "killed" and not committed:
        return "killed without a commit"
    if member.ran and committed:
        return "a mix: one ran on after its dump, and the job was committed"
    if committed and not member.dumped:
        return "committed without a dump of each"
    if member.me is not None and member.me.place is Place.BROKEN:
        return f"broken: {member.me.problem}"
    if member.dumped and epoch.phase is not Phase.ABORTED and epoch.revision <= 3:
        return "dumped before that was decided"
    return ""


def bad_end(member: Member, epoch: Epoch) -> str:
    """Of a rank to which nothing happens any more, in a decided epoch."""
    if member.tasks == "gone":
        return ""
    kills = epoch.phase is Phase.COMMITTED and not epoch.leave_running
    if member.tasks != ("killed" if kills else "run"):
        return f"for ever: tasks {member.tasks}, epoch {epoch.phase}"
    if member.me is None or member.me.place not in {Place.OUT, Place.OVER}:
        return f"for ever {member.me and member.me.place}"
    return ""


def changes(member: Member, epoch: Epoch, is_lead: bool, lead_is_gone: bool) -> Iterator[Change]:
    """All that may happen to this member next."""
    yield from _stored(member, epoch)
    if member.tasks == "gone":
        return
    if member.tasks == "stand" and not member.slipped:
        slipped = member._replace(tasks="run", slipped=True)
        after = slipped if slipped.me is None else _told(slipped, epoch, Trouble("slipped"))
        yield Change(1, "slips out of its dump", after, epoch)
    if member.me is None:
        if member.connected:
            yield Change(0, "starts", _started(member, epoch), epoch, is_lead, is_lead)
        else:
            yield Change(0, "is connected", member._replace(connected=True), epoch)
        return
    if member.connected:
        yield from _messages(member, epoch, is_lead, lead_is_gone)
        cut = member._replace(connected=False, answers=frozenset(), writes=_stale(member.writes))
        yield Change(1, "is cut off", _told(cut, epoch, StoreLost()), epoch)
    else:
        back = _told(member._replace(connected=True), epoch, StoreBack(epoch))
        yield Change(0, "is connected", back, epoch, is_lead)
    yield from _work(member, epoch)
    if member.me.deadline is not None:
        yield Change(1, "is late", _told(member, epoch, Tick()), epoch)
    if member.me.place is not Place.OVER:
        for left in _left_by_crash(member):
            yield Change(1, "crashes", left, epoch)
        yield Change(1, "is lost with its node", _down(member)._replace(tasks="gone"), epoch)


def asked(first: Member, epoch: Epoch, views: Sequence[tuple[Step | None, bool]]) -> Member:
    """The lead, once it has asked for what follows from what it has read."""
    if first.me is None or first.me.epoch is None or not first.connected:
        return first
    roll = lead.Roll(len(views))
    for rank, (step, dumped) in enumerate(views):
        roll.note_step(rank, step)
        if dumped:
            roll.note_record(rank, "record")
    move = lead.next_move(first.me.epoch, roll)
    return first if move is None else _writing(first, epoch, move)


def pruned(member: Member, revision: int) -> Member:
    """Without writes that the store will refuse whenever they come. Their answers would say what
    reading the epoch says too."""
    writes = {(stale, w) for stale, w in member.writes if _may_be_applied(w, revision)}
    return member._replace(writes=frozenset(writes))


def _may_be_applied(write: Write, revision: int) -> bool:
    return isinstance(write, Settle) or write.expect in {None, revision}


def _writing(member: Member, epoch: Epoch, write: Write) -> Member:
    """With a write on its way, without its words, which make no difference."""
    if isinstance(write, Move):
        write = replace(write, note="")
    elif isinstance(write, Settle):
        write = Settle()
    if not _may_be_applied(write, epoch.revision):
        return member
    return member._replace(writes=member.writes | {(False, write)})


@cache
def _advanced(me: Rank, event: Event) -> tuple[Rank, tuple[Output, ...]]:
    now = AFTER_ALL_DEADLINES if isinstance(event, Tick) else 0.0
    return protocol.advance(LIMITS, me, event, now)


def _told(member: Member, epoch: Epoch, event: Event) -> Member:
    assert member.me is not None
    return _done(member, epoch, *_advanced(member.me, event))


def _started(member: Member, epoch: Epoch) -> Member:
    me, outputs = protocol.returned(
        LIMITS,
        epoch,
        joined=member.joined,
        dumped=member.record,
        settled=member.settled,
        now=0.0,
    )
    return _done(member, epoch, me, outputs)


def _done(member: Member, epoch: Epoch, me: Rank, outputs: tuple[Output, ...]) -> Member:
    me = replace(me, aborting="x" * bool(me.aborting), problem=me.problem and "x")
    member = member._replace(me=me)
    for output in outputs:
        match output:
            case Do(Action.RELEASE):
                member = member._replace(ran=member.ran or member.dumped)
            case Do() | Stop():
                pass
            case _:
                member = _writing(member, epoch, output)
    return member


def _messages(member: Member, epoch: Epoch, is_lead: bool, lead_is_gone: bool) -> Iterator[Change]:
    me = member.me
    assert me is not None
    for revision in range(me.epoch.revision + 1 if me.epoch else 1, epoch.revision + 1):
        read = epoch
        if revision < epoch.revision:
            read = replace(epoch, phase=PHASES[revision - 1], revision=revision)
        yield Change(0, f"reads {read.phase}", _told(member, epoch, Seen(read)), epoch, is_lead)
    for answer in member.answers:
        heard = member._replace(answers=member.answers - {answer})
        yield Change(0, "is answered", _told(heard, epoch, answer), epoch)
    if not me.aborting and ((lead_is_gone and not is_lead) or (member.joined and not member.step)):
        after = _told(member, epoch, Trouble("a lease is gone"))
        if after != member:
            yield Change(0, "misses a lease", after, epoch)


def _work(member: Member, epoch: Epoch) -> Iterator[Change]:
    """The action that is being done ends."""
    me = member.me
    assert me is not None
    if me.place is not Place.ACTING or me.action is None:
        return
    effects: dict[Action, dict[str, Any]] = {
        Action.LOCK_CUDA: {"tasks": "cuda"},
        Action.LOCK_NETWORK: {"tasks": "net"},
        Action.DUMP: {"tasks": "stand", "dumped": True},
        Action.RELEASE: {"tasks": "run"},
        Action.FINISH: {"tasks": "run" if epoch.leave_running else "killed"},
    }
    done = member._replace(**effects.get(me.action, {}))
    ended = Ended(me.action, "record" if me.action is Action.DUMP else "")
    yield Change(0, f"ends {me.action}", _told(done, epoch, ended), epoch)
    if me.action in _UNDOING:
        return
    left = member._replace(tasks="run") if me.action is Action.DUMP else member
    failed = _told(left, epoch, Ended(me.action, problem="x"))
    yield Change(0 if me.stopping else 1, f"fails {me.action}", failed, epoch)


def _stored(member: Member, epoch: Epoch) -> Iterator[Change]:
    """A write of this member arrives at the store, or its lease expires."""
    for stale, write in member.writes:
        after, applied = member._replace(writes=member.writes - {(stale, write)}), True
        now = epoch
        match write:
            case Settle():
                after = after._replace(settled=True)
            case Join():
                after = after._replace(step=Step.JOINED, joined=True)
            case Report(_, step):
                after = after._replace(step=step if member.step else None)
            case Dumped():
                after = after._replace(record=True)
            case Move(_, phase):
                now = replace(epoch, phase=phase, revision=epoch.revision + 1)
                after = pruned(after, now.revision)
        heard = isinstance(write, Join | Settle) and not stale
        if heard and member.me is not None and member.connected:
            after = after._replace(answers=after.answers | {Written(write, applied, now)})
        name = type(write).__name__ + " of the past" * stale
        yield Change(0, f"has {name} stored", after, now)
    if member.step is not None:
        free = member.me is None or not member.connected or member.me.place is Place.OVER
        yield Change(1 - free, "has its lease expire", member._replace(step=None), epoch)


def _stale(writes: frozenset[tuple[bool, Write]]) -> frozenset[tuple[bool, Write]]:
    return frozenset((True, write) for _, write in writes)


def _down(member: Member) -> Member:
    return member._replace(me=None, answers=frozenset(), writes=_stale(member.writes))


def _left_by_crash(member: Member) -> Iterator[Member]:
    """What a crash may leave: an action in mid-work has been done, or not."""
    assert member.me is not None
    down = _down(member)
    if member.me.place is Place.ACTING and member.me.action in _LOCKED:
        yield down._replace(tasks=_LOCKED[member.me.action])
    elif member.me.place is Place.ACTING and member.me.action is Action.DUMP:
        yield down._replace(tasks="run")
        yield down._replace(tasks="stand", dumped=True)
    else:
        yield down
