# SPDX-License-Identifier: Apache-2.0
"""What the plugin costs a process without CUDA."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from campaigns.tally import Tally
from gpustasis_bench.bench.programs import HookCost, measure_hooks

_RUNS = 5  # at least
_PATIENCE_S = 60.0  # a machine that does other work for longer is too busy to tell


def run(
    program: Path, environ: Mapping[str, str], calls: int, limit_us: float, threads: int = 1
) -> Tally:
    """program: hook_cost. counts: medians and 99th percentiles in nanoseconds, of the run with the
    lowest median: whatever else runs on this machine only adds to it. So it is measured until both
    medians were within `limit_us` microseconds; one that is not after _PATIENCE_S is a failure."""
    costs: list[HookCost] = []
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        costs.append(measure_hooks(program, environ, calls, threads))
        best = {
            name: min(costs, key=lambda cost: cost.median_ns[name]) for name in costs[0].median_ns
        }
        most = max(cost.median_ns[name] for name, cost in best.items())
        if len(costs) >= _RUNS and (most <= limit_us * 1000 or time.monotonic() > deadline):
            break
    tally = Tally()
    tally.counts["trials"] = calls * len(costs)
    for name, cost in best.items():
        median = cost.median_ns[name]
        tally.counts[f"{name} median ns"] = median
        tally.counts[f"{name} 99th percentile ns"] = cost.rare_ns[name]
        if median > limit_us * 1000:
            tally.failures.append(f"{name} takes {median / 1000:.1f} us")
    return tally
