# SPDX-License-Identifier: Apache-2.0
"""All CUDA tasks of a tree are locked, checkpointed and restored side by side."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from campaigns import damage
from campaigns.rig import Rig, log_path
from campaigns.steady_job import SteadyJob
from gpustasis.emulator import Options

MIB = 1 << 20
TASKS = 4
MS_PER_GIB = 16_000  # 0.5 s for what each task has
SIZE_MIB = 32
EACH_MS = SIZE_MIB * MS_PER_GIB / 1024


@contextmanager
def slow_job(rig: Rig, gpus: int = TASKS, **words: str) -> Iterator[SteadyJob]:
    """Four tasks, on a machine of so many GPUs that copies slowly."""
    rig.emulator.stop()
    rig.emulator.start(Options(gpus=gpus, memory_bytes=512 * MIB, driver="580.95.05"))
    for key in ("d2h_ms_per_gib", "h2d_ms_per_gib"):
        rig.emulator.set(key, str(MS_PER_GIB))
    rig.emulator.set("lock_drain_ms", str(int(EACH_MS)))
    place = rig.scratch / f"slow-{len(list(rig.scratch.iterdir()))}"
    job = SteadyJob(
        rig.programs.job, place, {**rig.environ, **words}, mib=SIZE_MIB, children=TASKS - 1
    )
    try:
        yield job
    finally:
        job.end()


def statistics(images: Path, stage: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((images / f"gpustasis-{stage}.json").read_text())
    assert len(found["tasks"]) == TASKS
    return found


def waited(found: dict[str, Any], phase: str) -> float:
    """For the driver, by all tasks together."""
    return sum(task["phases_ms"][phase] for task in found["tasks"])


def test_all_tasks_are_locked_before_any_is_frozen(own_rig: Rig) -> None:
    with slow_job(own_rig) as job:
        images = own_rig.images()
        dumped = own_rig.dump(job, images, "--leave-running")
        assert dumped.status == 0, dumped.errors
        assert dumped.log.count("cuda_plugin: locked pid") == TASKS
        assert dumped.log.rindex("cuda_plugin: locked pid") < dumped.log.index("Seized task")
        found = waited(statistics(images, "dump"), "lock")
        assert found < 0.75 * TASKS * EACH_MS
        job.run_on()


@pytest.mark.parametrize("at_once", [0, 1, 2])
def test_the_driver_works_in_as_many_tasks_at_once_as_is_said(own_rig: Rig, at_once: int) -> None:
    """0: as many as there are GPUs. On the way back of a job that is left running, too, and in a
    restore."""
    used = at_once or TASKS
    least = {1: 0.8, 2: 0.6}.get(used, 0.0)  # criu does something else meanwhile
    config = {"parallel_gpus": at_once}
    with slow_job(own_rig) as job:
        for extra in (["--leave-running"], []):
            images = own_rig.images()
            dumped = own_rig.dump(job, images, *extra, config=config)
            assert dumped.status == 0, dumped.errors
            found = statistics(images, "dump")
            assert (found["parallel_gpus"], found["in_turn_because"]) == (used, "")
            phases = ("driver_checkpoint", "undo") if extra else ("driver_checkpoint",)
            for phase in phases:
                assert waited(found, phase) >= least * EACH_MS * TASKS / used
                if used > 1:
                    assert waited(found, phase) < EACH_MS * (TASKS / used + 1.5), phase
            if extra:
                job.run_on()
        job.wait()
        own_rig.settle(images)
        restored = own_rig.restore(images, config=config)
        assert restored.status == 0, restored.errors
        found = statistics(images, "restore")
        assert found["parallel_gpus"] == used
        assert waited(found, "driver_restore") >= least * EACH_MS * TASKS / used
        if used > 1:
            assert waited(found, "driver_restore") < EACH_MS * (TASKS / used + 1.5)
        # All are restored before any may work on its GPU.
        log = restored.log
        assert log.rindex("cuda_plugin: restored pid") < log.index("cuda_plugin: unlocked pid")
        job.run_on()


@pytest.mark.parametrize("operation", ["lock", "checkpoint"])
def test_one_task_that_fails_brings_all_back(own_rig: Rig, operation: str) -> None:
    with slow_job(own_rig) as job:
        own_rig.emulator.add_fault(operation, "error", code=999, pid=job.pids[2])
        images = own_rig.images()
        dumped = own_rig.dump(job, images)
        assert dumped.status != 0
        assert f"for pid {job.pids[2]}" in dumped.log
        assert dumped.log.count("cuda_plugin: brought back pid") == TASKS
        job.run_on()
        own_rig.settle(images)
        again = own_rig.dump(job, own_rig.images(), "--leave-running")
        assert again.status == 0, again.errors
        job.run_on()


def test_one_task_that_cannot_be_restored_ends_them_all(own_rig: Rig) -> None:
    with slow_job(own_rig) as job:
        images = own_rig.images()
        assert own_rig.dump(job, images).status == 0
        job.wait()
        own_rig.settle(images)
        own_rig.emulator.add_fault("restore", "error", code=999, pid=job.pids[1])
        assert damage.expect_refusal(own_rig, job, images) == "killed what was made"
        log = log_path(images, "restore").read_text()
        assert f"pid {job.pids[1]}: cuCheckpointProcessRestore" in log
        assert "cuda_plugin: unlocked pid" not in log
        restored = own_rig.restore(images)
        assert restored.status == 0, restored.errors
        job.run_on()


def test_tasks_of_a_job_of_cuda_ipc_take_turns(own_rig: Rig) -> None:
    """Its file is the driver's to write, for one task after the other."""
    name = "CUDA_CHECKPOINT_JOB_FILE"
    with slow_job(own_rig, **{name: "/nonexistent"}) as job:
        images = own_rig.images()
        dumped = own_rig.dump(job, images)
        assert dumped.status == 0, dumped.errors
        found = statistics(images, "dump")
        assert found["parallel_gpus"] == 1
        assert name in found["in_turn_because"]
        for phase in ("lock", "driver_checkpoint"):
            assert waited(found, phase) >= 0.8 * EACH_MS * TASKS
        job.wait()
        own_rig.settle(images)
        restored = own_rig.restore(images)
        assert restored.status == 0, restored.errors
        found = statistics(images, "restore")
        assert (found["parallel_gpus"], name in found["in_turn_because"]) == (1, True)
        job.run_on()
