# SPDX-License-Identifier: Apache-2.0
"""Rules for what to keep, against what they say in words."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpustasis.image.prune import Rules, choose, parse_duration

NOON = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


def every(minutes: int, count: int) -> dict[str, datetime]:
    """The newest is "000", at noon."""
    return {f"{n:03}": NOON - timedelta(minutes=minutes * n) for n in range(count)}


def test_the_last_so_many() -> None:
    assert choose(every(10, 9), Rules(last=2)) == {"000": ["last"], "001": ["last"]}


def test_within_counts_from_the_newest() -> None:
    kept = choose(every(10, 9), Rules(within=timedelta(minutes=20)))
    assert sorted(kept) == ["000", "001", "002"]


def test_hourly_keeps_the_newest_of_an_hour() -> None:
    # 12:00, 11:50 ... 11:00, 10:50, ...
    assert sorted(choose(every(10, 20), Rules(hourly=3))) == ["000", "001", "007"]


def test_daily_keeps_the_newest_of_a_day_that_has_any() -> None:
    times = {"a": NOON, "b": NOON - timedelta(hours=1), "c": NOON - timedelta(days=9)}
    assert choose(times, Rules(daily=2)) == {"a": ["daily"], "c": ["daily"]}


def test_rules_add_up() -> None:
    kept = choose(every(10, 9), Rules(last=1, daily=1))
    assert kept == {"000": ["last", "daily"]}


def test_nothing_to_choose_from() -> None:
    assert choose({}, Rules(last=1, within=timedelta(1), hourly=1, daily=1)) == {}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1800), ("24h", 86400), ("7d", 604800), ("2w", 1209600)],
)
def test_durations(text: str, seconds: int) -> None:
    assert parse_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["", "h", "0h", "24", "-1h", "1.5h", "24 h", "1y", "999999999w"])
def test_no_durations(text: str) -> None:
    with pytest.raises(ValueError, match="is"):
        parse_duration(text)


numbers = st.none() | st.integers(1, 5)
moments = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=3),
    st.integers(0, 60 * 24 * 6).map(lambda minutes: NOON - timedelta(minutes=minutes)),
    max_size=30,
)


@given(
    times=moments,
    last=numbers,
    hours=st.none() | st.integers(1, 60),
    hourly=numbers,
    daily=numbers,
)
def test_each_rule_keeps_what_it_says(
    times: dict[str, datetime],
    last: int | None,
    hours: int | None,
    hourly: int | None,
    daily: int | None,
) -> None:
    within = None if hours is None else timedelta(hours=hours)
    rules = Rules(last=last, within=within, hourly=hourly, daily=daily)
    kept = choose(times, rules)
    newest_first = sorted(times, key=lambda name: (times[name], name), reverse=True)
    by_rule: dict[str, list[str]] = {rule: [] for rule in ("last", "within", "hourly", "daily")}
    for name in newest_first:
        for rule in kept.get(name, []):
            by_rule[rule].append(name)

    assert by_rule["last"] == newest_first[: last or 0]
    limit = within or timedelta(days=-1)
    newest = times[newest_first[0]] if times else NOON
    assert by_rule["within"] == [n for n in newest_first if newest - times[n] <= limit]
    for rule, count, form in (("hourly", hourly, "%Y-%m-%d %H"), ("daily", daily, "%Y-%m-%d")):
        periods = [times[name].strftime(form) for name in newest_first]
        wanted = list(dict.fromkeys(periods))[: count or 0]
        assert [times[name].strftime(form) for name in by_rule[rule]] == wanted
        assert by_rule[rule] == [newest_first[periods.index(period)] for period in wanted]
    if times and not rules.empty:
        assert newest_first[0] in kept
