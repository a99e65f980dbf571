# SPDX-License-Identifier: Apache-2.0
"""Processes whose memory is alike, with real CRIU: it is stored once, and each gets all of its own
back, also when the dump fails or is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from campaigns.rig import Rig, workers
from campaigns.steady_job import SteadyJob
from gpustasis._core import ImageReader, MemoryKind, find_drop_record, image_name, read_manifest
from gpustasis.archive.flatten import flatten_archive
from gpustasis.archive.opened import open_archive
from gpustasis.archive.verification import verify_archive
from gpustasis.image.flatten import flatten
from gpustasis.image.inspection import inspect_directory
from gpustasis.image.verification import verify_directory
from gpustasis.recovery import GUARDIAN_COMM, WORKER_COMM
from support.archives import pack
from support.cpu_memory import OURS

MIB = 24  # a third is zeros, a third repeats, a third is random
TIMEOUT_S = 30.0
REACHED = """#!/bin/sh
[ "$CRTOOLS_SCRIPT_ACTION" = post-dump ] || exit 0
echo $$ >{reached}.part; mv {reached}.part {reached}
while kill -0 $PPID; do sleep 0.1; done
"""


def told(images: Path, key: str = "tasks") -> list[dict[str, Any]]:
    """Of each task; first of whose image holds what is alike: the driver was done with it first."""
    found: list[dict[str, Any]] = json.loads((images / "gpustasis-dump.json").read_text())[key]
    return sorted(found, key=lambda task: int(task["alike"]["chunks"]))


def require_alike(images: Path, key: str = "tasks") -> None:
    """All but one image hold little, as the dump and their indexes say."""
    first, *others = told(images, key)
    assert first["alike"]["chunks"] == 0
    own = first["raw"]["stored_bytes"] + first["lz4"]["stored_bytes"]
    assert own > 0
    kind = MemoryKind.GPU if key == "tasks" else MemoryKind.CPU
    for task in others:
        assert task["alike"]["plain_bytes"] > MIB << 19  # of zeros there need be no more than one
        assert task["alike"]["stored_bytes"] == 0
        assert task["file_bytes"] < first["file_bytes"] // 2
        image = ImageReader.open(images / image_name(task["image_pid"], kind))
        assert image.file_size == task["file_bytes"]
        assert image.totals.alike.chunks == task["alike"]["chunks"]
        assert {source.depth for source in image.info.sources} == {0}


def test_ranks_are_stored_once_and_come_back(rig: Rig) -> None:
    with rig.job(mib=MIB, children=2, alike=1) as job:
        images = rig.images()
        dumped = rig.dump(job, images)
        assert dumped.status == 0, dumped.errors
        assert job.wait() == -signal.SIGKILL
        require_alike(images)
        checked = verify_directory(images)
        assert not checked.problems
        assert checked.alike_bytes == sum(t["alike"]["plain_bytes"] for t in told(images))
        assert (checked.earlier_bytes, checked.earlier_checkpoints) == (0, 0)
        restored = rig.restore(images)
        assert restored.status == 0, restored.errors
        job.run_on()


def test_cpu_memory_is_stored_once_and_comes_back(rig: Rig) -> None:
    with rig.job(mib=MIB, plain_children=1, alike=1, cuda=0) as job:
        images = rig.images()
        dumped = rig.dump(job, images, config=OURS)
        assert dumped.status == 0, dumped.errors
        job.wait()
        require_alike(images, "cpu_memory")
        restored = rig.restore(images)
        assert restored.status == 0, restored.errors
        job.run_on()


def test_only_tasks_with_the_same_rights_share(newest_rig: Rig) -> None:
    """One that may do less could make memory with the hash of what the other is known to have."""
    with newest_rig.job(mib=MIB, plain_children=2, alike=2, cuda=0) as job:
        images = newest_rig.images()
        dumped = newest_rig.dump(job, images, config=OURS)
        assert dumped.status == 0, dumped.errors
        job.wait()
        referred = {task["pid"]: task["alike"]["chunks"] for task in told(images, "cpu_memory")}
        root, child, other = job.pids
        assert referred[root] == 0
        assert sorted(count > 0 for count in (referred[child], referred[other])) == [False, True]
        restored = newest_rig.restore(images)
        assert restored.status == 0, restored.errors
        job.run_on()


def test_a_chain_whose_members_have_tasks_alike(rig: Rig) -> None:
    with rig.job(mib=MIB, children=1, alike=1) as job:
        chain = [rig.images()]
        assert rig.dump(job, chain[0], "--leave-running").status == 0
        for extra in (["--leave-running"], []):
            job.run_on()
            chain.append(rig.images())
            config = {"parent": str(chain[-2])}
            dumped = rig.dump(job, chain[-1], *extra, config=config)
            assert dumped.status == 0, dumped.errors
            assert all(task["ref"]["chunks"] > 0 for task in told(chain[-1]))
        job.wait()
        holder = told(chain[0])[0]["image_pid"]
        for task in told(chain[1]):  # of both: what they have alike is in the image of one
            second = ImageReader.open(chain[1] / image_name(task["image_pid"])).info.sources
            assert (1, holder) in {(source.depth, source.pid) for source in second}
        assert not verify_directory(chain[-1]).problems
        restored = rig.restore(chain[-1])
        assert restored.status == 0, restored.errors
        job.run_on()


def test_an_archive_is_looked_at_and_made_a_directory(newest_rig: Rig, tmp_path: Path) -> None:
    with newest_rig.job(mib=MIB, children=1, alike=1) as job:
        images = newest_rig.images()
        assert newest_rig.dump(job, images).status == 0
        job.wait()
        (alike,) = (task["alike"]["plain_bytes"] for task in told(images)[1:])
        with open_archive(pack(images, tmp_path / "job.tar")) as archive:
            checked = verify_archive(archive)
            assert not checked.problems
            assert (checked.alike_bytes, checked.outside_bytes) == (alike, 0)
            flatten_archive(archive, tmp_path / "from-archive")
        flatten(images, tmp_path / "from-directory")
        for flat in (tmp_path / "from-archive", tmp_path / "from-directory"):
            found = inspect_directory(flat)
            for process in found.processes:
                assert process.cuda is not None
                assert process.cuda.image is not None
                assert process.cuda.image.sources == ()
                assert process.cuda.image.encodings["alike"].chunks == 0
            assert not verify_directory(flat).problems
        restored = newest_rig.restore(tmp_path / "from-archive")
        assert restored.status == 0, restored.errors
        job.run_on()


@pytest.mark.parametrize("point", ["core-{}.img", "inventory.img"])
def test_a_failed_dump_is_undone(rig: Rig, point: str) -> None:
    """By criu's own process: what was dropped of one comes out of another's image."""
    with rig.job(mib=MIB, children=1, alike=1) as job:
        images = rig.images()
        (images / point.format(job.pids[1])).mkdir()  # what criu writes there, it cannot
        dumped = rig.dump(job, images)
        assert dumped.status != 0
        require_alike(images)
        job.run_on()
        assert rig.dump(job, rig.images()).status == 0
        job.wait()


def kill_when_dropped(
    rig: Rig, job: SteadyJob, images: Path, *kept: str, aside: Path | None = None
) -> None:
    """Kill criu, and what the plugin has left beside it but processes named `kept`, when all GPU
    memory is in the images and out of the job. aside: where the images are moved to before."""
    reached = images.with_name(f"{images.name}.reached")
    script = images.with_name(f"{images.name}.script")
    script.write_text(REACHED.format(reached=reached))
    script.chmod(0o755)
    criu = rig.start(rig.dump_words(job, images, ["--action-script", str(script)]))
    deadline = time.monotonic() + TIMEOUT_S
    while not reached.exists():
        assert criu.poll() is None, "criu ended before it was to be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if aside is not None:
        for path in images.glob("gpustasis-*.img"):
            path.rename(aside / path.name)
    for pid in workers(images):
        if Path(f"/proc/{pid}/comm").read_text().strip() not in kept:
            os.kill(pid, signal.SIGKILL)
    criu.kill()
    criu.wait()
    os.kill(int(reached.read_text()), signal.SIGKILL)


@pytest.mark.parametrize("kept", [WORKER_COMM, GUARDIAN_COMM])
def test_who_outlives_criu_brings_the_job_back(rig: Rig, kept: str) -> None:
    """The worker was there before any image, and opens them by their directory; the guardians
    have begun with all of them open."""
    with rig.job(mib=MIB, children=1, alike=1) as job:
        images, aside = rig.images(), rig.images()
        guarded = kept == GUARDIAN_COMM
        kill_when_dropped(rig, job, images, kept, aside=aside if guarded else None)
        if guarded:  # they give the memory back, and leave the driver alone
            rig.settle(images)
            for path in aside.iterdir():
                path.rename(images / path.name)
            for pid in job.pids:
                recover(rig, pid, images)
        job.run_on()
        rig.settle(images)
        assert all(find_drop_record(pid) is None for pid in job.pids)
        found = [ImageReader.open(images / image_name(pid)).totals.alike for pid in job.pids]
        assert any(alike.chunks > 0 for alike in found)


def recover(rig: Rig, pid: int, images: Path) -> None:
    words = [sys.executable, "-m", "gpustasis", "recover", str(pid), "-D", str(images)]
    subprocess.run(words, env=dict(rig.environ), check=True, timeout=60)


def test_recover_reads_the_image_of_the_other(rig: Rig) -> None:
    with rig.job(mib=MIB, children=1, alike=1) as job:
        images = rig.images()
        kill_when_dropped(rig, job, images)
        found = [ImageReader.open(images / image_name(pid)).totals.alike for pid in job.pids]
        assert any(alike.chunks > 0 for alike in found)
        for pid in job.pids[::-1]:
            recover(rig, pid, images)
        job.run_on()


def test_a_restore_without_the_others_image_is_refused(newest_rig: Rig) -> None:
    with newest_rig.job(mib=MIB, children=1, alike=1) as job:
        images = newest_rig.images()
        assert newest_rig.dump(job, images).status == 0
        job.wait()
        tasks = [task for task in read_manifest(images).tasks if task.externalized]
        readers = {task.image_name: ImageReader.open(images / task.image_name) for task in tasks}
        # Either may have been the first to store what is alike.
        (holder,) = [name for name, image in readers.items() if not image.totals.alike.chunks]
        path, image = images / holder, readers[holder]
        raw = bytearray(path.read_bytes())
        chunk = next(c for c in map(image.chunk, range(len(image))) if c.stored_size)
        raw[chunk.offset + chunk.stored_size // 2] ^= 1
        path.write_bytes(raw)
        damaged = newest_rig.restore(images)
        assert damaged.status != 0
        path.unlink()
        missing = newest_rig.restore(images)
        assert missing.status != 0
        assert holder in missing.log
        assert job.alive_pids() == []
