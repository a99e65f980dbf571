# SPDX-License-Identifier: Apache-2.0
"""What the pages that a job writes mean for its checkpoints: rates, sizes, intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One interval of watching.

    seconds: how long it was. dirty_bytes: of pages written at least once in it. tracked_bytes,
    untracked_bytes: as in gpustasis._core.DirtyPages, at its end.
    """

    seconds: float
    dirty_bytes: int
    tracked_bytes: int
    untracked_bytes: int = 0

    @property
    def rate(self) -> float:
        """Bytes of different pages written per second."""
        return self.dirty_bytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def share(self) -> float:
        """Of the tracked memory, 0 to 1."""
        return self.dirty_bytes / self.tracked_bytes if self.tracked_bytes else 0.0


@dataclass(slots=True)
class Meter:
    """The samples so far, summed up."""

    seconds: float = 0.0
    dirty_bytes: int = 0
    peak_rate: float = 0.0
    count: int = 0
    last: Sample = field(
        default_factory=lambda: Sample(seconds=0.0, dirty_bytes=0, tracked_bytes=0)
    )

    def add(self, sample: Sample) -> None:
        self.seconds += sample.seconds
        self.dirty_bytes += sample.dirty_bytes
        self.peak_rate = max(self.peak_rate, sample.rate)
        self.count += 1
        self.last = sample

    @property
    def mean_rate(self) -> float:
        """Bytes per second over the whole time."""
        return self.dirty_bytes / self.seconds if self.seconds > 0 else 0.0


def incremental_bytes(rate: float, tracked_bytes: int, interval_s: float) -> float:
    """At most so many bytes differ after interval_s seconds: a page that is written twice counts
    once in a checkpoint, and twice in a rate measured over shorter times."""
    return min(rate * interval_s, float(tracked_bytes))


def best_interval(cost_s: float, mtbf_s: float) -> float:
    """Seconds between checkpoints that lose the least time, where one stops the job for cost_s and
    a failure comes every mtbf_s on average: sqrt(2 cost MTBF).

    Sources: J. W. Young, "A first order approximation to the optimum checkpoint interval",
    CACM 17(9), 1974; J. T. Daly, "A higher order estimate of the optimum checkpoint interval for
    restart dumps", FGCS 22(3), 2006, whose first term it is. Good while cost_s is much smaller
    than mtbf_s. Raises ValueError unless both are positive.
    """
    if cost_s <= 0 or mtbf_s <= 0:
        raise ValueError(f"cost {cost_s} s and MTBF {mtbf_s} s must be positive")
    return math.sqrt(2 * cost_s * mtbf_s)


def best_incremental_interval(
    rate: float, tracked_bytes: int, bandwidth: float, mtbf_s: float
) -> tuple[float, float]:
    """(interval, cost), both in seconds, where the cost is that of writing what has changed.

    rate and bandwidth in bytes per second. What has changed grows with the interval: with
    cost = rate x interval / bandwidth, best_interval() has one fixed point, 2 rate MTBF / bandwidth;
    where all memory has changed by then, the cost is that of all. (0, 0) if nothing is written.
    Raises ValueError unless bandwidth and mtbf_s are positive.
    """
    if bandwidth <= 0 or mtbf_s <= 0:
        raise ValueError(f"bandwidth {bandwidth} B/s and MTBF {mtbf_s} s must be positive")
    if rate <= 0 or tracked_bytes <= 0:
        return 0.0, 0.0
    growing = 2 * rate * mtbf_s / bandwidth
    full = best_interval(tracked_bytes / bandwidth, mtbf_s)
    interval = min(growing, full)
    return interval, incremental_bytes(rate, tracked_bytes, interval) / bandwidth
