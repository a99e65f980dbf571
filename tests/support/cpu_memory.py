# SPDX-License-Identifier: Apache-2.0
"""Jobs without CUDA whose memory our plugin stores (tests/programs/memory_job.c)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from campaigns.rig import Rig, Run
from campaigns.steady_job import SteadyJob
from gpustasis.criu.plugin import Scalar

OURS: dict[str, Scalar] = {"cpu_memory": "ours"}
_DEATH_S = 2.0
FIRST_CHECKPOINT = "' hook 11 "  # in criu's log


@contextmanager
def running(rig: Rig, program: Path, **options: int) -> Iterator[SteadyJob]:
    job = SteadyJob(program, rig.scratch / "memory.log", rig.environ, **options)
    try:
        yield job
    finally:
        job.end()


def pages_bytes(images: Path) -> int:
    return sum(path.stat().st_size for path in images.glob("pages-*.img"))


def require_dead(job: SteadyJob) -> None:
    """A process that was killed may take a moment to be gone."""
    deadline = time.monotonic() + _DEATH_S
    while job.alive_pids() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not job.alive_pids()


def refused(run: Run) -> str:
    """criu's log."""
    assert run.status != 0, run.log[-2000:]
    return run.log
