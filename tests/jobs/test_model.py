# SPDX-License-Identifier: Apache-2.0
"""All states of the protocol are explored; and seeded mistakes in it are found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpustasis.jobs import lead, protocol
from gpustasis.jobs.messages import Action, Ended, Move, Phase, Place, Rank, Result, Step, StoreBack
from support import job_member
from support.job_model import Found, Model


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    """What the protocol answered with another test's mistake in it."""
    job_member._advanced.cache_clear()


@pytest.mark.parametrize(
    ("world", "faults", "leave_running", "at_least"),
    [(1, 3, False, 2000), (2, 1, True, 10_000), (3, 1, False, 100_000)],
)
def test_no_state_is_a_mix_and_all_come_to_an_end(
    world: int, faults: int, leave_running: bool, at_least: int
) -> None:
    assert Model(world, faults, leave_running=leave_running).explore() > at_least


def test_without_a_fault_a_job_is_committed() -> None:
    model = Model(3, 0)
    model.explore()
    ends = {(revision, aborted) for revision, aborted, _ in model.free if revision == 5 or aborted}
    assert ends == {(5, False)}


def runs_on_without_the_store(patch: pytest.MonkeyPatch) -> None:
    lost = protocol._lost
    patch.setattr(protocol, "_lost", lambda me: lost(replace(me, bound=False)))


def runs_on_before_it_asks(patch: pytest.MonkeyPatch) -> None:
    returned = protocol.returned

    def hasty(*words: Any, joined: bool, dumped: bool, **names: Any) -> Result:
        me, outputs = returned(*words, joined=joined, dumped=dumped, **names)
        if joined and not dumped and me.place is Place.WAITING:
            me, more = protocol._do(me, Action.RELEASE)
            outputs = (*outputs, *more)
        return me, outputs

    patch.setattr(protocol, "returned", hasty)


def is_bound_by_the_answer(patch: pytest.MonkeyPatch) -> None:
    ended, answered = protocol._ended, protocol._answered

    def late(me: Rank, event: Ended) -> Result:
        after, outputs = ended(me, event)
        return replace(after, bound=me.bound), outputs

    def bound(*words: Any) -> Result:
        after, outputs = answered(*words)
        return replace(after, bound=after.bound or after.step is Step.DUMPED), outputs

    patch.setattr(protocol, "_ended", late)
    patch.setattr(protocol, "_answered", bound)


def runs_on_when_late(patch: pytest.MonkeyPatch) -> None:
    abort = protocol._abort

    def alone(me: Rank, reason: str) -> Result:
        after, outputs = abort(me, reason)
        if outputs and after.place is Place.WAITING:
            after, more = protocol._do(after, Action.RELEASE)
            outputs = (*outputs, *more)
        return after, outputs

    patch.setattr(protocol, "_abort", alone)


def moves_without_looking(patch: pytest.MonkeyPatch) -> None:
    writing = job_member._writing

    def blind(member: Any, epoch: Any, write: Any) -> Any:
        if isinstance(write, Move):
            write = replace(write, expect=None)
        return writing(member, epoch, write)

    patch.setattr(job_member, "_writing", blind)


def forgets_the_last_rank(patch: pytest.MonkeyPatch) -> None:
    class Short(lead.Roll):
        def __init__(self, world: int) -> None:
            super().__init__(world - 1)

        def note_step(self, rank: int, step: Step | None) -> None:
            if rank < self.world:
                super().note_step(rank, step)

        def note_record(self, rank: int, record: str) -> None:
            if rank < self.world:
                super().note_record(rank, record)

    patch.setattr(lead, "Roll", Short)


def leaves_out_a_barrier(patch: pytest.MonkeyPatch) -> None:
    there = lead._are_there

    def hasty(phase: Phase, roll: lead.Roll) -> bool:
        return phase is Phase.LOCK_CUDA or there(phase, roll)

    patch.setattr(lead, "_are_there", hasty)


def kills_when_aborted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(protocol, "_obey", lambda me, epoch: protocol._do(me, Action.FINISH))


def has_no_deadline(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(job_member, "AFTER_ALL_DEADLINES", 0.0)


def says_nothing_twice(patch: pytest.MonkeyPatch) -> None:
    advance = protocol.advance

    def silent(limits: Any, me: Any, event: Any, now: float) -> Result:
        after, outputs = advance(limits, me, event, now)
        return after, () if isinstance(event, StoreBack) else outputs

    patch.setattr(protocol, "advance", silent)


def dumps_what_it_gave_up(patch: pytest.MonkeyPatch) -> None:
    """A rank that withdrew goes on as if it had not."""
    lost = protocol._lost

    def forgetful(me: Rank) -> Result:
        after, outputs = lost(me)
        return replace(after, bound=True), outputs

    patch.setattr(protocol, "_lost", forgetful)
    patch.setattr(protocol, "_unanswered", lambda me: ())


MISTAKES = {
    runs_on_without_the_store: "a mix",
    runs_on_before_it_asks: "a mix",
    is_bound_by_the_answer: "a mix|broken",
    runs_on_when_late: "a mix",
    moves_without_looking: "a decision was changed|a mix|without a dump|before all",
    forgets_the_last_rank: "before all are|without a dump",
    leaves_out_a_barrier: "before all are cuda",
    kills_when_aborted: "killed without a commit|broken",
    has_no_deadline: "for ever|no decision",
    says_nothing_twice: "for ever|no decision",
    dumps_what_it_gave_up: "for ever|no decision|no end",
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_in_the_protocol_is_found(mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    with pytest.raises(Found, match=MISTAKES[mistake]):
        Model(2, 1).explore()
