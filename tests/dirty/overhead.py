# SPDX-License-Identifier: Apache-2.0
"""What it costs to be watched: python tests/dirty/overhead.py [--rounds N] [--mib N]. Prints JSON.

A program (tests/programs/dirty_load.c) writes to random bytes without a pause, and counts; it runs
alone and while a tracker scans and re-marks it once a second, by turns. Also measured: how long
attaching, the first mark and a scan take.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from gpustasis._core import DirtyTracker

PROGRAM = Path(__file__).resolve().parent.parent / "programs/dirty_load.c"
SCAN_EVERY_S = 1.0
PART_S = 3.0
MIB = 1 << 20
LOADS = (
    ("10 % written, 4 KiB pages", 0.1, False),
    ("all written, 4 KiB pages", 1.0, False),
    ("10 % written, huge pages", 0.1, True),
    ("all written, huge pages", 1.0, True),
)


def spread(values: list[float]) -> dict[str, float]:
    return {
        "min": round(min(values), 3),
        "median": round(statistics.median(values), 3),
        "max": round(max(values), 3),
        "n": len(values),
    }


class Load:
    """The program while it runs."""

    def __init__(self, program: Path, folder: Path, mib: int, share: float, huge: bool) -> None:
        self.counter = folder / "counter"
        self.counter.write_bytes(bytes(8))
        words = [program, self.counter, str(mib), str(int(mib * share)), str(int(huge))]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        self.pid = self.process.pid

    def writes(self) -> int:
        return int.from_bytes(self.counter.read_bytes(), "little")

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def attach(load: Load, rounds: int) -> dict[str, object]:
    attached: list[float] = []
    marked: list[float] = []
    for _ in range(rounds):
        begin = time.perf_counter()
        with DirtyTracker(load.pid) as tracker:
            attached.append((time.perf_counter() - begin) * 1e3)
            begin = time.perf_counter()
            tracker.mark()
            marked.append((time.perf_counter() - begin) * 1e3)
    return {"attach_ms": spread(attached), "first_mark_ms": spread(marked)}


def slowdown(load: Load, rounds: int) -> dict[str, object]:
    alone: list[float] = []
    watched: list[float] = []
    scans: list[float] = []
    dirty: list[float] = []
    for _ in range(rounds):
        begin, at = load.writes(), time.monotonic()
        time.sleep(PART_S)
        alone.append((load.writes() - begin) / (time.monotonic() - at))
        with DirtyTracker(load.pid) as tracker:
            tracker.mark()
            begin, at = load.writes(), time.monotonic()
            while time.monotonic() - at < PART_S:
                time.sleep(SCAN_EVERY_S)
                start = time.perf_counter()
                pages = tracker.scan(remark=True)
                scans.append((time.perf_counter() - start) * 1e3)
                dirty.append(pages.dirty_bytes / MIB)
            watched.append((load.writes() - begin) / (time.monotonic() - at))
    slower = [100 * (1 - w / a) for w, a in zip(watched, alone, strict=True)]
    return {
        "million_writes_per_second_alone": spread([rate / 1e6 for rate in alone]),
        "slowdown_percent": spread(slower),
        "scan_ms": spread(scans),
        "dirty_mib_per_scan": spread(dirty),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=1024)
    options = parser.parse_args()
    result: dict[str, object] = {
        "kernel": os.uname().release,
        "processors": os.cpu_count(),
        "mib": options.mib,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = folder / "dirty_load"
        subprocess.run(["cc", "-O2", "-Wall", "-Werror", "-o", program, PROGRAM], check=True)
        for title, share, huge in LOADS:
            load = Load(program, folder, options.mib, share, huge)
            try:
                with DirtyTracker(load.pid) as tracker:
                    result["backend"] = tracker.backend
                result[title] = attach(load, options.rounds) | slowdown(load, options.rounds)
            finally:
                load.end()
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
