# SPDX-License-Identifier: Apache-2.0
"""CPU memory in images of ours, of dumps and restores that fail or are killed: no job loses a byte
by its dump, and none runs that lacks memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from campaigns.rig import Rig
from gpustasis._core import MemoryKind, image_name
from support.cpu_memory import OURS, refused, running
from support.dump_kills import CRIU_IN_TASKS, kill_dumps
from support.restore_kills import RestoreKills

DUMP_KILLS = 8
RESTORE_KILLS = 4  # in each part of a restore
AT_THE_END = "post-dump"  # what criu calls a script with


def test_an_image_that_cannot_be_written_leaves_the_job_exact(
    newest_rig: Rig, memory_job: Path
) -> None:
    with running(newest_rig, memory_job, mib=40) as job:
        images = newest_rig.images()
        (images / image_name(job.pid, MemoryKind.CPU)).mkdir()  # the image cannot get its name
        log = refused(newest_rig.dump(job, images, config=OURS))
        assert image_name(job.pid, MemoryKind.CPU) in log
        job.run_on()


def test_a_dump_that_fails_late_leaves_the_job_exact(
    newest_rig: Rig, memory_job: Path, tmp_path: Path
) -> None:
    """Criu fails once all CPU memory is in images of ours: first when it begins with a process,
    last when it has written all."""
    script = tmp_path / "script"
    script.write_text(f'#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" != {AT_THE_END} ]\n')
    script.chmod(0o700)
    with running(newest_rig, memory_job, mib=40, children=1) as job:
        first, second = job.pids
        for point in (
            "pages-1.img",
            f"core-{first}.img",
            f"core-{second}.img",
            "inventory.img",
            "",
        ):
            images = newest_rig.images()
            extra = []
            if point:
                (images / point).mkdir()  # what criu writes there, it cannot
            else:
                extra = ["--action-script", str(script)]
            log = refused(newest_rig.dump(job, images, *extra, config=OURS))
            assert (point or AT_THE_END) in log
            for pid in job.pids:
                begun, stored = log.index(CRIU_IN_TASKS), log.index(f"CPU memory of pid {pid} in ")
                assert stored < begun, point
            job.threads()  # none is traced
            job.run_on()
            record = json.loads((images / "gpustasis-dump.json").read_text())
            assert record["result"] == "failed", point
        images = newest_rig.images()
        assert newest_rig.dump(job, images, config=OURS).status == 0
        job.wait()
        assert newest_rig.restore(images).status == 0
        job.run_on()


@pytest.mark.one_criu
def test_criu_killed_in_the_dump_leaves_the_job_exact(rig: Rig, memory_job: Path) -> None:
    with running(rig, memory_job, mib=40, children=1) as job:
        kill_dumps(rig, job, DUMP_KILLS)
        # No memory is missing: no dump is refused, and it holds what it should.
        images = rig.images()
        assert rig.dump(job, images, config=OURS).status == 0
        job.wait()
        assert rig.restore(images).status == 0
        job.run_on()


@pytest.mark.one_criu
def test_criu_killed_in_the_restore_leaves_no_process_that_lacks_memory(
    rig: Rig, memory_job: Path
) -> None:
    """In each part of it, from where all processes stand in CRIU's code to the end."""
    with running(rig, memory_job, mib=20, children=1, threads=1) as job:
        images = rig.images()
        assert rig.dump(job, images, config=OURS).status == 0
        job.wait()
        killed = RestoreKills(rig, job, images)
        killed.measure()
        assert len(killed.parts) == 3 + len(job.pids)  # each process's memory is one
        killed.hit_all(RESTORE_KILLS)
        killed.restore("", 0)
        job.run_on()
