# SPDX-License-Identifier: Apache-2.0
"""The figures that a plan is made from: names, units and bounds, and where each comes from."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Source = Literal["option", "file", "measured", "default"]
GROUPS = ("", "disk", "user", "peer")  # of figures, which are tables in a file


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure. group: the table in a file; "": none. default: None: it may be left out.

    low, high: the least and the most that is believed. whole: it is a count.
    """

    group: str
    name: str
    help: str
    low: float = 0.0
    high: float = 1e12
    default: float | None = None
    whole: bool = False

    @property
    def key(self) -> str:
        """In a file and in JSON: "disk.downtime_s"."""
        return f"{self.group}.{self.name}" if self.group else self.name

    def check(self, value: object) -> float:
        """The value, if it is one for this figure. Raises ValueError."""
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not self.low <= value <= self.high  # which NaN is not
        ):
            raise ValueError(
                f"{self.key} is {reprlib.repr(value)}, not a number from {self.low:g} to "
                f"{self.high:g}"
            )
        if self.whole and value != int(value):
            raise ValueError(f"{self.key} is {value:g}, not a whole number")
        return value


def _stops(group: str, what: str) -> tuple[Figure, ...]:
    """What one way of taking checkpoints has."""
    return (
        Figure(
            group=group, name="downtime_s", help=f"Seconds that a checkpoint {what} stops the job."
        ),
        Figure(
            group=group,
            name="drain_s",
            help="Seconds before that, in which GPU work comes to an end and none begins.",
            default=0,
        ),
        Figure(
            group=group,
            name="write_s",
            help="Seconds after that, while the job works, until the checkpoint can be used.",
            default=0,
        ),
        Figure(
            group=group,
            name="restore_s",
            help="Seconds that a restore takes, until the job works again.",
        ),
        Figure(
            group=group, name="size_gb", help="GB of one checkpoint of the whole job.", default=0
        ),
        Figure(
            group=group,
            name="slowdown",
            help="Share of all work, 0 to 1, that it costs while the job works.",
            high=0.999,
            default=0,
        ),
    )


FIGURES: tuple[Figure, ...] = (
    Figure(group="", name="gpus", help="GPUs of the job.", low=1, high=1e8, whole=True),
    Figure(
        group="", name="gpus_per_node", help="Of one node.", low=1, high=1e4, default=8, whole=True
    ),
    Figure(
        group="",
        name="gpu_failures",
        help="Failures in 1,000 days of one GPU.",
        default=0,
        high=1e9,
    ),
    Figure(
        group="",
        name="node_failures",
        help="Failures in 1,000 days of one node, beside those of its GPUs.",
        default=0,
        high=1e9,
    ),
    Figure(
        group="",
        name="mtbf_h",
        help="Hours from one failure of the whole job to the next, in place of these two.",
        low=1e-6,
        high=1e9,
    ),
    Figure(
        group="",
        name="detect_s",
        help="Seconds from a failure until a restore begins: it is noticed, nodes are found.",
        default=300,
    ),
    Figure(
        group="",
        name="start_s",
        help="Seconds that a fresh start takes, without a checkpoint.",
        default=300,
    ),
    Figure(
        group="",
        name="work_h",
        help="Hours of work that the job consists of; what it would do without checkpoints.",
        low=1e-3,
        high=1e7,
        default=720,
    ),
    Figure(
        group="",
        name="interval_s",
        help="Seconds of work between checkpoints to look at, beside the best.",
        low=1e-3,
    ),
    Figure(
        group="",
        name="least_interval_s",
        help="Seconds of work that are always between two checkpoints.",
        low=1e-3,
        default=60,
    ),
    Figure(
        group="", name="keep", help="Checkpoints that are kept.", default=2, high=1e6, whole=True
    ),
    Figure(group="", name="price_gpu_hour", help="Price of a GPU hour.", default=0),
    Figure(group="", name="price_gb_month", help="Price of a GB stored for a month.", default=0),
    *_stops("disk", "of gpustasis"),
    *_stops("user", "in user code"),
    Figure(
        group="peer",
        name="memory_gb_per_s",
        help="GB/s that a node copies GPU memory to its own memory with.",
        low=1e-6,
        high=1e6,
    ),
    Figure(
        group="peer",
        name="network_gb_per_s",
        help="GB/s that a node sends to another one with.",
        low=1e-6,
        high=1e6,
    ),
    Figure(
        group="peer",
        name="drain_s",
        help="Seconds before a copy, as --drain, which it is if left out.",
    ),
    Figure(
        group="peer",
        name="restore_s",
        help="Seconds of a restore beside the copying.",
        default=0,
    ),
    Figure(
        group="peer",
        name="size_gb",
        help="GB of one copy of the whole job; without it, --size.",
        low=0,
    ),
    Figure(
        group="peer",
        name="slowdown",
        help="Share of all work, 0 to 1, that sending costs.",
        high=0.999,
        default=0,
    ),
)
BY_KEY = {figure.key: figure for figure in FIGURES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A figure's value, and where it comes from."""

    value: float
    source: Source


class Figures:
    """The values of a plan. Sources that come earlier win."""

    def __init__(self, *sources: tuple[Source, Mapping[str, object]]) -> None:
        """Each source by key. Raises ValueError for an unknown key, or a value out of bounds."""
        self._given: dict[str, Given] = {}
        for source, values in sources:
            for key, value in values.items():
                if key not in BY_KEY:
                    raise ValueError(f"{key!r} is no figure of a plan")
                checked = BY_KEY[key].check(value)
                self._given.setdefault(key, Given(value=checked, source=source))
        for figure in FIGURES:
            if figure.default is not None:
                default = Given(value=figure.default, source="default")
                self._given.setdefault(figure.key, default)

    def __getitem__(self, key: str) -> float:
        """Raises ValueError if it is not given."""
        if key not in self._given:
            raise ValueError(f"{key} is not given: {BY_KEY[key].help}")
        return self._given[key].value

    def find(self, key: str) -> float | None:
        """None: it is not given."""
        return self._given[key].value if key in self._given else None

    def is_given(self, group: str) -> bool:
        """Whether a figure of the group comes from anywhere but the defaults."""
        return any(
            key.startswith(f"{group}.") and given.source != "default"
            for key, given in self._given.items()
        )

    def all(self) -> dict[str, Given]:
        """By key, in the order of FIGURES."""
        return {key: self._given[key] for key in BY_KEY if key in self._given}
