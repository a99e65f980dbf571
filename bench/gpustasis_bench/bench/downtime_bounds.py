# SPDX-License-Identifier: Apache-2.0
"""What the downtimes must show, what could be reached here at best, and the model beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from gpustasis_bench.bench.bounds import Bound
from gpustasis_bench.bench.contenders import (
    DIRECT,
    OURS,
    OURS_BOTH,
    OURS_DIRECT,
    OURS_KEPT,
    OURS_RAM,
    STAGED,
    STOCK,
)
from gpustasis_bench.bench.content import FINETUNING, QLORA
from gpustasis_bench.bench.downtime_limits import DRIVER_PARTS, Limits, Parts
from gpustasis_bench.bench.statistics import unpaired_ratio

_OURS_WAYS = {OURS: STAGED, OURS_RAM: STAGED, OURS_DIRECT: DIRECT, OURS_BOTH: DIRECT}
_DOWNTIME, _WITHOUT_DRIVER, _DIRECT_DOWNTIME = 1.25, 2.0, 3.5
_MANY = 8  # tasks, each with a GPU
_MANY_GPUS = ((_MANY, 1), (1, _MANY))  # tasks, GPUs of each
_MANY_OVER_ONE = 1.6
_MANY_STOCK = {STAGED: 4.0, DIRECT: 8.0}
_HOST_MIB = 600.0
_SECOND = 2.0
_WARM = 0.6
_SLOWDOWN = 5.0  # percent


def evaluate_downtime(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every bound of the part `downtime` of the report (build/bench.json without `bounds`); none if
    that part was not asked for. What was not measured says why."""
    if report["downtime"] is None:
        return []
    of = _Part(report)
    first = "fine-tuning downtime, stock over ours ram"
    found = [
        of.content(OURS_RAM, "downtime_seconds", _DOWNTIME, first),
        of.content(
            OURS_RAM,
            "without_driver_seconds",
            _WITHOUT_DRIVER,
            "the same, without the driver's time",
        ),
    ]
    found += [
        of.content(
            name,
            "downtime_seconds",
            _DIRECT_DOWNTIME,
            f"fine-tuning downtime, stock (staged) over {name}",
        )
        for name in (OURS_BOTH, OURS_DIRECT)
    ]
    found += [of.many_over_one(name, *shape) for shape in _MANY_GPUS for name in _OURS_WAYS]
    found += [of.many(name, stage) for name in _OURS_WAYS for stage in ("dump", "restore")]
    found += [of.many(name, "warm_restore") for name in (OURS_RAM, OURS_BOTH)]
    found += [of.host_memory(), *(of.second(name) for name in (OURS, OURS_KEPT, OURS_RAM))]
    found += [of.warm(), of.neighbours()]
    return [asdict(bound) for bound in found]


def hold_model(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the model says of each measured shape, and what was measured: `predicted_seconds`,
    `measured_seconds`, `ratio` (measured over predicted), `parts`. Empty without limits."""
    limits = Limits(report)
    rows = []
    for shape in (report["downtime"] or {}).get("shapes", []):
        for name, one in shape["contenders"].items():
            predicted = limits.predicted(name, shape)
            if predicted is None:
                continue
            measured = one["downtime_seconds"]
            rows.append(
                {
                    **{key: shape[key] for key in ("gpus", "tasks", "rates")},
                    "contender": name,
                    "predicted_seconds": round(predicted.downtime, 4),
                    "measured_seconds": measured,
                    "ratio": round(measured / predicted.downtime, 3),
                    "parts": predicted.as_dict(),
                }
            )
    return rows


class _Part:
    def __init__(self, report: Mapping[str, Any]) -> None:
        self._report = report
        self.found: Mapping[str, Any] = report["downtime"] or {}
        self._limits = Limits(report)
        self._medium = self.found.get("medium", "-")

    def content(self, name: str, figure: str, limit: float, title: str) -> Bound:
        content = self._entry("contents", workload=FINETUNING)
        ratio = content and content["ratios"].get(name, {}).get(figure)
        bound = self._bound(title, ">=", limit, ratio, name, f"fine-tuning as {name}")
        there = content and name in content["ratios"]
        parts = self._limits.of_dump(name, content) if content and there else None
        if not content or not parts:
            return bound
        if figure == "without_driver_seconds":
            parts = {key: value for key, value in parts.items() if key not in DRIVER_PARTS}
        return _beside(bound, parts, content["contenders"][STOCK].get(figure), sum(parts.values()))

    def many_over_one(self, name: str, tasks: int, gpus: int) -> Bound:
        """Of so many tasks with so many GPUs each. The two shapes were measured at different
        times."""
        many = self._entry("shapes", tasks=tasks, gpus=gpus, rates="published")
        one = self._entry("shapes", tasks=1, gpus=1, rates="published")
        there = many and one and name in many["contenders"] and name in one["contenders"]
        what = f"{tasks} tasks with a GPU each" if tasks > 1 else f"a task with {gpus} GPUs"
        title = f"downtime of {what} over that of one with one, same memory each, {name}"
        ratio = None
        if many and one and there:
            above, below = (
                each["contenders"][name]["rounds"]["downtime_seconds"] for each in (many, one)
            )
            ratio = unpaired_ratio(above, below).as_dict()
        bound = self._bound(title, "<=", _MANY_OVER_ONE, ratio, name, f"{what} as {name}")
        parts = self._limits.of_dump(name, many) if many and there else None
        if not parts or not one:
            return bound
        least = one["contenders"][name]["downtime_seconds"]
        return _over(bound, parts, sum(parts.values()), least)

    def many(self, name: str, stage: str) -> Bound:
        shape = self._entry("shapes", tasks=_MANY, gpus=1, rates="published")
        ratio = shape and shape["ratios"].get(name, {}).get(f"{stage}_seconds")
        least = _MANY_STOCK[_OURS_WAYS[name]]
        what, stocks = stage, "stock (staged)"
        if stage == "warm_restore":
            what, stocks = "restore from memory", "stock (staged, page cache)"
        title = f"{what} of {_MANY} tasks with a GPU each, {stocks} over {name}"
        bound = self._bound(title, ">=", least, ratio, name, f"{_MANY} tasks as {name}")
        if not shape or not ratio:
            return bound
        stock = shape["contenders"][STOCK][f"{stage}_seconds"]
        if stage == "dump":
            parts = self._limits.of_dump(name, shape)
            return _beside(bound, parts, stock, sum(parts.values())) if parts else bound
        fixed = min(shape[f"fixed_{stage}_seconds"][one] for one in (name, STOCK))
        read = shape["contenders"][name]["reading_seconds"] if stage == "restore" else 0.0
        limit = self._limits.of_restore(name, shape, fixed, read)
        return _beside(bound, limit[0], stock, limit[1]) if limit else bound

    def host_memory(self) -> Bound:
        content = self._entry("contents", workload=FINETUNING)
        there = content and OURS_DIRECT in content["contenders"]
        name = "host memory beyond the job, direct dump of fine-tuning, MiB"
        if not content or not there:
            why = self._why(OURS_DIRECT, f"fine-tuning as {OURS_DIRECT}")
            return _not_measured(name, f"<= {_HOST_MIB:g}", self._medium, why)
        mib = round(content["contenders"][OURS_DIRECT]["host_bytes"] / 2**20, 1)
        return Bound(
            name=name,
            bound=f"<= {_HOST_MIB:g}",
            medium=self._medium,
            measured=mib,
            met=mib <= _HOST_MIB,
        )

    def second(self, name: str) -> Bound:
        second = self._entry("second", workload=QLORA)
        one = second and second["contenders"].get(name)
        title = f"second QLoRA checkpoint, downtime of a full one over incremental, {name}"
        title += ", without the driver's time"
        ratio = one["ratio_without_driver"] if one else None
        bound = self._bound(title, ">=", _SECOND, ratio, name, f"second checkpoint as {name}")
        limit = self._limits.of_second(name, second, one) if second and one else None
        if not one or not limit:
            return bound
        return _beside(bound, limit[0], one["without_driver_seconds"]["full"], limit[1])

    def warm(self) -> Bound:
        content = self._entry("contents", workload=FINETUNING)
        one = content and content["contenders"].get(OURS_RAM)
        ratio = one["warm_over_cold"] if one else None
        title = f"restore from memory over one from the disk, fine-tuning, {OURS_RAM}"
        bound = self._bound(title, "<=", _WARM, ratio, OURS_RAM, f"fine-tuning as {OURS_RAM}")
        limit = content and one and self._limits.of_restore(OURS_RAM, content, 0.0, 0.0)
        if not one or not limit:
            return bound
        return _over(bound, *limit, one["restore_seconds"])

    def neighbours(self) -> Bound:
        """Nothing is known that limits it: the drain's own processor time would excuse a drain that
        wastes it."""
        name = "slowdown of programs on all processors beside a drain, percent"
        one = self._entry("neighbours")
        if not one:
            return _not_measured(
                name,
                f"<= {_SLOWDOWN:g}",
                self._medium,
                self._why(OURS_RAM, "neighbours of a drain"),
            )
        slower = {  # the lowest share of the rounds is the greatest slowdown
            end: None if share is None else round(100 * (1 - share), 2)
            for end, share in (
                ("mean", one["ratio"]["mean"]),
                ("low", one["ratio"]["high"]),
                ("high", one["ratio"]["low"]),
            )
        }
        return Bound.of_ratio(name, "<=", _SLOWDOWN, self._medium, slower)

    def _entry(self, part: str, **keys: Any) -> dict[str, Any] | None:
        for each in self.found.get(part, []):
            if all(each[key] == value for key, value in keys.items()):
                return dict(each)
        return None

    def _bound(
        self,
        title: str,
        sign: str,
        limit: float,
        ratio: Mapping[str, Any] | None,
        name: str,
        part: str,
    ) -> Bound:
        if not ratio:
            why = self._why(name, part)
            return _not_measured(title, f"{sign} {limit:g}", self._medium, why)
        return Bound.of_ratio(title, sign, limit, self._medium, ratio)

    def _why(self, name: str, part: str) -> str:
        """Why there is no figure of a contender in a part of the run."""
        absent = self.found.get("absent", {})
        if name in absent:
            return f"{name}: {absent[name]}"
        failed = [each for each in self._report["failures"] if each.startswith("downtime")]
        if failed:
            return f"{part}: {failed[0]}"
        return f"{part}: not asked for, or no figure greater than 0 was left"


def _not_measured(name: str, bound: str, medium: str, why: str) -> Bound:
    return Bound(name=name, bound=bound, medium=medium, measured=None, met=False, not_measured=why)


def _over(bound: Bound, parts: Parts, seconds: float, other: float) -> Bound:
    """With what could be reached here: the seconds of what must be done over the other's."""
    slowest = max(parts, key=lambda part: parts[part])
    return replace(
        bound,
        parts=parts,
        least_of=slowest,
        best=round(parts[slowest] / other, 3),
        in_turn=round(seconds / other, 3),
    )


def _beside(bound: Bound, parts: Parts, other: float | None, seconds: float) -> Bound:
    """With what could be reached here: the other's seconds over those that must be."""
    if not parts or not seconds or other is None:
        return bound
    slowest = max(parts, key=lambda part: parts[part])
    return replace(
        bound,
        parts=parts,
        least_of=slowest,
        best=round(other / parts[slowest], 3),
        in_turn=round(other / seconds, 3),
    )
