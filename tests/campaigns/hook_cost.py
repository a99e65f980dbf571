"""What the plugin costs a process without CUDA: its hooks, called for one again and again."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from campaigns.tally import Tally
from cudackpt.criu.plugin import PLUGIN_NAME, plugin_directory


def run(program: Path, environ: Mapping[str, str], calls: int, limit_us: float) -> Tally:
    """program: hook_cost. counts: medians and 99th percentiles in nanoseconds; a median above
    `limit_us` microseconds is a failure."""
    plugin = plugin_directory(environ) / PLUGIN_NAME
    ended = subprocess.run(
        [program, plugin, str(calls)],
        env=dict(environ),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    tally = Tally()
    tally.counts["trials"] = calls
    for line in ended.stdout.splitlines():
        name, median, rare = line.split()
        tally.counts[f"{name} median ns"] = int(median)
        tally.counts[f"{name} 99th percentile ns"] = int(rare)
        if int(median) > limit_us * 1000:
            tally.failures.append(f"{name} takes {int(median) / 1000:.1f} us")
    return tally
