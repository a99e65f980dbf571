# SPDX-License-Identifier: Apache-2.0
"""Which phases a campaign has hit, and whom of those that it kills in each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Generic, TypeVar

from campaigns.tally import Tally

V = TypeVar("V", bound=StrEnum)


class Hits(Generic[V]):
    """Each of the phases is to be hit `each` times. Where that is often enough, each of the victims
    dies in each of them; else each of them dies in some phase, if all hits together are enough."""

    def __init__(self, phases: Sequence[str], victims: Sequence[V], each: int) -> None:
        self._phases, self._victims, self._each = tuple(phases), tuple(victims), each
        self._counts: Counter[tuple[str, str]] = Counter()
        self._early: Counter[tuple[str, str]] = Counter()

    def __getitem__(self, phase: str) -> int:
        return sum(count for (one, _), count in self._counts.items() if one == phase)

    def of(self, victim: str) -> int:
        return sum(count for (_, one), count in self._counts.items() if one == victim)

    def add(self, phase: str, died: V, asked: V | None = None) -> None:
        """asked: who was to die, if that may be others than have. No hit, if who died is none of
        the victims."""
        if died in self._victims:
            self._counts[phase, died] += 1
        if asked not in (None, died):
            self._early[phase, asked] += 1

    def aims(self, tally: Tally, limit: int) -> Iterator[str]:
        """The phase to be hit next, until all is hit; a failure if it is not after `limit` trials
        for each hit that is asked for."""
        for _ in range(limit * self._each * len(self._phases)):
            missing = self._missing()
            if not missing:
                return
            yield min(missing, key=self.__getitem__)
        if self._missing():
            wanted = f"each phase hit {self._each} times"
            tally.failures.append(f"{wanted}, cannot be had: {self}")

    def whose_turn(self, phase: str, order: Sequence[V]) -> V:
        """Who was hit least in that phase, and of several such, least in all. Who is named more
        often in the order is hit more often."""
        shares = Counter(order)
        return min(shares, key=lambda one: (self._counts[phase, one] / shares[one], self.of(one)))

    def later_s(self, phase: str, victim: V, most: float) -> float:
        """At most so long after the first of two dies the second: sooner each time that it had
        ended by itself before."""
        return most * 0.5 ** self._early[phase, victim]

    def note(self, tally: Tally) -> None:
        """For the report, where there are several victims. A failure if some of them was never
        hit that was to be."""
        if len(self._victims) < 2:
            return
        for victim in self._victims:
            tally.counts[f"killed: {victim}"] += self.of(victim)
        counts = {
            (one, victim): self._counts[one, victim]
            for one in self._phases
            for victim in self._victims
        }
        tally.counts["of each victim in each phase, at least"] = min(counts.values())
        never = [f"{victim} in {one}" for one, victim in counts if self._lacks(one, victim)]
        never += [f"{victim} in any phase" for victim in self._victims if self._lacks_all(victim)]
        if never:
            tally.failures.append(f"never hit: {', '.join(never)}")

    def _missing(self) -> list[str]:
        """The phases in which something is to be hit still."""
        missing = [
            phase
            for phase in self._phases
            if self[phase] < self._each or any(self._lacks(phase, one) for one in self._victims)
        ]
        if missing or not any(map(self._lacks_all, self._victims)):
            return missing
        return [*self._phases]

    def _lacks(self, phase: str, victim: V) -> bool:
        return self._each >= len(self._victims) and not self._counts[phase, victim]

    def _lacks_all(self, victim: V) -> bool:
        enough = self._each * len(self._phases) >= len(self._victims)
        return enough and not self.of(victim)

    def __str__(self) -> str:
        return ", ".join(f"{who} in {phase}: {n}" for (phase, who), n in self._counts.items())
