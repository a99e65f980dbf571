# SPDX-License-Identifier: Apache-2.0
"""layout = "packed" of a tree with what CRIU keeps in images of their own; a disk that breaks."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from campaigns.rig import Rig
from gpustasis._core import PackReader
from gpustasis.criu.plugin import Scalar
from support.cpu_memory import OURS, running
from support.job import TIMEOUT_S, Job

PACKED: dict[str, Scalar] = {"layout": "packed"}
# It says a number at each step, and ends if anything of it is not as it was.
_JOB = """
import mmap, os, sys, time
ghost = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.write(ghost, b"ghost" * 1000)
os.unlink(sys.argv[1])
there, back = os.pipe()
os.write(back, b"in the pipe")
shared = mmap.mmap(-1, 1 << 20)
count = 0
if os.fork() == 0:
    while True:
        count += 1
        shared[:8] = count.to_bytes(8, "little")
        time.sleep(0.005)
seen = 0
while True:
    assert os.pread(ghost, 10000, 0) == b"ghost" * 1000
    text = os.read(there, 100)
    assert text == b"in the pipe"
    os.write(back, text)
    now = int.from_bytes(shared[:8], "little")
    if now > seen:
        print(now, flush=True)
    seen = now
    time.sleep(0.01)
"""
_F_ADD_SEALS, _F_SEAL_GROW = 1033, 4  # linux/fcntl.h


def steps_of(job: Job) -> int:
    return len(job.output().splitlines())


def run_on(job: Job) -> None:
    before, deadline = steps_of(job), time.monotonic() + TIMEOUT_S
    while steps_of(job) < before + 3:
        assert time.monotonic() < deadline, job.output()[-2000:]
        time.sleep(0.02)


def test_files_without_a_name_pipes_and_shared_memory_come_back(rig: Rig) -> None:
    program = [sys.executable, "-I", "-S", "-c", _JOB, str(rig.scratch / "ghost")]
    job = Job(program, rig.scratch / "job.log", rig.environ)
    try:
        run_on(job)
        for config in (PACKED, PACKED | OURS):
            images = rig.images()
            (child,) = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
            dumped = rig.dump(job, images, config=config)
            assert dumped.status == 0, dumped.errors
            job.wait()
            os.waitpid(int(child), 0)  # it has come to us
            packed = {file.name.split("-")[0] for file in PackReader.open(images).files}
            assert {"ghost", "pipes", "pagemap"} <= packed
            restored = rig.restore(images)
            assert restored.status == 0, restored.errors
            run_on(job)
    finally:
        job.end()


@contextmanager
def breaking_disk(place: Path) -> Iterator[tuple[Path, int]]:
    """A file system, and the file in memory that is its disk: cut short and sealed, what would be
    written behind its end is an error of the disk."""
    disk = os.memfd_create("disk", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    place.mkdir()
    try:
        os.truncate(disk, 64 << 20)
        path = f"/proc/{os.getpid()}/fd/{disk}"
        subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", path], check=True, timeout=60)
        subprocess.run(["mount", "-o", "loop", path, place], check=True, timeout=60)
        try:
            yield place, disk
        finally:
            subprocess.run(["umount", "--lazy", place], check=True, timeout=60)
    finally:
        os.close(disk)


def test_a_disk_that_breaks_at_the_pack_costs_the_job_nothing(rig: Rig, memory_job: Path) -> None:
    with (
        running(rig, memory_job, mib=24, criu_restores=True) as job,
        breaking_disk(rig.scratch / "disk") as (place, disk),
    ):
        (place / "file").touch()  # what it takes to make one has been read from the disk then
        os.sync()
        os.truncate(disk, 4 << 20)
        fcntl.fcntl(disk, _F_ADD_SEALS, _F_SEAL_GROW)
        dumped = rig.dump(job, place, config=PACKED)  # its log is beside it, on another disk
        assert dumped.status == 1
        assert 'layout = "packed": ' in dumped.log, dumped.errors
        assert "Input/output error" in dumped.log, dumped.errors
        rig.settle(place)
        job.run_on()
        assert not (place / "inventory.img").exists()
