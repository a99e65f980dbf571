# SPDX-License-Identifier: Apache-2.0
"""Shared memory in images of ours: stored once, filled once, and still shared."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from campaigns.rig import Rig
from campaigns.steady_job import SteadyJob
from gpustasis._core import ImageReader, MemoryKind, RegionKind, image_name
from gpustasis.image.flatten import flatten
from gpustasis.image.verification import verify_directory
from support.cpu_memory import (
    OURS,
    WITHOUT_PLUGIN,
    pages_bytes,
    refused,
    require_refused_when_damaged,
    running,
)
from support.restore_kills import RestoreKills

MIB = 40
AUTO = {"cpu_memory": "auto"}
RESTORE_KILLS = 2  # in each part of a restore
# Private memory of the processes, windows around what is in use, and what is small.
LEFT_TO_CRIU = 8 << 20
# Of every four MiB one is a hole, of anonymous memory and of a memfd, or file on a tmpfs; a second
# one has 3 MiB; 4 MiB are of children.
DATA = (2 * MIB * 3 // 4 + 3 + 4) << 20


def told(images: Path, stage: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((images / f"gpustasis-{stage}.json").read_text())
    return found


def shared_bytes(images: Path, stage: str) -> int:
    return sum(task["shared_bytes"] for task in told(images, stage)["cpu_memory"])


def test_shared_memory_is_stored_once_and_stays_shared(rig: Rig, shared_job: Path) -> None:
    with running(rig, shared_job, mib=MIB, children=2) as job:
        images = rig.images()
        dumped = rig.dump(job, images, config=OURS)
        assert dumped.status == 0, dumped.errors
        job.wait()
        assert pages_bytes(images) < LEFT_TO_CRIU
        assert shared_bytes(images, "dump") == DATA
        assert told(images, "dump")["shared_stored_twice_bytes"] == 0
        restored = rig.restore(images)
        assert restored.status == 0, restored.errors
        assert shared_bytes(images, "restore") == DATA
        job.run_on(5)
        again = rig.images()  # as CRIU has made it, it is stored again
        assert rig.dump(job, again, config=OURS).status == 0
        job.wait()
        assert shared_bytes(again, "dump") == DATA and pages_bytes(again) < LEFT_TO_CRIU
        assert rig.restore(again).status == 0
        job.run_on(5)


def test_each_part_has_one_owner(newest_rig: Rig, shared_job: Path) -> None:
    with running(newest_rig, shared_job, mib=MIB, children=2) as job:
        images = newest_rig.images()
        assert newest_rig.dump(job, images, "--leave-running", config=OURS).status == 0
        job.run_on()
        stored = {}
        for pid in job.pids:
            path = images / image_name(pid, MemoryKind.CPU)
            if not path.exists():
                continue
            regions = ImageReader.open(path).info.regions
            stored[pid] = sum(
                region.length for region in regions if region.kind == RegionKind.SHARED_ANONYMOUS
            )
        # What only children map is in the image of one of them.
        assert sorted(filter(None, stored.values())) == [4 << 20, DATA - (4 << 20)]
        assert verify_directory(images).problems == []


@pytest.mark.parametrize("tmpfs", [0, 1], ids=["memory", "removed-files"])
def test_dumps_that_leave_the_job_running_chain(
    newest_rig: Rig, shared_job: Path, tmpfs: int
) -> None:
    with running(newest_rig, shared_job, mib=MIB, children=1, tmpfs=tmpfs) as job:
        first, second = newest_rig.images(), newest_rig.images()
        assert newest_rig.dump(job, first, "--leave-running", config=OURS).status == 0
        job.run_on()
        config = OURS | {"parent": str(first)}
        dumped = newest_rig.dump(job, second, config=config)
        assert dumped.status == 0, dumped.errors
        job.wait()
        tasks = told(second, "dump")["cpu_memory"]
        assert sum(task["ref"]["plain_bytes"] for task in tasks) > DATA // 2
        flat = newest_rig.scratch / "flat"
        flatten(second, flat)
        shutil.rmtree(first)
        assert newest_rig.restore(flat).status == 0
        job.run_on()


def test_a_dump_that_fails_late_leaves_the_job_exact(newest_rig: Rig, shared_job: Path) -> None:
    script = newest_rig.scratch / "fails-at-the-end"
    script.write_text('#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" != post-dump ]\n')
    script.chmod(0o755)
    with running(newest_rig, shared_job, mib=MIB, children=1) as job:
        for _ in range(2):
            images = newest_rig.images()
            failed = newest_rig.dump(job, images, "--action-script", str(script), config=OURS)
            assert failed.status != 0
            assert pages_bytes(images) < LEFT_TO_CRIU  # CRIU was done
            assert shared_bytes(images, "dump") == DATA
            job.run_on()


@pytest.fixture
def checkpoint(newest_rig: Rig, shared_job: Path) -> Iterator[tuple[SteadyJob, Path]]:
    with running(newest_rig, shared_job, mib=MIB, children=1) as job:
        images = newest_rig.images()
        assert newest_rig.dump(job, images, config=OURS).status == 0
        job.wait()
        yield job, images


def test_a_damaged_image_of_shared_memory_kills_all(
    newest_rig: Rig, checkpoint: tuple[SteadyJob, Path]
) -> None:
    job, images = checkpoint
    name = image_name(job.pid, MemoryKind.CPU)
    regions = ImageReader.open(images / name).info.regions
    shared = {one.address for one in regions if one.kind == RegionKind.SHARED_ANONYMOUS}
    require_refused_when_damaged(newest_rig, job, images, name, shared)


def test_a_missing_image_is_refused(newest_rig: Rig, checkpoint: tuple[SteadyJob, Path]) -> None:
    job, images = checkpoint
    lacking = newest_rig.copy(images)
    path = lacking / image_name(job.pid, MemoryKind.CPU)
    path.unlink()
    assert path.name in refused(newest_rig.restore(lacking))
    assert not job.alive_pids()
    assert WITHOUT_PLUGIN in refused(newest_rig.restore(images, plugin=False))
    assert not job.alive_pids()


def test_criu_killed_in_the_restore_leaves_no_process_that_lacks_shared_memory(
    newest_rig: Rig, checkpoint: tuple[SteadyJob, Path]
) -> None:
    """In each part of it, from where all processes stand in CRIU's code to the end."""
    job, images = checkpoint
    killed = RestoreKills(newest_rig, job, images, together=True)
    killed.measure()
    killed.hit_all(RESTORE_KILLS)
    killed.restore("", 0)
    job.run_on()


@contextmanager
def held_outside(pid: int, name: str, code: str) -> Iterator[None]:
    """Another process, outside of the tree, runs `code` on /proc/PID/fd/N, the memfd `name`."""
    links = Path(f"/proc/{pid}/fd").iterdir()
    path = next(link for link in links if os.readlink(link).startswith(f"/memfd:{name} "))
    words = (
        f"import mmap, sys\nfile = open({str(path)!r}, 'r+b')\n{code}\nprint(flush=True)\ninput()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "\n"
        try:
            yield
        finally:
            process.kill()


MAPPED = f"""
area = mmap.mmap(file.fileno(), {mmap.PAGESIZE})
area[0]
file.close()
"""


@pytest.mark.parametrize("code", ["", MAPPED], ids=["open", "mapped"])
def test_what_a_process_outside_uses_is_left_to_criu(
    newest_rig: Rig, shared_job: Path, code: str
) -> None:
    with running(newest_rig, shared_job, mib=MIB, children=1) as job:
        images = newest_rig.images()
        with held_outside(job.pid, "of all", code):
            dumped = newest_rig.dump(job, images, config=OURS)
        assert dumped.status == 0, dumped.errors
        assert "outside of the tree, uses it" in dumped.log
        job.wait()
        of_memfd = (MIB * 3 // 4) << 20
        assert shared_bytes(images, "dump") == DATA - of_memfd
        assert of_memfd <= pages_bytes(images) < of_memfd + LEFT_TO_CRIU
        assert newest_rig.restore(images).status == 0
        job.run_on()


def test_what_is_sealed_against_writing_is_left_to_criu(newest_rig: Rig, shared_job: Path) -> None:
    with running(newest_rig, shared_job, mib=MIB, children=1, sealed=1) as job:
        images = newest_rig.images()
        dumped = newest_rig.dump(job, images, config=OURS)
        assert dumped.status == 0, dumped.errors
        assert "it is sealed against writing" in dumped.log
        job.wait()
        assert shared_bytes(images, "dump") == DATA - ((MIB * 3 // 4) << 20)
        assert newest_rig.restore(images).status == 0
        job.run_on()


def test_a_memfd_of_which_only_mappings_are_left(newest_rig: Rig, shared_job: Path) -> None:
    with running(newest_rig, shared_job, mib=MIB, children=1, fds=0) as job:
        images = newest_rig.images()
        assert newest_rig.dump(job, images, config=OURS).status == 0
        job.wait()
        assert shared_bytes(images, "dump") == DATA
        assert newest_rig.restore(images).status == 0
        job.run_on()


@pytest.mark.parametrize("externalize", [True, False])
@pytest.mark.parametrize("kind", [2, 3], ids=["shared", "memfd"])
def test_staging_in_shared_memory_is_not_stored_twice(
    newest_rig: Rig, kind: int, externalize: bool
) -> None:
    """What the driver stages in a memfd is no staging to us, and CPU memory as any other."""
    before = newest_rig.emulator.status()["settings"]["staging"]
    newest_rig.emulator.set("staging", str(kind))
    try:
        with newest_rig.job(mib=16, children=1) as job:
            images = newest_rig.images()
            config = OURS | {"externalize": externalize}
            dumped = newest_rig.dump(job, images, config=config)
            assert dumped.status == 0, dumped.errors
            job.wait()
            newest_rig.settle(images)
            assert (shared_bytes(images, "dump") >= 16 << 20) == (kind == 3)
            restored = newest_rig.restore(images)
            assert restored.status == 0, restored.errors
            job.run_on()
    finally:
        newest_rig.emulator.set("staging", str(before))


def test_auto_takes_what_is_large(newest_rig: Rig, shared_job: Path) -> None:
    for mib, taken in ((8, False), (80, True)):
        with running(newest_rig, shared_job, mib=mib, children=1) as job:
            images = newest_rig.images()
            assert newest_rig.dump(job, images, "--leave-running", config=AUTO).status == 0
            job.run_on()
            assert (images / image_name(job.pid, MemoryKind.CPU)).exists() == taken
            shutil.rmtree(images)
