# SPDX-License-Identifier: Apache-2.0
"""What a campaign has found."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """counts: trials by what came of them, in the campaign's own words; failures: what must not
    be, one text each."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def trials(self) -> int:
        return self.counts["trials"]

    def require_clean(self) -> None:
        """Raises AssertionError with every failure, or if nothing was tried."""
        assert self.trials > 0, "no trial was made"
        assert not self.failures, f"{len(self.failures)} of {self.trials} failed:\n" + "\n".join(
            self.failures
        )
