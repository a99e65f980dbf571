# SPDX-License-Identifier: Apache-2.0
"""tier = "ram" where the arena's own limit is not the one that counts (docs/operating.md, "Room in
the arena")."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from campaigns.rig import Programs, Rig, Run, log_path, small_filesystem, with_driver
from campaigns.steady_job import SteadyJob
from gpustasis._core import ARENA_MARKER
from gpustasis.criu.find import Criu
from gpustasis.draining.recycle import look_into
from gpustasis.driver import ProcessState
from support.arena import dump, ram
from support.direct_memory import DRIVER, await_state, slow_copies, slow_down
from support.memory_limit import inside, limited_cgroup, set_limit

MIB = 1 << 20
PART = "*/.gpustasis-*.part"  # an image that is being written
KEPT_FREE = 64 * MIB  # of the memory of the host and of each cgroup


def require_refused(rig: Rig, job: SteadyJob, images: Path, done: Run, arena: Path) -> int:
    """Before anything was locked, for want of room; for how many MiB there was."""
    assert done.status != 0
    found = re.search(rf"in {arena}, which has room for (\d+) MiB: ", done.log)
    assert found is not None, done.errors
    assert "locked pid" not in done.log
    require_nothing_left(rig, job, images, arena)
    return int(found[1])


def require_nothing_left(rig: Rig, job: SteadyJob, images: Path, arena: Path) -> None:
    rig.settle(images)
    assert look_into(arena).kept == []
    assert not (images / ARENA_MARKER).exists()
    job.run_on()


def test_its_tmpfs_is_too_small(newest_rig: Rig) -> None:
    rig = newest_rig
    with (
        rig.job(mib=8) as job,
        small_filesystem(rig.scratch / "arena", 4 * MIB, 0) as arena,
    ):
        images = rig.images()
        done = rig.dump(job, images, "--leave-running", config=ram(arena))
        assert require_refused(rig, job, images, done, arena) == 3


@pytest.mark.parametrize("staging", ["drop", "keep"])
def test_a_cgroup_of_criu_has_too_little_memory(newest_rig: Rig, arena: Path, staging: str) -> None:
    """Pages of a tmpfs are charged to who writes them."""
    rig = newest_rig
    most = 40 * MIB
    config = ram(arena, staging=staging)
    with rig.job(mib=64) as job, limited_cgroup(KEPT_FREE + most) as cgroup:
        images = rig.images()
        words = rig.dump_words(job, images, ["--leave-running"])
        done = rig.run(inside(cgroup, words), images, "dump", config)
        assert 0 < require_refused(rig, job, images, done, arena) < most // MIB
    with rig.job(mib=64) as job:  # whose cgroup has no limit
        dump(rig, job, "--leave-running", **config)


@pytest.mark.parametrize("listed", ["1", "2"], ids=["no processes", "processes without sizes"])
def test_nvml_does_not_say_how_much_memory_it_is(newest_rig: Rig, arena: Path, listed: str) -> None:
    """The room is used up when an image of the first process is there, and all are brought back."""
    rig = newest_rig
    rig.emulator.set("nvml_processes", listed)
    with rig.job(mib=16, children=1) as job:
        images = rig.images()
        config = ram(arena, arena_limit=14 * MIB)
        done = rig.dump(job, images, "--leave-running", config=config)
        assert done.status != 0
        assert f"checkpointed pid {job.pid}" in done.log
        assert "the arena has no room for more: 14 MiB is its limit" in done.log, done.errors
        require_nothing_left(rig, job, images, arena)


def test_what_is_not_known_counts_as_a_whole_gpu_where_there_is_no_way_back(
    newest_rig: Rig, arena: Path
) -> None:
    with with_driver(newest_rig, DRIVER) as rig, rig.job(mib=16) as job:
        rig.emulator.set("nvml_processes", "2")
        images = rig.images()
        config = ram(arena, arena_limit=128 * MIB, gpu_memory="direct")
        done = rig.dump(job, images, "--leave-running", config=config)
        assert require_refused(rig, job, images, done, arena) == 128


def test_memory_becomes_short_while_what_was_reserved_is_written(
    newest_criu: Criu, programs: Programs, arena: Path, tmp_path: Path
) -> None:
    """Looked at after each 256 MiB; beside these the worker has 72, and 64 are to stay free."""
    with (
        slow_copies(newest_criu, programs, tmp_path, 512 * MIB) as rig,
        rig.job(mib=384) as job,  # a quarter of it is zero, and not written
        limited_cgroup(2048 * MIB) as cgroup,
    ):
        rig.emulator.set("direct_h2d_ms_per_gib", "0")
        slow_down(rig, "d2h", 0.05)  # it is looked at after 5 s, and the limit set before
        images = rig.images()
        words = inside(cgroup, rig.dump_words(job, images, ["--leave-running"]))
        criu = rig.start(words, ram(arena, gpu_memory="direct"))
        await_state(rig, job.pid, ProcessState.CHECKPOINTING)
        assert list(arena.glob(PART))
        set_limit(cgroup, 420 * MIB)
        deadline = time.monotonic() + 60
        while list(arena.glob(PART)):
            assert time.monotonic() < deadline, "an image stays unfinished"
            time.sleep(0.01)
        set_limit(cgroup, 2048 * MIB)  # what it keeps, and what it puts back, counts there too
        rig.emulator.set("direct_d2h_ms_per_gib", "0")
        assert criu.wait(60) != 0
        log = log_path(images, "dump").read_text()
        assert "memory has to last for the job, and not so much is left of it as was" in log
        assert f"brought back pid {job.pid}" in log
        require_nothing_left(rig, job, images, arena)
