# SPDX-License-Identifier: Apache-2.0
"""A driver that leaves things as no document promises: the job's memory stays what it was."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from campaigns.rig import Rig
from campaigns.steady_job import SteadyJob
from gpustasis.driver import ProcessState

STAGING = {"locked": "1", "shared": "2", "memfd": "3"}
FOREVER_MS = "3600000"
SEED = 20261122
TRIALS = 8


@contextmanager
def settings(rig: Rig, **values: str) -> Iterator[None]:
    """Settings of the emulator, as they were again afterwards."""
    before = rig.emulator.status()["settings"]
    for key, value in values.items():
        rig.emulator.set(key, value)
    try:
        yield
    finally:
        rig.emulator.clear_faults()
        for key in values:
            rig.emulator.set(key, str(before[key]))


def at_call(rig: Rig, operation: str, number: int, action: str, **options: int) -> None:
    """A fault of the `number`th such call from now on."""
    for _ in range(number - 1):
        rig.emulator.add_fault(operation, "delay", delay_ms=1)
    rig.emulator.add_fault(operation, action, **options)


def round_trip(rig: Rig, job: SteadyJob) -> Path:
    """A dump that leaves the job running, one that does not, and a restore; returns the images."""
    images = rig.images()
    dumped = rig.dump(job, images, "--leave-running")
    assert dumped.status == 0, dumped.errors
    job.run_on()
    images = rig.images()
    dumped = rig.dump(job, images)
    assert dumped.status == 0, dumped.errors
    assert job.wait() == -signal.SIGKILL
    rig.settle(images)
    restored = rig.restore(images)
    assert restored.status == 0, restored.errors
    job.run_on()
    return images


def require_refused(rig: Rig, job: SteadyJob, reason: str) -> None:
    """A dump is refused with that reason, the whole job runs on, and the next one succeeds."""
    images = rig.images()
    dumped = rig.dump(job, images)
    assert dumped.status != 0, "criu says it dumped"
    assert reason in dumped.log, dumped.errors
    job.run_on()
    rig.settle(images)
    rig.emulator.clear_faults()


@pytest.mark.parametrize("kind", STAGING)
def test_staging_of_every_kind(rig: Rig, kind: str) -> None:
    with settings(rig, staging=STAGING[kind]), rig.job(mib=16, pinned_kib=64, children=1) as job:
        round_trip(rig, job)


def test_staging_at_the_addresses_of_gpu_memory_with_gaps_between(rig: Rig) -> None:
    with settings(rig, gaps="1"), rig.job(mib=16, pinned_kib=64, children=1) as job:
        images = round_trip(rig, job)
        statistics = json.loads((images / "gpustasis-dump.json").read_text())
        assert all(task["externalized"] for task in statistics["tasks"])


def test_a_helper_thread_that_lingers_is_waited_for(rig: Rig) -> None:
    with settings(rig, lingering_ms="300"), rig.job(mib=8, children=1) as job:
        round_trip(rig, job)


def test_a_helper_thread_that_stays_is_a_reason_not_to_dump(newest_rig: Rig) -> None:
    with settings(newest_rig, lingering_ms=FOREVER_MS), newest_rig.job(mib=8, children=1) as job:
        require_refused(newest_rig, job, "a thread that the driver made for the checkpoint lingers")


@pytest.mark.parametrize("state", [3, 4, 5, 6, 255])
@pytest.mark.parametrize("call", [1, 2, 3], ids=["before", "locked", "checkpointed"])
def test_a_state_that_is_none_to_dump_in(newest_rig: Rig, state: int, call: int) -> None:
    """Another checkpoint is under way, the driver has given up, or is newer than we are."""
    with newest_rig.job(mib=4, plain_children=1) as job:
        at_call(newest_rig, "get_state", call, "state", code=state)
        dumped = newest_rig.dump(job, images := newest_rig.images())
        assert dumped.status != 0, "criu says it dumped"
        newest_rig.emulator.clear_faults()
        job.run_on()
        newest_rig.settle(images)
        assert str(state) in dumped.log or ProcessState(state).name in dumped.log, dumped.errors


@pytest.mark.parametrize("call", ["lock", "checkpoint"])
def test_a_call_that_says_it_was_done_and_was_not(newest_rig: Rig, call: str) -> None:
    with newest_rig.job(mib=4, children=1) as job:
        newest_rig.emulator.add_fault(call, "lie")
        require_refused(newest_rig, job, f"the driver says it {call}ed the process, and that it")


@pytest.mark.parametrize("call", ["restore", "unlock"])
def test_a_way_back_that_says_it_was_taken_and_was_not(newest_rig: Rig, call: str) -> None:
    """The job was stopped for the dump, and must not be left so."""
    with newest_rig.job(mib=4, children=1) as job:
        newest_rig.emulator.add_fault(call, "lie")
        dumped = newest_rig.dump(job, images := newest_rig.images(), "--leave-running")
        job.run_on()
        newest_rig.settle(images)
        assert dumped.status == 0, dumped.errors


@pytest.mark.parametrize("call", ["get_state", "lock", "checkpoint", "restore", "unlock"])
def test_a_driver_whose_answers_are_one_behind(newest_rig: Rig, call: str) -> None:
    """Each answer that comes is that to the call before. Either all goes well, or all runs on."""
    with settings(newest_rig, desync="1"), newest_rig.job(mib=8, children=1) as job:
        newest_rig.emulator.add_fault(call, "twice")
        dumped = newest_rig.dump(job, images := newest_rig.images(), "--leave-running")
        newest_rig.settle(images)
        job.run_on()
        if dumped.status == 0:
            newest_rig.emulator.set("desync", "0")
            job.end()
            restored = newest_rig.restore(images)
            assert restored.status == 0, restored.errors
            job.run_on()


def test_a_cuinit_that_is_under_way(rig: Rig) -> None:
    """One child is in cuInit, and has no thread of the driver's yet, when the tree is frozen."""
    with rig.job(mib=8, late_children=1, children=1) as job:
        _, late, other = job.pids
        rig.emulator.add_fault("init", "race", code=other, pid=late)
        os.kill(late, signal.SIGUSR1)
        await_silence(job, late)
        dumped = rig.dump(job, images := rig.images())
        assert dumped.status == 0, dumped.errors
        assert job.wait() == -signal.SIGKILL
        rig.settle(images)
        restored = rig.restore(images)
        assert restored.status == 0, restored.errors
        job.run_on()


def test_cuda_that_starts_at_any_moment_of_a_dump(newest_rig: Rig) -> None:
    """Before the plugin looks for it, behind its back, or when all is frozen."""
    random = Random(SEED)
    for _ in range(TRIALS):
        with newest_rig.job(mib=8, late_children=1, children=1) as job:
            late = job.pids[1]
            images = newest_rig.images()
            criu = newest_rig.start(newest_rig.dump_words(job, images))
            time.sleep(random.uniform(0, 0.15))
            os.kill(late, signal.SIGUSR1)
            if criu.wait(60) == 0:
                job.wait()
                newest_rig.settle(images)
                restored = newest_rig.restore(images)
                assert restored.status == 0, restored.errors
            job.run_on()
            newest_rig.settle(images)


def await_silence(job: SteadyJob, pid: int) -> None:
    """Until it makes no more steps: it is in cuInit."""
    deadline = time.monotonic() + 10
    while True:
        before = job.steps()[pid]
        time.sleep(0.2)
        if job.steps()[pid] == before:
            return
        assert time.monotonic() < deadline


def test_copies_and_host_functions_under_way(rig: Rig) -> None:
    """Lock waits for those of every stream; none is lost, and none is done twice."""
    with rig.job(mib=4, children=1, module=rig.programs.kernels, streams=4) as job:
        for _ in range(3):
            round_trip(rig, job)


def test_a_child_forked_after_cuinit_runs_on(rig: Rig) -> None:
    """It holds the driver's files and no thread of the driver's: nobody can checkpoint it."""
    with rig.job(mib=8, forked_children=1) as job:
        before = job.threads()
        dumped = rig.dump(job, images := rig.images())
        assert dumped.status != 0, "criu says it dumped"
        job.run_on()
        rig.settle(images)
        assert job.threads() == before
