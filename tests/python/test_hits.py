# SPDX-License-Identifier: Apache-2.0
"""Whom the kill campaigns aim at in which phase, and when they have hit enough."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum

import pytest

from campaigns.hits import Hits
from campaigns.tally import Tally


class Who(StrEnum):
    ONE = "one"
    TWO = "two"
    OTHER = "other"


Death = Callable[[str, Who], tuple[str, Who]]
BOTH = (Who.ONE, Who.TWO)
PHASES = ("first", "second")


def campaign(
    each: int, victims: Sequence[Who], death: Death, limit: int = 12
) -> tuple[Hits[Who], Tally, int]:
    """death: in which phase who dies, when that one is aimed at in that phase."""
    hits, tally, trials = Hits(PHASES, victims, each), Tally(), 0
    for phase in hits.aims(tally, limit):
        asked = hits.whose_turn(phase, victims)
        trials += 1
        hits.add(*death(phase, asked), asked)
    hits.note(tally)
    return hits, tally, trials


def test_each_is_hit_in_each_phase() -> None:
    hits, tally, trials = campaign(4, BOTH, lambda phase, asked: (phase, asked))
    assert (trials, tally.failures) == (8, [])
    assert [hits[phase] for phase in PHASES] == [4, 4]
    assert tally.counts["of each victim in each phase, at least"] == 2
    assert tally.counts["killed: one"] == tally.counts["killed: two"] == 4


def test_it_goes_on_until_each_was_hit_in_each_phase() -> None:
    """One of them ends by itself the first three times: the other has died then."""
    early = iter([Who.ONE] * 3)
    hits, tally, trials = campaign(2, BOTH, lambda phase, asked: (
        phase,
        next(early, asked) if asked is Who.TWO and phase == "first" else asked,
    ))  # fmt: skip
    assert tally.failures == []
    assert tally.counts["of each victim in each phase, at least"] == 1
    assert (hits["first"], trials) == (5, 7)
    assert hits.later_s("first", Who.TWO, 0.8) == pytest.approx(0.1)
    assert hits.later_s("second", Who.TWO, 0.8) == pytest.approx(0.8)


def test_who_is_never_hit_in_a_phase_is_a_failure() -> None:
    _, tally, trials = campaign(2, BOTH, lambda phase, asked: (
        phase, Who.ONE if phase == "first" else asked
    ), limit=5)  # fmt: skip
    assert trials == 20
    assert tally.counts["of each victim in each phase, at least"] == 0
    assert "each phase hit 2 times, cannot be had" in tally.failures[0]
    assert tally.failures[1:] == ["never hit: two in first"]


def test_with_few_hits_each_is_hit_in_some_phase() -> None:
    """One hit in each phase leaves none for two in each; that both die is asked all the same."""
    early = iter([Who.ONE] * 2)
    hits, tally, trials = campaign(1, BOTH, lambda phase, asked: (
        phase, next(early, asked) if asked is Who.TWO else asked
    ))  # fmt: skip
    assert (trials, tally.failures) == (4, [])
    assert hits.of(Who.TWO) == 1
    _, tally, _ = campaign(1, BOTH, lambda phase, _: (phase, Who.ONE))
    assert tally.failures[1:] == ["never hit: two in any phase"]


def test_who_is_no_victim_fills_no_quota() -> None:
    early = iter([Who.OTHER] * 4)
    hits, tally, trials = campaign(2, BOTH, lambda phase, asked: (phase, next(early, asked)))
    assert (trials, tally.failures) == (8, [])
    assert [hits[phase] for phase in PHASES] == [2, 2]
    assert hits.of(Who.OTHER) == 0


def test_a_phase_that_is_never_hit_is_a_failure() -> None:
    _, tally, trials = campaign(1, [Who.ONE], lambda _, asked: ("first", asked), limit=3)
    assert trials == 6
    assert tally.failures == ["each phase hit 1 times, cannot be had: one in first: 6"]


def test_shares_of_an_order() -> None:
    hits = Hits(["first"], BOTH, 6)
    for _ in range(6):
        hits.add("first", hits.whose_turn("first", [Who.ONE, Who.ONE, Who.TWO]))
    assert (hits.of(Who.ONE), hits.of(Who.TWO)) == (4, 2)
