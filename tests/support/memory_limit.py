# SPDX-License-Identifier: Apache-2.0
"""A job that may not take as much memory as the host has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from campaigns.steady_job import SteadyJob

_V1 = Path("/sys/fs/cgroup/memory")


@contextmanager
def memory_limit(job: SteadyJob, size: int) -> Iterator[Path]:
    """Put the job into a cgroup of its own, for what it takes from now on."""
    version_1 = _V1.is_dir()
    root = _V1 if version_1 else Path("/sys/fs/cgroup")
    cgroup = root / f"gpustasis-test-{os.getpid()}"
    cgroup.mkdir()
    try:
        limit = "memory.limit_in_bytes" if version_1 else "memory.max"
        (cgroup / limit).write_text(str(size))
        for pid in job.pids:
            (cgroup / "cgroup.procs").write_text(str(pid))
        yield cgroup
    finally:
        job.end()
        cgroup.rmdir()
