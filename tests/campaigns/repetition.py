# SPDX-License-Identifier: Apache-2.0
"""One job is dumped and left running again and again: nothing may pile up in it or beside it."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from campaigns.rig import Rig, lasting_workers
from campaigns.tally import Tally

_WARM_UP = 3  # dumps after which sizes must stand still
_GROWTH_KB = 1024  # resident memory moves by less than this


def run(rig: Rig, dumps: int) -> Tally:
    tally = Tally()
    with rig.job(mib=4, pinned_kib=64, children=1) as job:
        threads = job.threads()
        first: list[tuple[int, int, int]] | None = None
        for number in range(dumps):
            images = rig.images()
            dumped = rig.dump(job, images, "--leave-running")
            tally.counts["trials"] += 1
            assert dumped.status == 0, dumped.errors
            job.run_on()
            assert lasting_workers(images) == [], "a worker is left behind"
            shutil.rmtree(images)
            if job.threads() != threads:
                tally.failures.append(f"dump {number}: the threads have changed")
            sizes = [_sizes(pid) for pid in job.pids]
            if number == _WARM_UP:
                first = sizes
            if first is not None:
                tally.failures += [
                    f"dump {number}: descriptors, mappings, KiB of memory were {was}, are {now}"
                    for was, now in zip(first, sizes, strict=True)
                    if was[:2] != now[:2] or now[2] - was[2] > _GROWTH_KB
                ]
    return tally


def _sizes(pid: int) -> tuple[int, int, int]:
    """Descriptors, mappings, KiB of resident memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    resident = re.search(r"^VmRSS:\s*(\d+) kB$", status, re.MULTILINE)
    assert resident is not None
    maps = Path(f"/proc/{pid}/maps").read_text().count("\n")
    return len(os.listdir(f"/proc/{pid}/fd")), maps, int(resident[1])
