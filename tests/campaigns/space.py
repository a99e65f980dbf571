# SPDX-License-Identifier: Apache-2.0
"""The image directory is full: at each file that a dump makes, and at each of many sizes.

A dump that fails must leave the job running and exact. One that succeeds all the same (what did not
fit was not needed) must be a checkpoint: it is restored, and the job must be exact.
"""

from __future__ import annotations

import signal
from pathlib import Path
from random import Random

from campaigns.rig import Jobs, Rig, small_disk, small_filesystem
from campaigns.steady_job import SteadyJob
from campaigns.tally import Tally

PAGE = 4096  # what a tmpfs counts in
_AMPLE = 64 << 20
_ROUND = 1 << 16
_DISK_SLACK = 1.5  # ext4 needs room of its own


def run(rig: Rig, random: Random, sizes: int, *, every_file: bool = True) -> Tally:
    """Dump into file systems too small by files, one more each time until it fits (or a few of
    them), and by size, at `sizes` places between nothing and enough."""
    tally = Tally()
    with Jobs(lambda: _start(rig)) as jobs:
        need, files = _measure(rig, jobs.get())
        counts = range(1, files + 2) if every_file else sorted(random.sample(range(2, files), 4))
        trials = [(_AMPLE, count) for count in counts]
        for index in range(sizes):
            place = random.uniform(index / sizes, (index + 1) / sizes)
            trials.append((max(PAGE, int(place * need) // PAGE * PAGE), 0))
        for size, inodes in trials:
            tally.counts["trials"] += 1
            try:
                tally.counts[_try_one(rig, jobs.get(), size, inodes)] += 1
            except AssertionError as failure:
                what = f"room for {inodes} files" if inodes else f"room for {size} of {need} bytes"
                tally.failures.append(f"{what}: {failure}")
                jobs.drop()
    return tally


def run_disk(rig: Rig, random: Random, sizes: int) -> Tally:
    """The same by size on a disk, where space is reserved ahead of what is written."""
    tally = Tally()
    with Jobs(lambda: _start(rig)) as jobs:
        need, _ = _measure(rig, jobs.get())
        for index in range(sizes):
            place = random.uniform(index / sizes, (index + 1) / sizes) * _DISK_SLACK
            size = max(PAGE, int(place * need) // PAGE * PAGE)
            tally.counts["trials"] += 1
            try:
                with small_disk(rig.scratch / "full", size) as images:
                    tally.counts[_dump_into(rig, jobs.get(), images)] += 1
            except AssertionError as failure:
                tally.failures.append(f"room for {size} of {need} bytes: {failure}")
                jobs.drop()
    return tally


def _start(rig: Rig) -> SteadyJob:
    return SteadyJob(rig.programs.job, rig.scratch / "full-job", rig.environ, mib=4, children=1)


def _measure(rig: Rig, job: SteadyJob) -> tuple[int, int]:
    """Bytes and files that a whole dump takes, a little more than exact."""
    images = rig.images()
    dumped = rig.dump(job, images, "--leave-running")
    assert dumped.status == 0, dumped.errors
    job.run_on()
    sizes = [path.stat().st_size for path in images.iterdir()]
    return sum(-(-size // PAGE) * PAGE for size in sizes) + _ROUND, len(sizes)


def _try_one(rig: Rig, job: SteadyJob, size: int, inodes: int) -> str:
    with small_filesystem(rig.scratch / "full", size, inodes) as images:
        return _dump_into(rig, job, images)


def _dump_into(rig: Rig, job: SteadyJob, images: Path) -> str:
    threads = job.threads()
    dumped = rig.dump(job, images)
    if dumped.status != 0:
        assert "No space left on device" in dumped.log + dumped.output, dumped.errors
        job.run_on()
        rig.settle(images)
        assert job.threads() == threads
        return "dump failed, job runs on"
    assert job.wait() == -signal.SIGKILL
    rig.settle(images)
    restored = rig.restore(images)
    assert restored.status == 0, f"dumped, not restored: {restored.errors}"
    job.run_on()
    return "dumped and restored"
