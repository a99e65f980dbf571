"""Medians, spreads and ratios of what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

FIGURES = ("dump_seconds", "frozen_seconds", "restore_seconds", "stored_bytes", "peak_rss_bytes")
DRIVER_FIGURES = ("dump_driver_seconds", "restore_driver_seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One dump and restore. Seconds without the driver's, which stand in *_driver_seconds.

    pair counts from 0. peak_rss_bytes: the larger of dump and restore; each stands beside it.
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

    Each figure is a median; `ratios` are the medians of `reference` over ours for times, and ours
    over the reference's for sizes; None where the reference was not measured, or a figure is 0.
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
        other = medians.get((workload, medium, reference))
        found.append(
            {
                "workload": workload,
                "medium": medium,
                "contender": contender,
                "pairs": len(members),
                **{name: own[name] for name in FIGURES},
                "driver_seconds": {
                    "dump": own["dump_driver_seconds"],
                    "restore": own["restore_driver_seconds"],
                },
                "spread": {
                    name: spread([getattr(each, name) for each in members]) for name in FIGURES
                },
                "ratios": {name: ratio(name, own, other) for name in FIGURES},
                "rounds": [asdict(each) for each in members],
            }
        )
    return found


def ratio(name: str, own: dict[str, float], reference: dict[str, float] | None) -> float | None:
    """Greater is better for times (reference over own), less for sizes (own over reference)."""
    if reference is None:
        return None
    above, below = (reference, own) if name.endswith("_seconds") else (own, reference)
    return round(above[name] / below[name], 4) if below[name] else None


def _median(members: list[Round], name: str) -> float:
    value = statistics.median(getattr(each, name) for each in members)
    return int(value) if name.endswith("_bytes") else round(value, 6)
