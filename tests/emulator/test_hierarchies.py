# SPDX-License-Identifier: Apache-2.0
"""Tests of container engines change nothing that CRIU's dumps of other tests look at."""

from __future__ import annotations

import subprocess
from pathlib import Path

from support import hierarchies

_COME_AND_GO = (
    "mount -t tmpfs tmpfs /mnt; mount -t cgroup -o hugetlb cgroup /mnt; cat /proc/self/cgroup"
)


def test_an_engine_s_hierarchy_is_there_before_and_after_it() -> None:
    """Without that, a dump that is under way then fails: "cg: controller hugetlb not found"."""
    before = Path("/proc/self/cgroup").read_text()
    meanwhile = before
    if hierarchies.is_needed():
        assert ":hugetlb:" in before
        words = ["unshare", "--mount", "sh", "-ec", _COME_AND_GO]
        meanwhile = subprocess.run(words, capture_output=True, check=True, text=True).stdout
    assert meanwhile == before
    assert Path("/proc/self/cgroup").read_text() == before
