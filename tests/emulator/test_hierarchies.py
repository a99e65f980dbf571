# SPDX-License-Identifier: Apache-2.0
"""Tests of container engines change nothing that CRIU's dumps of other tests look at."""

from __future__ import annotations

from pathlib import Path

from support import hierarchies
from support.engine_root import EngineRoot


def groups() -> tuple[str, dict[str, str]]:
    """Those of the process itself, and the number of the hierarchy that each controller is in."""
    lines = Path("/proc/cgroups").read_text().splitlines()[1:]
    return Path("/proc/self/cgroup").read_text(), {
        line.split()[0]: line.split()[1] for line in lines
    }


def test_an_engine_s_hierarchy_is_there_before_and_after_it(tmp_path: Path) -> None:
    """Without that, a dump that is under way then fails: "cg: controller hugetlb not found"."""
    before = groups()
    if hierarchies.is_needed():
        assert ":hugetlb:" in before[0]
    place = tmp_path / "engines"
    place.mkdir()
    with EngineRoot(place) as root:
        assert f"/{root.name}" in Path(f"/proc/{root.init}/cgroup").read_text()
        assert groups() == before
    assert groups() == before
