# SPDX-License-Identifier: Apache-2.0
"""What the benchmark must show, and what this machine could show at best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from gpustasis_bench.bench.contenders import OURS, STOCK
from gpustasis_bench.errors import BenchError

WRITING = "writing into the process"
_DROP = "dropping the pages"
_CIPHER = "AES-256-GCM"
_MEMORY_BASE = 256 << 20
_MEMORY_SHARE = 0.001  # of the GPU memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """One promise. measured is None where it could not be measured, and met is then False;
    not_measured says why, where that is known. Of
    ratios it is the mean over the pairs, and low and high its interval, where there is one; proven
    says whether all of that lies on the side of the mean, None without one.

    parts: for a ratio of times, seconds that each thing that must be done takes at the bandwidths
    measured in the same run. Nobody can be faster than the slowest of them: best is the other's
    time over that, least_of its name. in_turn is the other's time over that of all parts, those
    side by side that do not need the same thing (in_turn_seconds). None where that tells nothing.
    """

    name: str
    bound: str
    medium: str
    measured: float | None
    met: bool
    low: float | None = None
    high: float | None = None
    proven: bool | None = None
    parts: dict[str, float] | None = None
    least_of: str | None = None
    best: float | None = None
    in_turn: float | None = None
    not_measured: str | None = None

    @classmethod
    def of_ratio(
        cls, name: str, sign: str, limit: float, medium: str, ratio: Mapping[str, Any]
    ) -> Self:
        """sign: ">=" or "<=". ratio: its mean, low and high."""

        def holds(value: float) -> bool:
            return value >= limit if sign == ">=" else value <= limit

        met, ends = holds(ratio["mean"]), (ratio["low"], ratio["high"])
        return cls(
            name=name,
            bound=f"{sign} {limit:.3g}",
            medium=medium,
            measured=ratio["mean"],
            met=met,
            low=ratio["low"],
            high=ratio["high"],
            proven=None if None in ends else all(holds(end) is met for end in ends),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Promise:
    workload: str
    figure: str
    limit: float
    title: str


_PROMISES = (
    _Promise(workload="inference", figure="dump_seconds", limit=3, title="inference dump"),
    _Promise(workload="inference", figure="restore_seconds", limit=2, title="inference restore"),
    _Promise(
        workload="inference", figure="stored_bytes", limit=0.42, title="inference stored bytes"
    ),
    _Promise(
        workload="finetuning", figure="dump_seconds", limit=1.5, title="full fine-tuning dump"
    ),
    _Promise(
        workload="finetuning",
        figure="restore_seconds",
        limit=1.5,
        title="full fine-tuning restore",
    ),
    _Promise(workload="random", figure="dump_seconds", limit=1.2, title="random dump"),
    _Promise(workload="random", figure="restore_seconds", limit=1.2, title="random restore"),
)
_SECOND_SKIPPED = 0.89
_SECOND_DUMP = 5.0
_CHAIN = 1.3
_HOOK_US = 50.0
_TREE = 1 / 1.05  # stock over ours: 5 % slower at most
_CPU_TIMES, _CPU_STORED = 2.0, 0.6  # stock over ours, ours over stock
_RESIDENT = 1.05
_SEALED = 1.1  # sealed over packed


def evaluate(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Every bound whose workload is in the report (build/bench.json without `bounds`)."""
    found: list[Bound] = []
    results = report["results"]
    for promise in _PROMISES:
        found += [
            _of_result(promise, result, results, report)
            for result in results
            if result["workload"] == promise.workload and result["contender"] == OURS
        ]
    for second in report["second_checkpoints"]:
        found += _of_second(second, report["limits"])
    for chain in report["chains"]:
        found.append(
            Bound(
                name=f"restore through a chain of {chain['length']}, over a full one",
                bound=f"<= {_CHAIN}",
                medium=chain["medium"],
                measured=chain["ratio"],
                met=chain["ratio"] <= _CHAIN,
            )
        )
    found += [
        _of_memory(result, results, report) for result in results if _compared(result, results)
    ]
    found += [_of_tree(tree, figure) for tree in report["trees"] for figure in ("dump", "restore")]
    for one in report["cpu_memory"]:
        found += _of_cpu_memory(one)
    found += [_of_sealing(one, stage) for one in report["sealing"] for stage in ("dump", "restore")]
    found += [
        Bound(
            name=f"hooks, for a process of {_count(cost['threads'], 'thread')} without CUDA, us",
            bound=f"<= {_HOOK_US:g}",
            medium="-",
            measured=cost["process_us"],
            met=cost["process_us"] <= _HOOK_US,
        )
        for cost in report["hook_costs"]
    ]
    return [asdict(bound) for bound in found]


def _of_tree(tree: dict[str, Any], figure: str) -> Bound:
    ratio = tree["ratios"][f"{figure}_seconds"]
    processes = tree["processes"]
    name = f"tree of {processes:,} process{'' if processes == 1 else 'es'}, CPU memory ours"
    name = f"{name}: {figure}, stock over ours"
    return Bound.of_ratio(name, ">=", _TREE, tree["medium"], ratio)


def _of_cpu_memory(measured: dict[str, Any]) -> list[Bound]:
    workload, medium, ratios = (measured[key] for key in ("workload", "medium", "ratios"))
    found = [
        Bound.of_ratio(f"CPU memory of {workload}: {title}", sign, limit, medium, ratios[figure])
        for figure, title, sign, limit in (
            ("dump_seconds", "dump, stock over ours", ">=", _CPU_TIMES),
            ("restore_seconds", "restore, stock over ours", ">=", _CPU_TIMES),
            ("stored_bytes", "stored bytes, ours over stock", "<=", _CPU_STORED),
        )
    ]
    share = measured["contenders"][OURS]["rss_share"]
    found.append(
        Bound(
            name=f"memory of {workload} after the restore, over before",
            bound=f"<= {_RESIDENT}",
            medium=medium,
            measured=share,
            met=share <= _RESIDENT,
        )
    )
    return found


def _of_sealing(measured: dict[str, Any], stage: str) -> Bound:
    """in_turn: packing alone, and then the cipher with all cores. In a tmpfs both are work of the
    processors; a disk may be slower than both."""
    ratio = measured["ratios"]["sealed"][f"{stage}_seconds"]
    packed = measured["contenders"]["packed"]
    cipher = packed["stored_bytes"] / measured["aes_256_gcm"]
    share = cipher / packed[f"{stage}_seconds"]
    name = f"sealed {stage}, over one that is packed alone"
    return replace(
        Bound.of_ratio(name, "<=", _SEALED, measured["medium"], ratio),
        parts={_CIPHER: cipher},
        least_of=_CIPHER,
        best=round(max(1.0, share), 3),
        in_turn=round(1 + share, 3) if measured["medium"] == "tmpfs" else None,
    )


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _of_result(
    promise: _Promise,
    result: dict[str, Any],
    results: list[dict[str, Any]],
    report: dict[str, Any],
) -> Bound:
    ratio = result["ratios"][promise.figure]
    at_least = promise.figure.endswith("_seconds")
    sign = ">=" if at_least else "<="
    name = promise.title + (", stock over ours" if at_least else ", ours over stock")
    if ratio is None:
        text = f"{sign} {promise.limit:g}"
        bound = Bound(name=name, bound=text, medium=result["medium"], measured=None, met=False)
    else:
        bound = Bound.of_ratio(name, sign, promise.limit, result["medium"], ratio)
    stock = _find(results, result, STOCK)
    if not at_least or report["limits"] is None or stock is None:
        return bound
    parts = unavoidable_seconds(
        promise.figure.removesuffix("_seconds"),
        report["workloads"][result["workload"]]["gpu_bytes"],
        result["stored_bytes"],
        result["medium"],
        report["limits"],
    )
    return _limited(bound, parts, stock[promise.figure])


def _limited(bound: Bound, parts: dict[str, float], other_seconds: float) -> Bound:
    slowest = max(parts, key=lambda name: parts[name])
    if not parts[slowest]:
        return replace(bound, parts=parts, least_of=slowest)
    return replace(
        bound,
        parts=parts,
        least_of=slowest,
        best=round(other_seconds / parts[slowest], 3),
        in_turn=round(other_seconds / in_turn_seconds(parts, bound.medium), 3),
    )


def in_turn_seconds(parts: dict[str, float], medium: str) -> float:
    """How long all parts take. A disk works while processors do; a tmpfs is their work, too. Pages
    are dropped when everything else is done."""
    drop = parts.get(_DROP, 0.0)
    others = [seconds for name, seconds in parts.items() if name != _DROP]
    return drop + (sum(others) if medium == "tmpfs" else max(others))


def unavoidable_seconds(
    stage: str, gpu_bytes: int, stored: int, medium: str, limits: dict[str, Any]
) -> dict[str, float]:
    """What must be done in a "dump" or "restore", and how long each takes with all cores.

    A dump reads all of the staged memory, brings what is stored to the medium, and has one thread
    of the task give the pages back; a restore reads what is stored, and writes it into the process,
    but for zeros.
    """
    of_medium = limits[medium]
    if stage == "dump":
        parts = {
            "reading the process": gpu_bytes / max(limits["read_process"].values()),
            f"writing to {medium}, synced": stored / max(of_medium["write"].values()),
            _DROP: gpu_bytes / limits["drop"]["1"],
        }
    else:
        parts = {
            f"reading from {medium}": stored / max(of_medium["read"].values()),
            WRITING: stored / max(limits["write_process"].values()),
        }
    return {name: round(seconds, 4) for name, seconds in parts.items()}


def _of_second(second: dict[str, Any], limits: dict[str, Any] | None) -> list[Bound]:
    skipped, dump = second["skipped_of_nonzero"], second["ratios"]["dump_seconds"]
    faster = Bound(
        name="QLoRA second checkpoint dump, stock full over ours",
        bound=f">= {_SECOND_DUMP:g}",
        medium=second["medium"],
        measured=dump,
        met=dump >= _SECOND_DUMP,
    )
    if limits is not None:
        stored = second["ours"]["stored_bytes"]
        medium = second["medium"]
        parts = unavoidable_seconds("dump", second["gpu_bytes"], stored, medium, limits)
        faster = _limited(faster, parts, second["stock"]["dump_seconds"])
    return [
        Bound(
            name="QLoRA second checkpoint, chunks skipped (of those that are not zero)",
            bound=f">= {_SECOND_SKIPPED:g}",
            medium=second["medium"],
            measured=skipped,
            met=skipped >= _SECOND_SKIPPED,
        ),
        faster,
    ]


def _compared(result: dict[str, Any], results: list[dict[str, Any]]) -> bool:
    return result["contender"] == OURS and _find(results, result, STOCK) is not None


def _of_memory(
    result: dict[str, Any], results: list[dict[str, Any]], report: dict[str, Any]
) -> Bound:
    stock = _find(results, result, STOCK)
    if stock is None:
        raise BenchError(f"{result['workload']} has no result of stock CRIU to compare with")
    gpu_bytes = report["workloads"][result["workload"]]["gpu_bytes"]
    limit = _MEMORY_BASE + gpu_bytes * _MEMORY_SHARE
    beyond = result["peak_rss_bytes"] - stock["peak_rss_bytes"]
    return Bound(
        name=f"memory of criu and plugin beyond stock, {result['workload']}, MiB",
        bound=f"<= {limit / 2**20:.1f}",
        medium=result["medium"],
        measured=round(beyond / 2**20, 1),
        met=beyond <= limit,
    )


def _find(
    results: list[dict[str, Any]], like: dict[str, Any], contender: str
) -> dict[str, Any] | None:
    for result in results:
        same = all(result[key] == like[key] for key in ("workload", "medium"))
        if same and result["contender"] == contender:
            return result
    return None
