# SPDX-License-Identifier: Apache-2.0
"""Processes that may not take as much memory as the host has."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from campaigns.steady_job import SteadyJob

_V1 = Path("/sys/fs/cgroup/memory")
_REMOVAL_S = 30.0


def set_limit(cgroup: Path, size: int) -> None:
    (cgroup / ("memory.limit_in_bytes" if _V1.is_dir() else "memory.max")).write_text(str(size))


@contextmanager
def limited_cgroup(size: int) -> Iterator[Path]:
    """A new one; nobody may be left in it at the end, but who is about to end."""
    root = _V1 if _V1.is_dir() else Path("/sys/fs/cgroup")
    cgroup = root / f"gpustasis-test-{os.getpid()}"
    cgroup.mkdir()
    try:
        set_limit(cgroup, size)
        yield cgroup
    finally:
        deadline = time.monotonic() + _REMOVAL_S
        while cgroup.exists():
            with suppress(OSError):  # busy: its last process is not quite gone
                cgroup.rmdir()
            assert time.monotonic() < deadline, f"{cgroup} stays in use"
            time.sleep(0.01)


def inside(cgroup: Path, words: Sequence[str]) -> list[str]:
    """An argument list that runs `words` in there."""
    return ["sh", "-c", f'echo $$ >{cgroup}/cgroup.procs; exec "$@"', "sh", *words]


@contextmanager
def memory_limit(job: SteadyJob, size: int) -> Iterator[Path]:
    """Put the job into a cgroup of its own, for what it takes from now on."""
    with limited_cgroup(size) as cgroup:
        try:
            for pid in job.pids:
                (cgroup / "cgroup.procs").write_text(str(pid))
            yield cgroup
        finally:
            job.end()
