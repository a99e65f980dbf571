# SPDX-License-Identifier: Apache-2.0
"""What the plugin costs a process without CUDA."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from campaigns.tally import Tally
from gpustasis_bench.bench.programs import measure_hooks


def run(
    program: Path, environ: Mapping[str, str], calls: int, limit_us: float, threads: int = 1
) -> Tally:
    """program: hook_cost. counts: medians and 99th percentiles in nanoseconds; a median above
    `limit_us` microseconds is a failure."""
    cost = measure_hooks(program, environ, calls, threads)
    tally = Tally()
    tally.counts["trials"] = calls
    for name, median in cost.median_ns.items():
        tally.counts[f"{name} median ns"] = median
        tally.counts[f"{name} 99th percentile ns"] = cost.rare_ns[name]
        if median > limit_us * 1000:
            tally.failures.append(f"{name} takes {median / 1000:.1f} us")
    return tally
