# SPDX-License-Identifier: Apache-2.0
"""How figures of a plan are written for people."""

from __future__ import annotations

_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


def span(seconds: float) -> str:
    """Such as "45 s", "12.3 min", "2.5 h" or "30 d"."""
    for size, unit in _UNITS:
        if seconds >= 2 * size or unit == "s":
            return f"{short(seconds / size)} {unit}"
    raise AssertionError


def short(value: float) -> str:
    """Three digits of a number, with no power of ten: "12.3", "1,234", "0.00123"."""
    if value >= 1000:
        return f"{value:,.0f}"
    text = f"{value:.3g}"
    return f"{value:.3f}" if "e" in text else text


def count(number: int, noun: str) -> str:
    """Such as "1 node" or "2,048 nodes"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def percent(share: float) -> str:
    """Such as "97.1 %"; one digit more from 99 % on, as long as it is not 100."""
    return f"{100 * share:.{2 if 0.99 <= share < 0.99995 else 1}f} %"
