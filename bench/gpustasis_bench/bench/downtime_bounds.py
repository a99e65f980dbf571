# SPDX-License-Identifier: Apache-2.0
"""What the downtimes must show, what could be reached here at best, and the model beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from gpustasis_bench.bench.bounds import WRITING, Bound
from gpustasis_bench.bench.contenders import (
    DIRECT,
    OURS,
    OURS_BOTH,
    OURS_DIRECT,
    OURS_KEPT,
    OURS_RAM,
    RATES,
    STAGED,
    STOCK,
)
from gpustasis_bench.bench.content import FINETUNING, QLORA
from gpustasis_bench.bench.model import PUBLISHED_WAYS, Predicted, Rates, Shape, host_of, predict
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
_PARTS = {
    "down": "the driver, to the host",
    "store": "storing",
    "drop": "dropping the pages",
    "refill": "putting them back",
    "up": "the driver, back",
}
# Direct memory is stored while the driver hands it over, and read while the driver takes it back:
# named after the slower of the two.
_DISK_MEANWHILE = "the disk, while the driver hands memory over"
_STORING_MEANWHILE = "storing, while the driver hands memory over"
_READING_MEANWHILE = "reading back, while the driver takes memory"
_FILLING = "the driver, back: the emulator fills GPU memory"
_DRIVER_PARTS = (_PARTS["down"], _PARTS["up"])


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
    of = _Part(report)
    rows = []
    for shape in of.found.get("shapes", []):
        for name, one in shape["contenders"].items():
            predicted = of.predicted(name, shape, with_fixed=True)
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
        self._limits = report["limits"]
        self._medium = self.found.get("medium", "-")

    def predicted(
        self,
        name: str,
        shape: Mapping[str, Any],
        *,
        with_fixed: bool = False,
        least: bool = False,
    ) -> Predicted | None:
        """Of a shape or a content, at this machine's bandwidths; None where these are not known.
        least: without what another setting would save, which is to take staging out of tasks."""
        in_memory = self._in_memory()
        if self._limits is None or not in_memory or shape.get("rates") == "off":
            return None
        way = PUBLISHED_WAYS[name]
        if least:
            way = replace(way, keeps=way.externalized and not way.direct)
        tasks, gpus = shape.get("tasks", 1), shape.get("gpus", 1)
        rates = self._rates(name, shape)
        fixed = shape["fixed_seconds"][name] if with_fixed else 0.0
        job = Shape(tasks=tasks, gpus=gpus, size=shape["gpu_bytes"] / tasks / gpus)
        host = host_of(self._limits, self._medium, in_memory, fixed, job)
        return predict(way, job, rates, host)

    def _rates(self, name: str, shape: Mapping[str, Any]) -> Rates:
        """Of the driver; those of contents, which have no `rates`, are not divided."""
        stage = DIRECT if PUBLISHED_WAYS[name].direct else STAGED
        return RATES[stage].divided(self.found["scale"] if "rates" in shape else 1.0)

    def _in_memory(self) -> str:
        """The medium that is a tmpfs; empty: none was measured."""
        media = self._report["machine"]["media"]
        return next((each for each, kind in media.items() if kind == "tmpfs"), "")

    def content(self, name: str, figure: str, limit: float, title: str) -> Bound:
        content = self._entry("contents", workload=FINETUNING)
        ratio = content and content["ratios"].get(name, {}).get(figure)
        bound = self._bound(title, ">=", limit, ratio, name, f"fine-tuning as {name}")
        there = content and name in content["ratios"]
        predicted = content and there and self.predicted(name, content, least=True)
        if not content or not predicted:
            return bound
        parts = _named(predicted)
        self._store_as_in_rounds(parts, name, content)
        if figure == "without_driver_seconds":
            parts = {key: value for key, value in parts.items() if key not in _DRIVER_PARTS}
        return _beside(bound, parts, content["contenders"][STOCK].get(figure), sum(parts.values()))

    def _store_as_in_rounds(
        self, parts: dict[str, float], name: str, shape: Mapping[str, Any]
    ) -> None:
        """Have the storing last as long as as many bytes took to write in the same rounds, and no
        more. What goes into memory first has no such rounds. Of direct memory the slower counts, of
        storing and the driver, and is named."""
        writing = shape["contenders"][name].get("writing_seconds")
        if not PUBLISHED_WAYS[name].direct:
            if writing is not None:
                parts[_PARTS["store"]] = round(writing, 4)
            return
        gpus = shape.get("tasks", 1) * shape.get("gpus", 1)
        size, rates = shape["gpu_bytes"] / gpus, self._rates(name, shape)
        down, up = round(size / rates.down, 4), round(size / rates.up, 4)
        title, storing = _STORING_MEANWHILE, parts.pop(_PARTS["down"])
        if writing is not None:
            title, storing = _DISK_MEANWHILE, round(writing, 4)
        parts[title if storing > down else _PARTS["down"]] = max(storing, down)
        back = parts.pop(_PARTS["up"])
        if writing is not None:  # it is read from the same disk
            back = max(up, round(shape["contenders"][name]["reading_seconds"], 4))
        parts[_READING_MEANWHILE if back > up else _PARTS["up"]] = back

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
        predicted = many and there and self.predicted(name, many, least=True)
        if not predicted or not one or not many:
            return bound
        parts = _named(predicted)
        self._store_as_in_rounds(parts, name, many)
        least = one["contenders"][name]["downtime_seconds"]
        slowest = max(parts, key=lambda part: parts[part])
        return replace(
            bound,
            parts=parts,
            least_of=slowest,
            best=round(parts[slowest] / least, 3),
            in_turn=round(sum(parts.values()) / least, 3),
        )

    def many(self, name: str, stage: str) -> Bound:
        shape = self._entry("shapes", tasks=_MANY, gpus=1, rates="published")
        ratio = shape and shape["ratios"].get(name, {}).get(f"{stage}_seconds")
        limit = _MANY_STOCK[_OURS_WAYS[name]]
        what, stocks = stage, "stock (staged)"
        if stage == "warm_restore":
            what, stocks = "restore from memory", "stock (staged, page cache)"
        title = f"{what} of {_MANY} tasks with a GPU each, {stocks} over {name}"
        bound = self._bound(title, ">=", limit, ratio, name, f"{_MANY} tasks as {name}")
        predicted = shape and ratio and self.predicted(name, shape, least=True)
        if not shape or not predicted:
            return bound
        stock = shape["contenders"][STOCK][f"{stage}_seconds"]
        if stage == "dump":
            parts = _named(predicted)
            self._store_as_in_rounds(parts, name, shape)
            return _beside(bound, parts, stock, sum(parts.values()))
        fixed = min(shape[f"fixed_{stage}_seconds"][one] for one in (name, STOCK))
        # By the rate alone: the model's way back of direct memory has the reading in it.
        back = shape["gpu_bytes"] / _MANY / self._rates(name, shape).up
        read = shape["contenders"][name]["reading_seconds"] if stage == "restore" else 0.0
        parts, seconds = self._of_restore(name, shape["gpu_bytes"], _MANY, fixed, back, read)
        return _beside(bound, parts, stock, seconds)

    def _of_restore(
        self, name: str, size: int, gpus: int, fixed: float, back: float, read: float
    ) -> tuple[dict[str, float], float]:
        """What a restore of noise must do, and all of it. The emulator's GPU memory is a file in
        memory of this machine, one for each GPU, that it makes and fills within the driver's time.
        back: that time by its rate; the slower of both counts. read: how long the images took to
        read from the disk; 0: they are in memory, and are written from where they lie."""
        written = self._limits[self._in_memory()]["write"]
        filling = size / (written["1"] if gpus == 1 else max(written.values()))
        title = _FILLING if filling > back else _PARTS["up"]
        parts = {"all but the bytes": fixed, title: round(max(filling, back), 4)}
        if read:
            parts[f"reading from {self._medium}"] = round(read, 4)
        if PUBLISHED_WAYS[name].direct:  # the driver takes what was read while more is read
            return parts, fixed + max(parts[title], read)
        # It never takes what is not in the task; a disk works while processors write it there.
        writing = size / max(self._limits["write_process"].values())
        parts[WRITING] = round(writing, 4)
        return parts, fixed + max(writing, read) + parts[title]

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
        if not one or not second or self._limits is None:
            return bound
        read = self._limits["read_process"]
        hashed = self._limits["xxh3"] * max(map(int, read))  # by as many threads at once
        parts = {
            "reading the process": round(second["gpu_bytes"] / max(read.values()), 4),
            "hashing it": round(second["gpu_bytes"] / hashed, 4),
        }
        full = one["without_driver_seconds"]["full"]
        return _beside(bound, parts, full, sum(parts.values()))

    def warm(self) -> Bound:
        content = self._entry("contents", workload=FINETUNING)
        one = content and content["contenders"].get(OURS_RAM)
        ratio = one["warm_over_cold"] if one else None
        title = f"restore from memory over one from the disk, fine-tuning, {OURS_RAM}"
        bound = self._bound(title, "<=", _WARM, ratio, OURS_RAM, f"fine-tuning as {OURS_RAM}")
        if not one or not content or self._limits is None or not self._in_memory():
            return bound
        size = content["gpu_bytes"]
        parts, seconds = self._of_restore(OURS_RAM, size, 1, 0.0, size / RATES[STAGED].up, 0.0)
        slowest = max(parts, key=lambda part: parts[part])
        cold = one["restore_seconds"]
        return replace(
            bound,
            parts=parts,
            least_of=slowest,
            best=round(parts[slowest] / cold, 3),
            in_turn=round(seconds / cold, 3),
        )

    def neighbours(self) -> Bound:
        """best, in_turn: the share of all processors that the drain itself needs, in percent."""
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
        bound = Bound.of_ratio(name, "<=", _SLOWDOWN, self._medium, slower)
        used, cores = one["window_cpu_seconds"], self._report["machine"]["cores"]
        least = round(100 * used / one["window_seconds"] / cores, 2)
        what = "the drain's processor time"
        return replace(
            bound,
            parts={what: used},
            least_of=what,
            best=least,
            in_turn=least,
        )

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


def _named(predicted: Predicted) -> dict[str, float]:
    parts = predicted.as_dict()
    return {title: parts[key] for key, title in _PARTS.items() if parts[key]}


def _beside(bound: Bound, parts: dict[str, float], other: float | None, seconds: float) -> Bound:
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
