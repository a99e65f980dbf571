# SPDX-License-Identifier: Apache-2.0
"""The plugin's worker at a restore: how long it watches, and what it kills when criu is gone."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from campaigns import damage
from campaigns.rig import Rig, workers
from campaigns.steady_job import SteadyJob
from support.faults import await_hit

PATIENCE_S = 20.0

KINDS = ("externalized", "not externalized", "the stock plugin's")
TREES = {
    "with plain children": {"children": 1, "plain_children": 1},
    "below a plain root": {"cuda": 0, "children": 1, "plain_children": 1},
}


def take(rig: Rig, job: SteadyJob, kind: str) -> Path:
    """Dump the job, which ends."""
    images = rig.images()
    dumped = rig.dump(job, images, config={"externalize": kind == "externalized"})
    assert dumped.status == 0, dumped.errors
    assert job.wait() == -signal.SIGKILL
    rig.settle(images)
    if kind == KINDS[-1]:
        for path in images.glob("gpustasis-*"):
            path.unlink()
    return images


def await_log(images: Path, text: str) -> None:
    """Until the log of the restore holds `text`."""
    log = images.with_name(f"{images.name}.restore.log")
    deadline = time.monotonic() + PATIENCE_S
    while not (log.exists() and text in log.read_text(errors="replace")):
        assert time.monotonic() < deadline, f"the restore does not come to {text!r}"
        time.sleep(0.01)


def await_no_worker(images: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while left := workers(images):
        assert time.monotonic() < deadline, f"worker {left} watches on"
        time.sleep(0.01)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_job_outlives_the_criu_in_the_foreground(
    newest_rig: Rig, kind: str, tree: str
) -> None:
    with newest_rig.job(mib=4, **TREES[tree]) as job:
        images = take(newest_rig, job, kind)
        words = [word for word in newest_rig.restore_words(images) if word != "--restore-detached"]
        criu = newest_rig.start(words)
        try:
            await_log(images, "Restore finished successfully")
            job.run_on()
            await_no_worker(images)
            assert (images / "gpustasis-restore.json").exists()
            assert criu.poll() is None, "criu is not in the foreground"
        finally:
            criu.kill()
            criu.wait()
        job.run_on()


def test_criu_dies_while_the_driver_hangs(newest_rig: Rig) -> None:
    """Half of the tree is restored, and the driver never answers: all of it ends, at once."""
    checkpoint = damage.take(newest_rig, mib=4, children=1, plain_children=1)
    images = checkpoint.images
    newest_rig.emulator.add_fault("restore", "hang")
    criu = newest_rig.start(newest_rig.restore_words(images))
    await_log(images, "late stage hook")
    await_hit(newest_rig.emulator)
    criu.kill()
    criu.wait()
    deadline = time.monotonic() + PATIENCE_S
    while alive := checkpoint.job.alive_pids():
        assert time.monotonic() < deadline, f"{alive} live on"
        time.sleep(0.01)
    checkpoint.job.reap()
    newest_rig.settle(images)
    checkpoint.job.end()


def test_a_cuinit_that_takes_half_a_minute(newest_rig: Rig) -> None:
    checkpoint = damage.take(newest_rig, mib=4, children=1)
    newest_rig.emulator.set("init_ms", "22000")
    restored = newest_rig.restore(checkpoint.images)
    assert restored.status == 0, restored.errors
    checkpoint.job.run_on()
    checkpoint.job.end()
