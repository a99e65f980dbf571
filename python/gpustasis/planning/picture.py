# SPDX-License-Identifier: Apache-2.0
"""The picture of a plan, as SVG: which interval is best, and what comes of a smaller or larger job.

Written here and not with a plot library, because it is two pairs of axes with a few lines, and the
command has to work on hosts where nothing is installed for it. Lines differ in dashes and marks as
well as in colour. The same plan makes the same file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

from gpustasis.planning.curves import Curve, by_interval, by_size
from gpustasis.planning.plan import Plan, Way
from gpustasis.planning.words import count, percent, short, span

_WIDTH, _HEIGHT = 1040, 560
_TOP, _BOTTOM = 84, 400  # of both pairs of axes
_LEFT, _RIGHT = (76, 500), (596, 1020)
_LEGEND = 476
_ROW = 22
_STEPS = 5  # of the axis of ETTR
# By name of a way: colour, dashes, width. Darker and lighter in grey, too.
_LINES = {
    "none": ("#767676", "2 4", 2.0),
    "user": ("#9c3400", "9 4", 2.0),
    "disk": ("#000000", "", 2.6),
    "peer": ("#4a9bd9", "12 4 2 4", 2.2),
}
_SPANS = (
    *((1.0, "1 s"), (10.0, "10 s"), (60.0, "1 min"), (600.0, "10 min"), (3600.0, "1 h")),
    *((6 * 3600.0, "6 h"), (86400.0, "1 d"), (7 * 86400.0, "7 d"), (30 * 86400.0, "30 d")),
)


@dataclass(frozen=True, slots=True)
class _Axes:
    """A pair of axes: x logarithmic from low to high, y from floor to 1."""

    left: int
    right: int
    low: float
    high: float
    floor: float

    def x(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.left + (self.right - self.left) * share

    def y(self, value: float) -> float:
        share = (max(value, self.floor) - self.floor) / (1 - self.floor)
        return _BOTTOM - (_BOTTOM - _TOP) * share


def draw(plan: Plan) -> str:
    """The SVG."""
    return "\n".join(_parts(plan)) + "\n"


def _parts(plan: Plan) -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="13">'
    )
    yield f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>'
    title = f"{count(plan.gpus, 'GPU')}, {count(plan.nodes, 'node')}, a failure every "
    title += span(plan.mtbf_s)
    yield _text(_LEFT[0], 28, title, size=16, weight="bold")
    (low, high), curves = by_interval(plan)
    axes = _Axes(*_LEFT, low, high, 1 - _depth(4 * max(1 - curve.mark[1] for curve in curves)))
    yield from _frame(axes, "Which interval", "work between two checkpoints", _SPANS)
    for curve in curves:
        yield from _curve(axes, curve)
    (low, high), curves = by_size(plan)
    axes = _Axes(*_RIGHT, low, high, 0.0)
    yield from _frame(
        axes, "Which size, each at its best interval", "GPUs of the job", _powers(low, high)
    )
    for curve in curves:
        yield from _curve(axes, curve)
    yield from _legend(plan)
    yield "</svg>"


def _depth(wanted: float) -> float:
    """How far below 1 the axis begins: 1, 2 or 5 times a power of ten, and at most 1."""
    depths = (digit * 10.0**power for power in range(-6, 0) for digit in (1, 2, 5))
    return next((depth for depth in depths if depth >= wanted), 1.0)


def _frame(
    axes: _Axes, title: str, label: str, ticks: Iterable[tuple[float, str]]
) -> Iterator[str]:
    yield _text(axes.left, _TOP - 26, title, weight="bold")
    yield _text(axes.left, _TOP - 9, "ETTR: share of time that is training which counts", size=12)
    for number in range(_STEPS + 1):
        value = 1 - (1 - axes.floor) * number / _STEPS
        y = axes.y(value)
        yield _line(axes.left, y, axes.right, y, "#dddddd")
        yield _text(axes.left - 8, y + 4, f"{100 * value:.6g} %", anchor="end")
    for tick, text in ticks:
        if not axes.low <= tick <= axes.high:
            continue
        x = axes.x(tick)
        yield _line(x, _TOP, x, _BOTTOM + 5, "#dddddd")
        yield _text(x, _BOTTOM + 20, text, anchor="middle")
    yield (
        f'<rect x="{axes.left}" y="{_TOP}" width="{axes.right - axes.left}" '
        f'height="{_BOTTOM - _TOP}" fill="none" stroke="#333333"/>'
    )
    yield _text((axes.left + axes.right) / 2, _BOTTOM + 42, label, anchor="middle")


def _powers(low: float, high: float) -> list[tuple[float, str]]:
    """Powers of four, which are easily told."""
    powers = [4**power for power in range(math.ceil(math.log(high, 4)) + 1)]
    return [(float(value), f"{value:,}") for value in powers if value >= low * (1 - 1e-9)]


def _curve(axes: _Axes, curve: Curve) -> Iterator[str]:
    colour, dashes, width = _LINES[curve.way.name]
    for piece in _pieces(axes, curve.points):
        points = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in piece)
        yield (
            f'<polyline fill="none" stroke="{colour}" stroke-width="{width}" '
            f'stroke-dasharray="{dashes}" points="{points}"/>'
        )
    x, y = curve.mark
    if y >= axes.floor:
        yield _mark(curve.way, axes.x(x), axes.y(y))


def _pieces(
    axes: _Axes, points: tuple[tuple[float, float], ...]
) -> Iterator[list[tuple[float, float]]]:
    """Runs of points that are not below the axis."""
    piece: list[tuple[float, float]] = []
    for point in points:
        if point[1] >= axes.floor:
            piece.append(point)
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece


def _mark(way: Way, x: float, y: float) -> str:
    colour = _LINES[way.name][0]
    style = f'fill="#ffffff" stroke="{colour}" stroke-width="2"'
    corners: dict[str, Callable[[], str]] = {
        "user": lambda: _polygon(x, y, ((-9, 7), (9, 7), (0, -9)), style),
        "disk": lambda: f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" {style}/>',
        "peer": lambda: _polygon(x, y, ((0, -7), (7, 0), (0, 7), (-7, 0)), style),
        "none": lambda: _polygon(x, y, ((-5, -5), (5, -5), (5, 5), (-5, 5)), style),
    }
    return corners[way.name]()


def _polygon(x: float, y: float, corners: tuple[tuple[int, int], ...], style: str) -> str:
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    return f'<polygon points="{points}" {style}/>'


def _legend(plan: Plan) -> Iterator[str]:
    for row, way in enumerate(plan.ways):
        y = _LEGEND + row * _ROW
        colour, dashes, width = _LINES[way.name]
        yield _line(_LEFT[0], y - 4, _LEFT[0] + 64, y - 4, colour, width, dashes)
        yield _mark(way, _LEFT[0] + 32, y - 4)
        yield _text(_LEFT[0] + 76, y, way.title)
        interval = f"every {span(way.best.interval_s)}" if way.takes_checkpoints else ""
        yield _text(_LEFT[0] + 340, y, interval)
        yield _text(_LEFT[0] + 470, y, f"ETTR {percent(way.best.ettr)}")
        hours = f"{short(way.best.lost_gpu_hours)} GPU hours lost in a month"
        yield _text(_LEFT[0] + 590, y, hours)


def _line(
    x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1, dashes: str = ""
) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
        f'stroke-width="{width}" stroke-dasharray="{dashes}"/>'
    )


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 13, weight: str = "normal"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'font-weight="{weight}" fill="#000000">{escape(text)}</text>'
    )
