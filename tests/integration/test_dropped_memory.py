"""Memory that was dropped from a task is put back, and nothing else is taken for it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from campaigns.rig import Rig, workers
from campaigns.steady_job import SteadyJob
from gpustasis._core import ImageReader, find_drop_record, image_name
from support.job import Job

TIMEOUT_S = 30.0


def break_off(rig: Rig, job: SteadyJob, images: Path) -> None:
    """Kill criu, and the plugin's worker, when all GPU memory is in the images and out of the job."""
    reached = images.with_name(f"{images.name}.reached")
    script = images.with_name(f"{images.name}.script")
    script.write_text(
        '#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" = post-dump ] || exit 0\n'
        f"echo $$ >{reached}.part; mv {reached}.part {reached}\nexec sleep 60\n"
    )
    script.chmod(0o755)
    criu = rig.start(rig.dump_words(job, images, ["--action-script", str(script)]))
    deadline = time.monotonic() + TIMEOUT_S
    while not reached.exists():
        assert criu.poll() is None, "criu ended before it was to be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for pid in workers(images):
        os.kill(pid, signal.SIGKILL)
    criu.kill()
    criu.wait()
    os.kill(int(reached.read_text()), signal.SIGKILL)


def recover(rig: Rig, pid: int) -> None:
    subprocess.run(
        [sys.executable, "-m", "gpustasis", "recover", str(pid)],
        env=dict(rig.environ),
        check=True,
        timeout=60,
    )


def test_a_second_dump_does_not_take_dropped_memory_for_zeros(rig: Rig) -> None:
    with rig.job(mib=8, children=1) as job:
        broken = rig.images()
        break_off(rig, job, broken)
        second = rig.images()
        dumped = rig.dump(job, second, config={"found_locked": "dump"})
        assert dumped.status != 0, "missing pages were dumped as zeros, and the job was killed"
        assert job.alive_pids() == list(job.pids)
        named = re.search(r"gpustasis recover (\d+) -D (\S+)", dumped.log)
        assert named is not None, dumped.errors
        assert int(named[1]) in job.pids
        assert named[2] == str(broken)
        assert list(second.glob("gpustasis-*.img")) == []
        assert "locked pid" not in dumped.log
        for pid in job.pids:
            assert find_drop_record(pid) is not None
            recover(rig, pid)
            assert find_drop_record(pid) is None
        job.run_on()
        dumped = rig.dump(job, rig.images())
        assert dumped.status == 0, dumped.errors
        job.wait()


def test_a_dump_that_succeeds_leaves_no_record(newest_rig: Rig) -> None:
    with newest_rig.job(mib=4) as job:
        images = newest_rig.images()
        dumped = newest_rig.dump(job, images, "--leave-running")
        assert dumped.status == 0, dumped.errors
        assert find_drop_record(job.pid) is None
        job.run_on()


def test_two_tasks_with_one_pid_of_their_own_are_refused(newest_rig: Rig) -> None:
    """Their images would have one name: the second in the place of the first, which is dropped."""
    script = newest_rig.scratch / "tree.sh"
    logs = [newest_rig.scratch / f"steps-{number}" for number in range(2)]
    starts = [
        f"unshare --pid --fork --kill-child {newest_rig.program} --seed {number} >{log} 2>&1 &"
        for number, log in enumerate(logs)
    ]
    script.write_text("\n".join([*starts, "wait"]))
    job = Job(["/bin/sh", script], newest_rig.scratch / "tree.log", newest_rig.environ)
    try:
        wait_for_steps(logs)
        images = newest_rig.images()
        dumped = newest_rig.run(
            newest_rig.dump_words(job, images, ["--leave-running"]), images, "dump"
        )
        assert dumped.status != 0
        assert re.search(r"processes \d+ and \d+ use CUDA and both have pid 1 in", dumped.log)
        assert list(images.glob("gpustasis-*.img")) == []
        newest_rig.settle(images)
        wait_for_steps(logs)
    finally:
        job.end()


def wait_for_steps(logs: list[Path]) -> None:
    """Until each log says three more times that memory is right, and nothing else."""
    counts = [log.read_text().count(" ok\n") if log.exists() else 0 for log in logs]
    deadline = time.monotonic() + TIMEOUT_S
    for log, before in zip(logs, counts, strict=True):
        while not log.exists() or log.read_text().count(" ok\n") < before + 3:
            assert time.monotonic() < deadline, log.read_text()[-500:] if log.exists() else log
            time.sleep(0.01)
        assert "MISMATCH" not in log.read_text()


def test_what_threads_leave_behind_is_no_staging(newest_rig: Rig) -> None:
    """The emulator's helper threads leave a malloc arena and a stack behind: CRIU's business."""
    with newest_rig.job(mib=8) as job:
        images = newest_rig.images()
        dumped = newest_rig.dump(job, images)
        assert dumped.status == 0, dumped.errors
        job.wait()
        image = ImageReader.open(images / image_name(job.pid))
        assert sum(region.length for region in image.info.regions) == 8 << 20
        task = json.loads((images / "gpustasis-dump.json").read_text())["tasks"][0]
        assert task["staged_bytes"] == 8 << 20
        assert newest_rig.restore(images).status == 0
        job.run_on()
