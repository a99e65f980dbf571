# SPDX-License-Identifier: Apache-2.0
"""What others have stored is checked before it is used."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpustasis.errors import JobError
from gpustasis.jobs.lead import Roll, digest_of, next_move
from gpustasis.jobs.messages import Epoch, Move, Phase, Step
from gpustasis.jobs.records import (
    Keys,
    Plan,
    epoch_of,
    member_of,
    member_text,
    number_of,
    phase_text,
    rank_of,
    settled_of,
    settled_text,
)
from gpustasis.jobs.store import Entry
from support.changed_text import read_or_refused

PLAN = Plan(world=3, leave_running=True)
TEXTS: dict[Callable[..., Any], str] = {
    epoch_of: phase_text(PLAN, Phase.DUMP, "why"),
    member_of: member_text(Step.READY, "me"),
    number_of: "7",
}


def test_what_is_written_is_read() -> None:
    assert epoch_of("k", Entry(TEXTS[epoch_of], 5)) == (Epoch(Phase.DUMP, 5, True, "why"), PLAN)
    assert member_of("k", Entry(TEXTS[member_of], 5)) == (Step.READY, "me")
    assert number_of("k", Entry("7", 5)) == 7
    assert number_of("k", None) == 0


def test_an_error_of_several_lines_is_a_note_of_one() -> None:
    why = "criu 4.2.1 restore failed (exit 1)\n  criu: no\n\n  full log: /restore.log"
    epoch, _ = epoch_of("k", Entry(phase_text(PLAN, Phase.ABORTED, why), 5))
    assert epoch.note == "criu 4.2.1 restore failed (exit 1); criu: no; full log: /restore.log"
    assert settled_of("k", Entry(settled_text(why), 5)) == epoch.note


@pytest.mark.parametrize("read", TEXTS, ids=lambda read: read.__name__)
@given(st.data())
def test_any_text_is_read_or_refused(read: Callable[..., Any], data: st.DataObject) -> None:
    read_or_refused(read, TEXTS[read], data)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("version", 2),
        ("phase", "done"),
        ("phase", ["dump"]),
        ("world", 0),
        ("world", True),
        ("world", 1 << 21),
        ("leave_running", 1),
        ("note", None),
        ("note", "x" * 5000),
        ("more", 1),
    ],
)
def test_an_epoch_out_of_bounds_is_refused(name: str, value: object) -> None:
    text = json.dumps({**json.loads(TEXTS[epoch_of]), name: value})
    with pytest.raises(JobError):
        epoch_of("k", Entry(text, 1))


@pytest.mark.parametrize("text", ["", "0", "-1", "07", "1.0", "９", "1" * 9, "1\n"])
def test_a_number_out_of_bounds_is_refused(text: str) -> None:
    with pytest.raises(JobError):
        number_of("k", Entry(text, 1))


@pytest.mark.parametrize("name", ["", "a/b", "..", ".a", "a b", "ä", "a" * 129, "a\n"])
def test_a_job_with_such_a_name_is_refused(name: str) -> None:
    with pytest.raises(JobError, match="job name"):
        Keys(name)


@pytest.mark.parametrize(
    ("key", "rank"), [("a/0", 0), ("a/2", 2), ("a/3", None), ("a/02", None), ("a/x", None)]
)
def test_ranks_are_those_of_the_world(key: str, rank: int | None) -> None:
    assert rank_of(key, 3) == rank


@given(st.dictionaries(st.integers(0, 3), st.text(max_size=4), max_size=4))
def test_other_records_have_another_digest(records: dict[int, str]) -> None:
    mine = digest_of(records)
    for rank, record in records.items():
        assert digest_of({**records, rank: f"{record}x"}) != mine
        assert digest_of({n: r for n, r in records.items() if n != rank}) != mine


def test_a_rank_whose_lease_is_gone_aborts_unless_its_record_is_there() -> None:
    epoch = Epoch(Phase.DUMP, 9)
    roll = Roll(2)
    roll.note_step(0, Step.NETWORK_LOCKED)
    assert next_move(epoch, roll) == Move(9, Phase.ABORTED, "rank 1 lost its lease in phase dump")
    roll.note_record(1, "r")
    assert next_move(epoch, roll) is None
    roll.note_step(0, None)
    assert next_move(epoch, roll) == Move(9, Phase.ABORTED, "rank 0 lost its lease in phase dump")
    roll.note_record(0, "s")
    assert next_move(epoch, roll) == Move(9, Phase.COMMITTED, digest_of({0: "s", 1: "r"}))
    roll.note_record(0, "t")
    assert next_move(epoch, roll) == Move(9, Phase.COMMITTED, digest_of({0: "t", 1: "r"}))


SAID = st.tuples(st.integers(0, 2), st.sampled_from([None, "record", *Step]))


@given(st.lists(SAID, max_size=30))
def test_what_is_counted_is_what_was_said(said: list[tuple[int, Step | str | None]]) -> None:
    roll = Roll(3)
    steps: dict[int, Step] = {}
    records: dict[int, str] = {}
    for rank, what in said:
        if what == "record":
            records[rank] = what
            roll.note_record(rank, what)
        else:
            step = None if what is None else Step(what)
            steps = {other: steps[other] for other in steps if other != rank}
            steps |= {rank: step} if step else {}
            roll.note_step(rank, step)
        known = set(steps) | set(records)
        assert roll.missing() == next((rank for rank in range(3) if rank not in known), None)
        assert roll.have_dumped() == (len(records) == 3)
        order = list(Step)
        for number, wanted in enumerate(order):
            there = [rank for rank, step in steps.items() if order.index(step) >= number]
            assert roll.have_reached(wanted) == (len(there) == 3)
