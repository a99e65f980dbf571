# SPDX-License-Identifier: Apache-2.0
"""Files on a tmpfs that were removed while processes share them: stored as other shared memory is,
and above CRIU's limit too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from campaigns.rig import Rig
from campaigns.steady_job import SteadyJob
from gpustasis._core import ImageReader, MemoryKind, RegionKind, image_name
from gpustasis.image.verification import verify_directory
from support.certificates import Pair
from support.cpu_memory import (
    OURS,
    WITHOUT_PLUGIN,
    refused,
    require_refused_when_damaged,
    running,
)
from support.dump_kills import kill_dumps
from support.live_sealing import opened_by
from support.restore_kills import RestoreKills

from .test_shared_memory import DATA, MIB, shared_bytes, told

DUMP_KILLS = 4
RESTORE_KILLS = 2  # in each part of a restore
OF_FILE = (MIB * 3 // 4) << 20  # of every four MiB one is a hole
# What CRIU has of all files: the end of one that ends within a page, and how long each is.
GHOSTS = 64 << 10
TOO_LARGE = "increase limit"  # in criu's log

# Shares a file as PyTorch and the standard library do; it has no name any more when it is used.
PYTHON_JOB = """#!{python} -IS
import os, sys, time
from multiprocessing import resource_tracker
resource_tracker.register = resource_tracker.unregister = lambda *_: None # no process for it
from multiprocessing.shared_memory import SharedMemory
area = SharedMemory(create=True, size=64 << 20)
other = SharedMemory(area.name)
path = "/proc/self/fd/%d" % area._fd
area.unlink()
for mib in range(0, 64, 2):
    area.buf[mib << 20 : (mib + 1) << 20] = bytes([mib + 1]) * (1 << 20)
other.close()
child = os.fork()
os.utime(path, ns=(1000, 2000))
before = os.stat(path)
for step in range(1 << 30):
    for mib in range(0, 64, 2):
        if area.buf[mib << 20 : (mib + 1) << 20] != bytes([mib + 1]) * (1 << 20):
            print("wrong memory", flush=True)
            sys.exit(1)
    now = os.stat(path)
    if (now.st_blocks, now.st_mtime_ns // 1000) != (before.st_blocks, 2):
        print("another file", now, flush=True)
        sys.exit(1)
    print(os.getpid(), "step", step, "ok", flush=True)
    time.sleep(0.02)
"""


def ghost_bytes(images: Path) -> int:
    """On disk: what CRIU stores of files without a name."""
    found = list(images.glob("ghost-file-*.img"))
    assert found
    return sum(path.stat().st_blocks * 512 for path in found)


def blocks(job: SteadyJob) -> int:
    """Of the file that all share."""
    links = Path(f"/proc/{job.pid}/fd").iterdir()
    path = next(link for link in links if " of all (deleted)" in os.readlink(link))
    return os.stat(path).st_blocks


def test_a_removed_file_is_stored_once_and_stays_shared(rig: Rig, shared_job: Path) -> None:
    """Larger than CRIU's limit for such files, and one process has it open only."""
    with running(rig, shared_job, mib=MIB, children=2, tmpfs=1, reader=1) as job:
        assert TOO_LARGE in refused(rig.dump(job, rig.images()))
        job.run_on()
        before = blocks(job)
        for _ in range(2):  # as CRIU has made it, it is stored again
            images = rig.images()
            dumped = rig.dump(job, images, config=OURS)
            assert dumped.status == 0, dumped.errors
            job.wait()
            assert ghost_bytes(images) < GHOSTS
            assert shared_bytes(images, "dump") == DATA
            assert told(images, "dump")["shared_stored_twice_bytes"] == 0
            assert verify_directory(images).problems == []
            restored = rig.restore(images)
            assert restored.status == 0, restored.errors
            assert shared_bytes(images, "restore") == DATA
            job.run_on(5)
            assert blocks(job) <= before


def test_a_file_of_which_only_mappings_are_left(rig: Rig, shared_job: Path) -> None:
    with running(rig, shared_job, mib=MIB, children=1, tmpfs=1, fds=0) as job:
        images = rig.images()
        dumped = rig.dump(job, images, config=OURS)
        assert dumped.status == 0, dumped.errors
        job.wait()
        assert shared_bytes(images, "dump") == DATA
        assert rig.restore(images).status == 0
        job.run_on()


def test_shared_memory_of_python(rig: Rig, python_job: Path) -> None:
    with running(rig, python_job, forked_children=1) as job:
        images = rig.images()
        dumped = rig.dump(job, images, config=OURS)
        assert dumped.status == 0, dumped.errors
        job.wait()
        assert shared_bytes(images, "dump") == 32 << 20
        restored = rig.restore(images)
        assert restored.status == 0, restored.errors
        job.run_on()


@pytest.fixture
def python_job(tmp_path: Path) -> Path:
    script = tmp_path / "shared_job"
    script.write_text(PYTHON_JOB.format(python=os.path.realpath("/usr/bin/python3")))
    script.chmod(0o755)
    return script


def test_a_packed_checkpoint_has_it_too(newest_rig: Rig, shared_job: Path) -> None:
    with running(newest_rig, shared_job, mib=MIB, children=1, tmpfs=1) as job:
        images = newest_rig.images()
        dumped = newest_rig.dump(job, images, config=OURS | {"layout": "packed"})
        assert dumped.status == 0, dumped.errors
        job.wait()
        assert not list(images.glob("ghost-file-*.img"))
        assert newest_rig.restore(images).status == 0
        job.run_on()


def test_a_sealed_checkpoint_has_it_too(newest_rig: Rig, shared_job: Path, me: Pair) -> None:
    with running(newest_rig, shared_job, mib=MIB, children=1, tmpfs=1) as job:
        images = newest_rig.images()
        config = OURS | {"recipients": [str(me.certificate)]}
        dumped = newest_rig.dump(job, images, config=config)
        assert dumped.status == 0, dumped.errors
        job.wait()
        assert not list(images.glob("ghost-file-*.img"))
        restored = newest_rig.restore(images, config=opened_by(me))
        assert restored.status == 0, restored.errors
        job.run_on()


def test_a_dump_that_fails_late_leaves_the_job_exact(newest_rig: Rig, shared_job: Path) -> None:
    script = newest_rig.scratch / "fails-at-the-end"
    script.write_text('#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" != post-dump ]\n')
    script.chmod(0o755)
    with running(newest_rig, shared_job, mib=MIB, children=1, tmpfs=1, reader=1) as job:
        for _ in range(2):
            images = newest_rig.images()
            failed = newest_rig.dump(job, images, "--action-script", str(script), config=OURS)
            assert failed.status != 0
            assert ghost_bytes(images) < GHOSTS  # CRIU was done
            job.run_on()


def test_criu_killed_in_the_dump_leaves_the_job_exact(rig: Rig, shared_job: Path) -> None:
    with running(rig, shared_job, mib=MIB, children=1, tmpfs=1, reader=1) as job:
        kill_dumps(rig, job, DUMP_KILLS)


@pytest.fixture
def checkpoint(rig: Rig, shared_job: Path) -> Iterator[tuple[SteadyJob, Path]]:
    with running(rig, shared_job, mib=MIB, children=1, tmpfs=1, reader=1) as job:
        images = rig.images()
        dumped = rig.dump(job, images, config=OURS)
        assert dumped.status == 0, dumped.errors
        job.wait()
        yield job, images


@pytest.mark.one_criu
def test_criu_killed_in_the_restore_leaves_no_process_that_lacks_memory(
    rig: Rig, checkpoint: tuple[SteadyJob, Path]
) -> None:
    job, images = checkpoint
    killed = RestoreKills(rig, job, images, together=True)
    killed.measure()
    killed.hit_all(RESTORE_KILLS)
    killed.restore("", 0)
    job.run_on()


def test_a_damaged_or_missing_image_kills_all(rig: Rig, checkpoint: tuple[SteadyJob, Path]) -> None:
    job, images = checkpoint
    name = image_name(job.pid, MemoryKind.CPU)
    lacking = rig.copy(images)
    (lacking / name).unlink()
    assert name in refused(rig.restore(lacking))
    assert not job.alive_pids()
    assert WITHOUT_PLUGIN in refused(rig.restore(images, plugin=False))
    assert not job.alive_pids()
    regions = ImageReader.open(images / name).info.regions
    shared = {one.address for one in regions if one.kind == RegionKind.SHARED_ANONYMOUS}
    require_refused_when_damaged(rig, job, images, name, shared)


def test_what_a_process_outside_has_open_is_left_to_criu(newest_rig: Rig, shared_job: Path) -> None:
    with running(newest_rig, shared_job, mib=MIB, children=1, tmpfs=1) as job:
        links = Path(f"/proc/{job.pid}/fd").iterdir()
        path = next(link for link in links if " of all (deleted)" in os.readlink(link))
        with open(path, "rb"):
            images = newest_rig.images()
            log = refused(newest_rig.dump(job, images, config=OURS))
            assert f"process {os.getpid()}, outside of the tree, uses it" in log
            assert TOO_LARGE in log
            job.run_on()
            images = newest_rig.images()
            dumped = newest_rig.dump(job, images, "--ghost-limit", "1G", config=OURS)
            assert dumped.status == 0, dumped.errors
        job.wait()
        assert shared_bytes(images, "dump") == DATA - OF_FILE
        assert ghost_bytes(images) >= OF_FILE
        assert newest_rig.restore(images).status == 0
        job.run_on()
