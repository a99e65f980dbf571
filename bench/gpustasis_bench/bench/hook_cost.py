"""What the plugin costs a process without CUDA: its hooks, called for one again and again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpustasis import process
from gpustasis.criu.plugin import PLUGIN_NAME, plugin_directory
from gpustasis_bench.bench.errors import BenchError

_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HookCost:
    """Nanoseconds by hook, "pause" and "checkpoint", over `calls` calls of each."""

    calls: int
    median_ns: dict[str, int]
    rare_ns: dict[str, int]  # 99th percentile

    @property
    def process_us(self) -> float:
        """Microseconds that a dump spends on one process without CUDA: both hooks."""
        return sum(self.median_ns.values()) / 1000


def measure(program: Path, environ: Mapping[str, str], calls: int) -> HookCost:
    """program: hook_cost, of hook_cost.c. Raises BenchError if a hook answers what it must not."""
    plugin = plugin_directory(environ) / PLUGIN_NAME
    ended = process.run([str(program), str(plugin), str(calls)], env=environ, timeout_s=_TIMEOUT_S)
    if ended.status != 0:
        raise BenchError(f"{program.name} failed ({ended.ending}): {ended.output.strip()}")
    medians, rare = {}, {}
    for line in ended.output.splitlines():
        name, median, percentile = line.split()
        medians[name], rare[name] = int(median), int(percentile)
    return HookCost(calls=calls, median_ns=medians, rare_ns=rare)
