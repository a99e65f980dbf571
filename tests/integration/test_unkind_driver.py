# SPDX-License-Identifier: Apache-2.0
"""A driver that leaves things as no document promises: the job's memory stays what it was."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from campaigns.driver_faults import REASON_OF_STATE, STATE_FAILED
from campaigns.rig import Rig, await_line, log_path
from campaigns.steady_job import SteadyJob, restore_thread
from gpustasis._core import ImageReader, RegionKind, image_name

STAGING = {"locked": "1", "shared": "2", "memfd": "3"}
REASON = "Error (gpustasis): cuda_plugin: "
IO_URING = re.compile(r"Error \(.*anon_inode:\[io_uring\]")  # the emulator's channel
# Why a dump fails that meets a process in the middle of cuInit.
HALF_THERE = re.compile(rf"{re.escape(REASON)}.*started to use CUDA while|{IO_URING.pattern}")
FOREVER_MS = "3600000"
SEED = 20261122
# Lines of a dump's log, in this order; "" is before the first. Behind FROZEN no task runs.
FROZEN = "checkpointed pid"
MOMENTS = ("", "configuration: ", "backend: ", "locked pid", FROZEN)
STARTED = "all has started"
HELD_MS = 3000


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
        images = round_trip(rig, job)
        statistics = json.loads((images / "gpustasis-dump.json").read_text())
        # A memfd is a file to CRIU, which dumps it with the job.
        assert [task["externalized"] for task in statistics["tasks"]] == [kind != "memfd"] * 2
        if kind != "memfd":
            shared = RegionKind.SHARED_ANONYMOUS
            wanted = shared if kind == "shared" else RegionKind.PRIVATE_ANONYMOUS
            for pid in job.pids:
                regions = ImageReader.open(images / image_name(pid)).info.regions
                assert {region.kind for region in regions} == {wanted}


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


@pytest.mark.parametrize("state", REASON_OF_STATE)
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
        reason = REASON_OF_STATE[state]
        if state == STATE_FAILED and call > 1:
            done = {2: "locked", 3: "checkpointed"}[call]
            reason = f"the driver says it {done} the process, and that it is not {done}"
        reasons = [line for line in dumped.log.splitlines() if REASON in line]
        assert any(reason in line for line in reasons), dumped.errors


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
    # Held: the signal comes before criu stores those of the process.
    for held, moment in [(False, STARTED), *itertools.product((False, True), MOMENTS)]:
        with newest_rig.job(mib=8, late_children=1, children=1) as job:
            late = job.pids[1]
            images = newest_rig.images()
            if moment == STARTED:
                os.kill(late, signal.SIGUSR1)
                await_cuda(late)
                job.run_on()
            if held:
                newest_rig.emulator.add_fault("checkpoint", "delay", delay_ms=HELD_MS, pid=job.pid)
            criu = newest_rig.start(newest_rig.dump_words(job, images))
            if moment != STARTED:
                await_line(criu, log_path(images, "dump"), moment)
                time.sleep(random.uniform(0, 0.01))
                os.kill(late, signal.SIGUSR1)
            status = criu.wait(60)
            newest_rig.emulator.clear_faults()
            log = log_path(images, "dump").read_text()
            newest_rig.settle(images)
            if status == 0:
                job.wait()
                restored = newest_rig.restore(images)
                assert restored.status == 0, restored.errors
            else:
                assert moment not in (STARTED, FROZEN), log[-2000:]
                said = [line for line in log.splitlines() if "Error" in line]
                assert HALF_THERE.search(log), said
            job.run_on()
            if status == 0 and not held and restore_thread(late) is None:
                os.kill(late, signal.SIGUSR1)  # the first was lost with the process that got it
                await_cuda(late)
            assert restore_thread(late) is not None, "CUDA did not start"
            newest_rig.settle(images)


def await_cuda(pid: int) -> None:
    deadline = time.monotonic() + 30
    while restore_thread(pid) is None:
        assert time.monotonic() < deadline, "CUDA did not start"
        time.sleep(0.01)


def await_silence(job: SteadyJob, pid: int) -> None:
    """Until it is in cuInit: it has gone to sleep a good many times and made no step. A process
    without CUDA sleeps once in a step; one that gets no processor does not go to sleep."""
    deadline = time.monotonic() + 30
    steps, asleep = -1, 0
    while True:
        if (now := job.steps()[pid]) != steps:
            steps, asleep = now, times_asleep(pid)
        elif times_asleep(pid) >= asleep + 20:
            return
        assert time.monotonic() < deadline
        time.sleep(0.01)


def times_asleep(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^voluntary_ctxt_switches:\s*(\d+)$", status, re.MULTILINE)
    assert found is not None
    return int(found[1])


def test_copies_and_host_functions_under_way(rig: Rig) -> None:
    """Lock waits for those of every stream; none is lost, and none is done twice."""
    with rig.job(mib=4, children=1, module=rig.programs.kernels, streams=4) as job:
        for _ in range(3):
            round_trip(rig, job)


def test_a_child_forked_after_cuinit_runs_on(rig: Rig) -> None:
    """It holds the driver's files and no thread of the driver's: nobody can checkpoint it. With
    the emulator it is the driver's channel that CRIU cannot dump; it has no device to open."""
    with rig.job(mib=8, forked_children=1) as job:
        before = job.threads()
        dumped = rig.dump(job, images := rig.images())
        assert dumped.status != 0, "criu says it dumped"
        assert IO_URING.search(dumped.log), dumped.errors
        assert f"brought back pid {job.pid}" in dumped.log, dumped.errors
        job.run_on()
        rig.settle(images)
        assert job.threads() == before


def test_what_threads_leave_behind_is_no_staging(newest_rig: Rig) -> None:
    """Such as a malloc arena and a stack of the driver's helper threads: CRIU's business."""
    with settings(newest_rig, leftovers="1"), newest_rig.job(mib=8) as job:
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
