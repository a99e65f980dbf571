# SPDX-License-Identifier: Apache-2.0
"""How often to checkpoint, so that what checkpoints cost and what failures lose is least."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

SHORTEST_S = 10.0
# Before anything was measured: the first checkpoint is made soon, and measured.
FIRST_S = 60.0
MEASURED = 5  # of the newest
RETRY_S = 30.0  # after the first failure; then twice as long each time, up to the interval


def best_interval(cost_s: float, mtbf_s: float) -> float:
    """Seconds of work between two checkpoints that each stop the job for `cost_s`, where it fails
    once in `mtbf_s`, both above 0.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    2006, equation 37; its first term is J. W. Young's of 1974.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    share = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9) - cost_s


def automatic(downtimes_s: Sequence[float], mtbf_s: float) -> float:
    """The interval from what the last checkpoints have cost; oldest first."""
    if not downtimes_s:
        return FIRST_S
    cost = max(median(downtimes_s[-MEASURED:]), 1e-3)
    return max(SHORTEST_S, best_interval(cost, mtbf_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Periodic:
    """interval_s: between the end of one checkpoint and the next one; None: computed from how long
    the job stands for one, and from mtbf_s."""

    interval_s: float | None
    mtbf_s: float


@dataclass(slots=True)
class Schedule:
    """When the next checkpoint of one job is due, by time.monotonic()."""

    periodic: Periodic
    begun: float
    downtimes: list[float] = field(default_factory=list)  # that were measured, oldest first
    failures: int = 0  # since the last success
    due: float = 0.0

    def __post_init__(self) -> None:
        self.due = self.begun + self.interval_s

    @property
    def interval_s(self) -> float:
        told = self.periodic.interval_s
        return automatic(self.downtimes, self.periodic.mtbf_s) if told is None else told

    def left_s(self) -> float:
        return max(self.due - time.monotonic(), 0.0)

    def note(self, now: float, downtime_s: float | None) -> None:
        """One has ended; None: without a checkpoint."""
        if downtime_s is None:
            retry = RETRY_S * float(1 << min(self.failures, 16))
            self.failures += 1
            self.due = now + min(self.interval_s, retry)
            return
        self.failures = 0
        self.downtimes = [*self.downtimes, downtime_s][-MEASURED:]
        self.due = now + self.interval_s
