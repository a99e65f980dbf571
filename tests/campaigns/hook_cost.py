# SPDX-License-Identifier: Apache-2.0
"""What the plugin costs a process without CUDA."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from campaigns.tally import Tally
from gpustasis_bench.bench.programs import measure_hooks

_RUNS = 5


def run(
    program: Path, environ: Mapping[str, str], calls: int, limit_us: float, threads: int = 1
) -> Tally:
    """program: hook_cost. counts: medians and 99th percentiles in nanoseconds, of the run with the
    lowest median: whatever else runs on this machine only adds to it. A median above `limit_us`
    microseconds is a failure."""
    costs = [measure_hooks(program, environ, calls, threads) for _ in range(_RUNS)]
    tally = Tally()
    tally.counts["trials"] = calls * _RUNS
    for name in costs[0].median_ns:
        best = min(costs, key=lambda cost: cost.median_ns[name])
        median = best.median_ns[name]
        tally.counts[f"{name} median ns"] = median
        tally.counts[f"{name} 99th percentile ns"] = best.rare_ns[name]
        if median > limit_us * 1000:
            tally.failures.append(f"{name} takes {median / 1000:.1f} us")
    return tally
