# SPDX-License-Identifier: Apache-2.0
"""Rules that say which checkpoints to keep. Nothing here looks at files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

_UNITS = {
    "s": timedelta(seconds=1),
    "m": timedelta(minutes=1),
    "h": timedelta(hours=1),
    "d": timedelta(days=1),
    "w": timedelta(weeks=1),
}
_DURATION = re.compile(r"([1-9][0-9]{0,8})([smhdw])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """A checkpoint is kept if any of these says so; None: that rule is not there.

    last: the newest so many. within: those not older than the newest by more than this. hourly,
    daily: the newest of each of the latest so many hours or days, by the clock of the times given,
    that have any. Numbers are at least 1, so that the newest is kept whatever the rule.
    """

    last: int | None = None
    within: timedelta | None = None
    hourly: int | None = None
    daily: int | None = None

    @property
    def empty(self) -> bool:
        return self == Rules()


def parse_duration(text: str) -> timedelta:
    """Of "90s", "30m", "24h", "7d" or "2w". Raises ValueError."""
    found = _DURATION.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not a number followed by one of {', '.join(_UNITS)}")
    try:
        return int(found[1]) * _UNITS[found[2]]
    except OverflowError as exc:
        raise ValueError(f"{text!r} is too long") from exc


def choose(times: Mapping[str, datetime], rules: Rules) -> dict[str, list[str]]:
    """Which names to keep, each with the rules that say so. Of two of the same time, the name that
    sorts last counts as the newer one."""
    newest_first = sorted(times, key=lambda name: (times[name], name), reverse=True)
    kept: dict[str, list[str]] = {}

    def keep(name: str, rule: str) -> None:
        kept.setdefault(name, []).append(rule)

    for name in newest_first[: rules.last or 0]:
        keep(name, "last")
    if rules.within is not None and newest_first:
        newest = times[newest_first[0]]
        for name in newest_first:
            if newest - times[name] <= rules.within:
                keep(name, "within")
    periods: tuple[tuple[str, int | None, Callable[[datetime], object]], ...] = (
        ("hourly", rules.hourly, lambda time: (time.date(), time.hour, time.utcoffset())),
        ("daily", rules.daily, lambda time: time.date()),
    )
    for rule, count, period_of in periods:
        seen: set[object] = set()
        for name in newest_first:
            period = period_of(times[name])
            if period not in seen and len(seen) < (count or 0):
                seen.add(period)
                keep(name, rule)
    return kept
