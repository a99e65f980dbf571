# SPDX-License-Identifier: Apache-2.0
"""build/bench.json: everything that was measured, and what follows from it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import gpustasis
from gpustasis.criu.find import Criu
from gpustasis_bench.bench.bounds import evaluate
from gpustasis_bench.bench.ciphers import Cipher
from gpustasis_bench.bench.contenders import STOCK, Codec, same_dumps
from gpustasis_bench.bench.content import Content
from gpustasis_bench.bench.downtime_bounds import evaluate_downtime, hold_model
from gpustasis_bench.bench.medium import Medium
from gpustasis_bench.bench.model import predictions, published_dumps
from gpustasis_bench.bench.programs import HookCost
from gpustasis_bench.bench.statistics import INTERVAL, Round, disagreements, summarise

_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
VERSION = 3
RATIOS_EXPLAINED = (
    "geometric means over pairs; times: stock over this one, greater is better; sizes and memory: "
    "this one over stock"
)


@dataclass(slots=True, kw_only=True)
class Report:
    """Grows as the run goes on.

    absent: contenders that could not be measured, and why. failures: measurements that were begun
    and came to nothing. downtime: Downtime.found, None if that was not asked for. bit_exact: no
    restored process held anything but what it had held.
    """

    backend: str
    date: str
    machine: dict[str, Any]
    versions: dict[str, str]
    options: dict[str, Any]
    absent: dict[str, str] = field(default_factory=dict)
    contents: list[Content] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    second_checkpoints: list[dict[str, Any]] = field(default_factory=list)
    chains: list[dict[str, Any]] = field(default_factory=list)
    limits: dict[str, Any] | None = None
    hook_costs: list[HookCost] = field(default_factory=list)
    running: list[dict[str, Any]] = field(default_factory=list)
    downtime: dict[str, Any] | None = None
    cpu_memory: list[dict[str, Any]] = field(default_factory=list)
    trees: list[dict[str, Any]] = field(default_factory=list)
    sealing: list[dict[str, Any]] = field(default_factory=list)
    cooled: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    bit_exact: bool = True

    def as_dict(self, *, complete: bool = True) -> dict[str, Any]:
        """The whole file; bounds are evaluated here."""
        disagreeing = disagreements(self.rounds, same_dumps())
        whole: dict[str, Any] = {
            "version": VERSION,
            "complete": complete,
            "backend": self.backend,
            "date": self.date,
            "machine": self.machine,
            "versions": self.versions,
            "options": self.options,
            "ratios_are": RATIOS_EXPLAINED,
            "interval": INTERVAL,
            "usable": not disagreeing,
            "not_usable_because": disagreeing,
            "restored_bit_exact": self.bit_exact,
            "absent": self.absent,
            "failures": self.failures,
            "page_cache_before_restores": self.cooled,
            "workloads": {each.workload: _describe_content(each) for each in self.contents},
            "results": summarise(self.rounds, STOCK),
            "second_checkpoints": self.second_checkpoints,
            "chains": self.chains,
            "limits": self.limits,
            "running": self.running,
            "downtime": self.downtime,
            "cpu_memory": self.cpu_memory,
            "trees": self.trees,
            "sealing": self.sealing,
            "hook_costs": [
                asdict(cost) | {"process_us": round(cost.process_us, 2)} for cost in self.hook_costs
            ],
        }
        if self.downtime is not None:
            whole["downtime"] = {
                **self.downtime,
                "model": hold_model(whole),
                "published_dumps": published_dumps(),
                "predictions": predictions(),
            }
        whole["bounds"] = evaluate(whole) + evaluate_downtime(whole)
        return whole


def write_json(whole: dict[str, Any], path: Path) -> None:
    """Replace an older file in a single step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    part.replace(path)


def contenders_in(results: Sequence[dict[str, Any]]) -> list[str]:
    """Their names, in the order in which they come."""
    return list(dict.fromkeys(result["contender"] for result in results))


def _describe_content(content: Content) -> dict[str, Any]:
    fields = asdict(content)
    del fields["folder"], fields["workload"]
    return fields


def describe_machine(gpu: str, media: Sequence[Medium]) -> dict[str, Any]:
    """Sizes in bytes."""
    pages = os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "transparent_huge_pages": _chosen(_THP),
        "gpu": gpu,
        "media": {medium.name: medium.filesystem for medium in media},
    }


def describe_versions(criu: Criu, codecs: Sequence[Codec | Cipher]) -> dict[str, str]:
    """Name -> version of each program and library that takes part."""
    versions = {
        "gpustasis": gpustasis.__version__,
        "criu": f"{criu.version_text} ({criu.origin})",
        "python": platform.python_version(),
    }
    for codec in codecs:
        versions[codec.program] = codec.version()
    for name in ("matplotlib",):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _chosen(path: Path) -> str:
    """The word in brackets."""
    try:
        text = path.read_text()
    except OSError:
        return "unknown"
    return text[text.find("[") + 1 : text.find("]")]
