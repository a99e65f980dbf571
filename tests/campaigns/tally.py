# SPDX-License-Identifier: Apache-2.0
"""What a campaign has found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field

FINISHED = "finished when somebody died"  # checkpoints: none of these may be gone afterwards
RESTORED = "restored"  # checkpoints that killed dumps have left; each goes on, and is exact


@dataclass(slots=True)
class Tally:
    """counts: trials by what came of them, in the campaign's own words; failures: what must not
    be, one text each."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def trials(self) -> int:
        return self.counts["trials"]

    def require_restored(self) -> None:
        """A failure if no checkpoint of a killed dump was restored."""
        if not self.counts[RESTORED]:
            self.failures.append("no checkpoint that a killed dump has left was restored")

    def require_clean(self) -> None:
        """Raises AssertionError with every failure, or if nothing was tried."""
        assert self.trials > 0, "no trial was made"
        assert not self.failures, f"{len(self.failures)} of {self.trials} failed:\n" + "\n".join(
            self.failures
        )


@dataclass(slots=True)
class Sample:
    """Which of many are looked at closely: of each kind the first, and then one in `each`."""

    each: int
    counts: Counter[Hashable] = field(default_factory=Counter)

    def takes(self, kind: Hashable) -> bool:
        self.counts[kind] += 1
        return (self.counts[kind] - 1) % self.each == 0
