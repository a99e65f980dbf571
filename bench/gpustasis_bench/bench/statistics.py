# SPDX-License-Identifier: Apache-2.0
"""Medians, spreads, ratios pair by pair, and in which order contenders take their turns."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

TIMES = ("dump_seconds", "frozen_seconds", "restore_seconds")
FIGURES = (*TIMES, "stored_bytes", "peak_rss_bytes")
DRIVER_FIGURES = ("dump_driver_seconds", "restore_driver_seconds")
# The driver's part of each time.
_DRIVER_OF = {
    "dump_seconds": "dump_driver_seconds",
    "frozen_seconds": "dump_driver_seconds",
    "restore_seconds": "restore_driver_seconds",
}
INTERVAL = "95 % Student t interval of the logarithms of the ratios, pair by pair"
# Contenders that make the same dump and differ by more than this factor: the run is not usable.
AGREEMENT = 1.15
# The 97.5 % quantile of Student's t for 1, 2, ... degrees of freedom.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


def turns(names: Sequence[str], rounds: int) -> Iterator[tuple[str, ...]]:
    """The order of each round. Nobody comes directly after himself, across rounds too, where there
    are two or more; each follows each other, and has each place, as evenly as can be.

    Of all orders of a round the one is taken that leaves the counts so far most even.
    """
    followed: Counter[tuple[str, str]] = Counter()
    placed: Counter[tuple[int, str]] = Counter()
    before: tuple[str, ...] = ()

    def cost(order: tuple[str, ...]) -> tuple[int, int]:
        steps = list(itertools.pairwise([*before[-1:], *order]))
        after = followed + Counter(steps)
        places = placed + Counter(enumerate(order))
        return sum(n * n for n in after.values()), sum(n * n for n in places.values())

    for _ in range(rounds):
        orders = [
            order
            for order in itertools.permutations(names)
            if len(names) == 1 or not before or order[0] != before[-1]
        ]
        chosen = min(orders, key=cost)
        followed.update(itertools.pairwise([*before[-1:], *chosen]))
        placed.update(enumerate(chosen))
        before = chosen
        yield chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedRatio:
    """The geometric mean of ratios, and its INTERVAL: None for fewer than two pairs."""

    mean: float
    low: float | None
    high: float | None
    pairs: int

    def as_dict(self) -> dict[str, float | int | None]:
        return {
            "mean": round(self.mean, 4),
            "low": None if self.low is None else round(self.low, 4),
            "high": None if self.high is None else round(self.high, 4),
            "pairs": self.pairs,
        }


def paired_ratio(above: Sequence[float], below: Sequence[float]) -> PairedRatio:
    """above[i] over below[i], which were measured in the same round; all greater than 0.

    Raises ValueError if there is no pair, or a value that has no logarithm.
    """
    if len(above) != len(below) or not above:
        raise ValueError(f"{len(above)} and {len(below)} values are no pairs")
    logs = [math.log(one / other) for one, other in zip(above, below, strict=True)]
    mean = statistics.fmean(logs)
    if len(logs) == 1:
        return PairedRatio(mean=math.exp(mean), low=None, high=None, pairs=1)
    half = _quantile(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return PairedRatio(
        mean=math.exp(mean), low=math.exp(mean - half), high=math.exp(mean + half), pairs=len(logs)
    )


def unpaired_ratio(above: Sequence[float], below: Sequence[float]) -> PairedRatio:
    """The geometric mean of one over that of the other, of values that were measured at different
    times; the interval is Welch's, of the logarithms. pairs: the lesser count. All greater than 0.

    Raises ValueError if one is empty, or a value has no logarithm.
    """
    if not above or not below:
        raise ValueError("there is no value to take a ratio of")
    logs = [[math.log(value) for value in values] for values in (above, below)]
    mean = statistics.fmean(logs[0]) - statistics.fmean(logs[1])
    pairs = min(len(above), len(below))
    if pairs == 1:
        return PairedRatio(mean=math.exp(mean), low=None, high=None, pairs=1)
    shares = [statistics.variance(values) / len(values) for values in logs]
    freedom = (
        sum(shares) ** 2
        / sum(share**2 / (len(values) - 1) for share, values in zip(shares, logs, strict=True))
        if any(shares)
        else 1.0
    )
    half = _quantile(max(1, math.floor(freedom))) * math.sqrt(sum(shares))
    return PairedRatio(
        mean=math.exp(mean), low=math.exp(mean - half), high=math.exp(mean + half), pairs=pairs
    )


def _quantile(freedom: int) -> float:
    return _T[freedom - 1] if freedom <= len(_T) else 1.96 + 2.4 / freedom


def disagreements(rounds: Iterable[Round], groups: Mapping[str, str]) -> list[str]:
    """Contenders whose dump is the same, but not their time: a sentence for each.

    groups: contender -> the one that makes the same dump. Held against each other is what criu
    alone took, without driver and tools. A difference of more than AGREEMENT, in the mean of the
    pairs, says that the machine did something else meanwhile.
    """
    by_place: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for each in rounds:
        contenders = by_place.setdefault((each.workload, each.medium), {})
        contenders.setdefault(each.contender, {})[each.pair] = each.criu_seconds
    found = []
    for (workload, medium), contenders in by_place.items():
        for name, reference in groups.items():
            if name not in contenders or reference not in contenders:
                continue
            own, other = contenders[name], contenders[reference]
            both = sorted(own.keys() & other.keys())
            if not both:
                continue
            ratio = paired_ratio([own[pair] for pair in both], [other[pair] for pair in both])
            if not 1 / AGREEMENT <= ratio.mean <= AGREEMENT:
                found.append(
                    f"{workload} on {medium}: the dumps of {name} and {reference} are the same, "
                    f"and took {ratio.mean:.2f} of one another"
                )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One dump and restore. Seconds without the driver's, which stand in *_driver_seconds.

    pair counts from 0. criu_seconds: of the dump, without the tool that follows. peak_rss_bytes:
    the larger of dump and restore; each stands beside it.
    """

    workload: str
    medium: str
    contender: str
    pair: int
    dump_seconds: float
    frozen_seconds: float
    restore_seconds: float
    stored_bytes: int
    dump_peak_rss_bytes: int
    restore_peak_rss_bytes: int
    dump_driver_seconds: float
    restore_driver_seconds: float
    criu_seconds: float

    @property
    def peak_rss_bytes(self) -> int:
        return max(self.dump_peak_rss_bytes, self.restore_peak_rss_bytes)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Least, greatest, and half the distance between the quartiles over the median."""
    if not values:
        raise ValueError("there is no value to take a spread of")
    middle = statistics.median(values)
    if len(values) > 1:
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    else:
        low = high = middle
    relative = (high - low) / 2 / middle if middle else 0.0
    return {"least": min(values), "greatest": max(values), "relative": round(relative, 4)}


def summarise(rounds: Iterable[Round], reference: str) -> list[dict[str, Any]]:
    """One object for each workload, medium and contender, in the order in which they come.

    Each figure is a median. `ratios` are of `reference` over this one for times, this one over the
    reference for sizes, pair by pair (PairedRatio.as_dict); `ratios_with_driver` the same of times
    with the driver's; None where the reference was not measured, or a figure is 0.
    """
    groups: dict[tuple[str, str, str], list[Round]] = {}
    for each in rounds:
        groups.setdefault((each.workload, each.medium, each.contender), []).append(each)
    medians = {
        key: {name: _median(members, name) for name in (*FIGURES, *DRIVER_FIGURES)}
        for key, members in groups.items()
    }
    found = []
    for (workload, medium, contender), members in groups.items():
        own = medians[workload, medium, contender]
        other = groups.get((workload, medium, reference), [])
        found.append(
            {
                "workload": workload,
                "medium": medium,
                "contender": contender,
                "pairs": len(members),
                **{name: own[name] for name in FIGURES},
                "with_driver": {
                    name: round(statistics.median(_value(each, name, True) for each in members), 6)
                    for name in TIMES
                },
                "driver_seconds": {
                    "dump": own["dump_driver_seconds"],
                    "restore": own["restore_driver_seconds"],
                },
                "spread": {
                    name: spread([getattr(each, name) for each in members]) for name in FIGURES
                },
                "ratios": {name: _ratio(name, members, other) for name in FIGURES},
                "ratios_with_driver": {
                    name: _ratio(name, members, other, with_driver=True) for name in TIMES
                },
                "rounds": [asdict(each) for each in members],
            }
        )
    return found


def _ratio(
    name: str, own: Sequence[Round], other: Sequence[Round], *, with_driver: bool = False
) -> dict[str, float | int | None] | None:
    """Greater is better for times (reference over own), less for sizes (own over reference)."""
    mine = {each.pair: _value(each, name, with_driver) for each in own}
    theirs = {each.pair: _value(each, name, with_driver) for each in other}
    pairs = sorted(mine.keys() & theirs.keys())
    if not pairs or min(*mine.values(), *theirs.values()) <= 0:
        return None
    values = [mine[pair] for pair in pairs], [theirs[pair] for pair in pairs]
    below, above = values if name in TIMES else values[::-1]
    return paired_ratio(above, below).as_dict()


def _value(each: Round, name: str, with_driver: bool) -> float:
    value = float(getattr(each, name))
    return value + getattr(each, _DRIVER_OF[name]) if with_driver else value


def _median(members: list[Round], name: str) -> float:
    value = statistics.median(getattr(each, name) for each in members)
    return int(value) if name.endswith("_bytes") else round(value, 6)
