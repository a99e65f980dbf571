# SPDX-License-Identifier: Apache-2.0
"""Short runs of the benchmark's command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpustasis_bench.bench.downtime_bounds import hold_model
from gpustasis_bench.bench.model import predictions, published_dumps

LIMITS = {
    "read_process": {"1": 6e9, "2": 10e9},
    "write_process": {"1": 2e9, "2": 4e9},
    "memcpy": {"1": 9e9, "2": 14e9},
    "drop": {"1": 15e9},
    "xxh3": 40e9,
    "lz4_random": 15e9,
    "tmpfs": {
        "write": {"1": 2.5e9, "2": 3.5e9},
        "rewrite": {"1": 5e9, "2": 7e9},
        "read": {"1": 6e9, "2": 8e9},
    },
    "disk": {"write": {"8": 1.5e9}, "read": {"8": 3e9}},
}


def run_bench(environ: dict[str, str], work: Path, *words: str) -> dict[str, Any]:
    """The report of a run of the command with 32 MiB and one pair, and these options besides."""
    out = work / "bench.json"
    command = [sys.executable, "-m", "gpustasis_bench.bench", "--size", "0.03125", "--pairs", "1"]
    command += ["--work", str(work / "bench"), "--out", str(out), "--no-downtime", *words]
    ended = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=280, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "EMULATOR" in ended.stdout
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def made_report(found: dict[str, Any], *failures: str) -> dict[str, Any]:
    """What Report.as_dict makes of the part `downtime`, on a machine with LIMITS."""
    report: dict[str, Any] = {
        "machine": {"media": {"tmpfs": "tmpfs", "disk": "ext4"}, "cores": 2},
        "limits": LIMITS,
        "failures": list(failures),
        "downtime": found,
    }
    report["downtime"] = {
        **found,
        "model": hold_model(report),
        "predictions": predictions(),
        "published_dumps": published_dumps(),
    }
    return report
