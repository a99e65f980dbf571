# SPDX-License-Identifier: Apache-2.0
"""Dumps beside each other and after each other, and jobs that are checkpointed already."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from campaigns import repetition
from campaigns.rig import Rig, await_line, log_path
from campaigns.steady_job import SteadyJob
from campaigns.victims import signal_all
from gpustasis._core import find_checkpoint_record
from gpustasis.driver import Driver, ProcessState
from gpustasis.dump_records import alone_with
from gpustasis.errors import CheckpointError
from gpustasis.recovery import GUARDIAN_COMM, WORKER_COMM, Outcome, recover
from gpustasis.task import find_users
from support.cpu_memory import OURS
from support.driver_states import driver_of
from support.faults import await_hit
from support.job import Job
from support.signal_masks import MASK_OF_DUMP, blocked

DUMPS_AT_ONCE = 3
LEAK_DUMPS = 8
WAIT_S = 20.0
ASKED = {"found_locked": "dump"}


def kill_with_worker(criu: subprocess.Popen[bytes], images: Path) -> None:
    """A dump that is left as it is: the worker is stopped first, since criu would start another
    one, and the worker would undo it."""
    workers = find_users(images, WORKER_COMM, GUARDIAN_COMM)
    signal_all(workers, signal.SIGSTOP)
    criu.kill()
    criu.wait(60)
    for pid in workers:
        os.kill(pid, signal.SIGKILL)


def test_dumps_of_different_jobs_at_once(rig: Rig) -> None:
    with ExitStack() as stack:
        jobs = [stack.enter_context(rig.job(mib=8, seed=number)) for number in range(DUMPS_AT_ONCE)]
        places = [rig.images() for _ in jobs]
        running = [
            rig.start(rig.dump_words(job, images)) for job, images in zip(jobs, places, strict=True)
        ]
        assert [criu.wait(60) for criu in running] == [0] * DUMPS_AT_ONCE
        assert [job.wait() for job in jobs] == [-signal.SIGKILL] * DUMPS_AT_ONCE
        running = [rig.start(rig.restore_words(images)) for images in places]
        assert [criu.wait(60) for criu in running] == [0] * DUMPS_AT_ONCE
        for job in jobs:
            job.run_on()


@pytest.mark.parametrize("killed", [False, True])
def test_a_second_dump_of_one_job_is_refused_while_the_first_is_at_work(
    newest_rig: Rig, *, killed: bool
) -> None:
    """The driver says "running" to both: the first is still waiting for its lock."""
    with newest_rig.job(mib=4) as job:
        newest_rig.emulator.add_fault("lock", "delay", delay_ms=8000)
        first = newest_rig.images()
        words = newest_rig.dump_words(job, first, ["--leave-running"])
        criu = newest_rig.start(words, {"lock_timeout_ms": 60000})
        await_line(criu, log_path(first, "dump"), "backend: ")
        await_hit(newest_rig.emulator)
        second = newest_rig.images()
        dumped = newest_rig.dump(job, second, config=ASKED)
        assert dumped.status != 0
        assert f"criu {criu.pid} dumps it into {first}" in dumped.log
        assert "locked pid" not in dumped.log
        assert list(second.glob("gpustasis-*.img")) == []
        if killed:
            criu.kill()
        assert criu.wait(60) == (-signal.SIGKILL if killed else 0)
        newest_rig.settle(first)
        job.run_on()
        dumped = newest_rig.dump(job, second, "--leave-running")
        assert dumped.status == 0, dumped.errors
        job.run_on()


def test_a_job_that_is_being_dumped_is_not_recovered(
    newest_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of its processes is locked, as a killed criu leaves it, and nothing is frozen: criu
    waits for the lock of the second."""
    monkeypatch.setenv("GPUSTASIS_EMULATOR", newest_rig.environ["GPUSTASIS_EMULATOR"])
    driver = driver_of(newest_rig.environ)
    with newest_rig.job(mib=4, children=1) as job:
        newest_rig.emulator.add_fault("lock", "delay", delay_ms=10000, pid=job.pids[1])
        images = newest_rig.images()
        words = newest_rig.dump_words(job, images, ["--leave-running"])
        criu = newest_rig.start(words, {"lock_timeout_ms": 60000})
        deadline = time.monotonic() + WAIT_S
        while driver.get_state(job.pid) is not ProcessState.LOCKED:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        with pytest.raises(CheckpointError, match=f"criu {criu.pid} dumps it into {images}"):
            recover(job.pid, None, driver)
        assert driver.get_state(job.pid) is ProcessState.LOCKED
        assert criu.wait(60) == 0
        job.run_on()
        assert recover(job.pid, None, driver).outcome is Outcome.RUNS


@pytest.mark.parametrize("found", [ProcessState.RUNNING, ProcessState.LOCKED])
def test_a_task_that_a_killed_dump_has_not_begun_to_checkpoint_is_recovered(
    newest_rig: Rig, found: ProcessState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its restore thread works for criu while others are brought back. What was locked before stays
    so, as a rank of a job, which its keeper unlocks; no manifest says how it was."""
    monkeypatch.setenv("GPUSTASIS_EMULATOR", newest_rig.environ["GPUSTASIS_EMULATOR"])
    driver = driver_of(newest_rig.environ)
    driver.init()
    with newest_rig.job(mib=4, children=2) as job:
        last = job.pids[2]
        before = blocked(last)
        if found is ProcessState.LOCKED:
            for pid in job.pids:
                driver.lock(pid, 5000)
        newest_rig.emulator.add_fault("checkpoint", "delay", delay_ms=3000, pid=job.pids[0])
        newest_rig.emulator.add_fault("checkpoint", "error", code=304, pid=job.pids[1])
        newest_rig.emulator.add_fault("restore", "delay", delay_ms=6000)
        images = newest_rig.images()
        words = newest_rig.dump_words(job, images, ["--leave-running"])
        criu = newest_rig.start(words, ASKED | {"parallel_gpus": 2})
        await_hit(newest_rig.emulator)
        deadline = time.monotonic() + WAIT_S
        while blocked(last) != MASK_OF_DUMP:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        kill_with_worker(criu, images)
        assert blocked(last) == MASK_OF_DUMP
        outcome = recover(last, None, driver).outcome
        locked = found is ProcessState.LOCKED
        assert outcome is (Outcome.LEFT_LOCKED if locked else Outcome.UNLOCKED)
        assert driver.get_state(last) is found
        assert blocked(last) == before
        assert find_checkpoint_record(last) is None
        for pid in job.pids[:2]:
            recover(pid, images, driver)
            assert driver.get_state(pid) is found
        if locked:
            for pid in job.pids:
                driver.unlock(pid)
        job.run_on()


def test_what_an_earlier_dump_found_locked_is_unlocked_if_a_later_one_has_locked_it(
    newest_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUSTASIS_EMULATOR", newest_rig.environ["GPUSTASIS_EMULATOR"])
    driver = driver_of(newest_rig.environ)
    driver.init()
    with newest_rig.job(mib=4) as job:
        for step in ("checkpoint", "lock"):  # the first dump finds it locked, the second running
            if step == "checkpoint":
                driver.lock(job.pid, 5000)
            newest_rig.emulator.add_fault(step, "delay", delay_ms=6000)
            images = newest_rig.images()
            words = newest_rig.dump_words(job, images, ["--leave-running"])
            criu = newest_rig.start(words, ASKED | {"lock_timeout_ms": 60000})
            await_hit(newest_rig.emulator)
            kill_with_worker(criu, images)
            record = find_checkpoint_record(job.pid)
            assert record is not None
            assert record.was_locked is (step == "checkpoint")
            if step == "checkpoint":  # by a program that knows of no record
                deadline = time.monotonic() + WAIT_S
                while driver.get_state(job.pid) is not ProcessState.CHECKPOINTED:
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                driver.restore(job.pid)
                driver.unlock(job.pid)
        time.sleep(12)  # the lock is over by then
        if driver.get_state(job.pid) is ProcessState.RUNNING:
            driver.lock(job.pid, 5000)  # the job was busy, and nobody waited for that one any more
        assert recover(job.pid, None, driver).outcome is Outcome.UNLOCKED
        job.run_on()


def test_a_job_that_is_being_recovered_is_not_dumped(newest_rig: Rig) -> None:
    with newest_rig.job(mib=4) as job:
        with alone_with(job.pid):
            dumped = newest_rig.dump(job, newest_rig.images(), "--leave-running")
        assert dumped.status != 0
        assert f"gpustasis recover, process {os.getpid()}; try again when" in dumped.log
        dumped = newest_rig.dump(job, newest_rig.images(), "--leave-running")
        assert dumped.status == 0, dumped.errors
        job.run_on()


def test_the_children_of_criu_leave_the_lock_alone(newest_rig: Rig) -> None:
    """For each namespace of the job criu has a child, which ends before the dump does."""
    rig = newest_rig
    program = rig.scratch / "steady_job"
    program.write_text(f'#!/bin/sh\nexec unshare --uts --ipc {rig.programs.job} "$@"\n')
    program.chmod(0o755)
    script, seen = rig.scratch / "script", rig.scratch / "seen"
    script.write_text(
        '#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" = post-dump ] || exit 0\n'
        f"cat /run/gpustasis/dumping/* >{seen} 2>/dev/null\n"
        "exit 0\n"  # a file of another dump of this host may be gone when it is opened
    )
    script.chmod(0o755)
    with rig.job(mib=4) as beside, ExitStack() as stack:
        job = SteadyJob(program, rig.scratch / "namespaces.log", rig.environ, mib=4)
        stack.callback(job.end)
        for one in (beside, job):
            images = rig.images()
            dumped = rig.dump(one, images, "--leave-running", "--action-script", str(script))
            assert dumped.status == 0, dumped.errors
            assert ("Dump UTS namespace" in dumped.log) == (one is job)
            assert f"dumps it into {images}" in seen.read_text()
            one.run_on()


@pytest.mark.parametrize("found", [ProcessState.LOCKED, ProcessState.CHECKPOINTED])
def test_a_job_found_locked_or_checkpointed_is_refused(
    newest_rig: Rig, found: ProcessState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program is at work on it, or was killed at it: only who knows better asks for it."""
    monkeypatch.setenv("GPUSTASIS_EMULATOR", newest_rig.environ["GPUSTASIS_EMULATOR"])
    driver = driver_of(newest_rig.environ)
    with newest_rig.job(mib=4, children=1) as job:
        driver.lock(job.pids[1], 10_000)
        if found is ProcessState.CHECKPOINTED:
            driver.checkpoint(job.pids[1])
        dumped = newest_rig.dump(job, newest_rig.images())
        assert dumped.status != 0
        assert f"the driver says that the process is {found.name.lower()}" in dumped.log
        assert 'found_locked = "dump"' in dumped.log
        assert driver.get_state(job.pid) is ProcessState.RUNNING
        assert driver.get_state(job.pids[1]) is found


@pytest.mark.parametrize("found", [ProcessState.LOCKED, ProcessState.CHECKPOINTED])
def test_a_job_found_locked_or_checkpointed_is_left_so(
    rig: Rig, found: ProcessState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUSTASIS_EMULATOR", rig.environ["GPUSTASIS_EMULATOR"])
    driver = driver_of(rig.environ)
    with rig.job(mib=4) as job:
        driver.lock(job.pid, 10_000)
        if found is ProcessState.CHECKPOINTED:
            driver.checkpoint(job.pid)
        images = rig.images()
        dumped = rig.dump(job, images, "--leave-running", config=ASKED)
        assert dumped.status == 0, dumped.errors
        rig.settle(images)
        assert driver.get_state(job.pid) is found

        # A restored process runs, whatever it was found in.
        second = rig.images()
        dumped = rig.dump(job, second, config=ASKED)
        assert dumped.status == 0, dumped.errors
        job.wait()
        rig.settle(second)
        restored = rig.restore(second)
        assert restored.status == 0, restored.errors
        job.run_on()
        assert driver.get_state(job.pid) is ProcessState.RUNNING


def test_a_job_that_is_restored_by_another_during_the_dump_is_refused(
    newest_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found checkpointed, it has GPU memory again when it is frozen, which no image would have."""
    monkeypatch.setenv("GPUSTASIS_EMULATOR", newest_rig.environ["GPUSTASIS_EMULATOR"])
    driver = driver_of(newest_rig.environ)
    with newest_rig.job(mib=4, children=1) as job:
        driver.init()
        driver.lock(job.pid, 10_000)
        driver.checkpoint(job.pid)
        newest_rig.emulator.add_fault("lock", "delay", delay_ms=10_000)
        images = newest_rig.images()
        words = newest_rig.dump_words(job, images)
        criu = newest_rig.start(words, ASKED | {"lock_timeout_ms": 60_000})
        log = log_path(images, "dump")
        await_line(criu, log, "will be left so")
        driver.restore(job.pid)
        driver.unlock(job.pid)
        assert criu.wait(60) != 0
        assert "another program has restored the process meanwhile" in log.read_text()
        newest_rig.settle(images)
        job.run_on()


def test_a_locked_job_whose_dump_fails_is_left_locked(
    newest_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUSTASIS_EMULATOR", newest_rig.environ["GPUSTASIS_EMULATOR"])
    driver = driver_of(newest_rig.environ)
    with newest_rig.job(mib=4) as job:
        driver.lock(job.pid, 10_000)
        newest_rig.emulator.add_fault("checkpoint", "fail_after", code=999)
        images = newest_rig.images()
        assert newest_rig.dump(job, images, config=ASKED).status != 0
        newest_rig.settle(images)
        assert driver.get_state(job.pid) is ProcessState.LOCKED
        driver.unlock(job.pid)
        job.run_on()


def test_a_job_that_a_killed_restore_left_locked_is_unlocked(
    newest_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a restore whose criu and worker were killed before the last call of the driver."""
    monkeypatch.setenv("GPUSTASIS_EMULATOR", newest_rig.environ["GPUSTASIS_EMULATOR"])
    library = Path(newest_rig.environ["LD_LIBRARY_PATH"].split(":")[0]) / "libcuda.so.1"
    driver = Driver(str(library))
    with newest_rig.job(mib=4) as job:
        images = newest_rig.images()
        assert newest_rig.dump(job, images).status == 0
        job.wait()
        newest_rig.settle(images)
        assert newest_rig.restore(images).status == 0
        driver.lock(job.pid, 10_000)
        assert recover(job.pid, images, driver).outcome is Outcome.UNLOCKED_AFTER_RESTORE
        job.run_on()


def test_a_stopped_job_is_refused_with_the_reason(newest_rig: Rig) -> None:
    """The driver cannot reach it; waiting for that would be in vain."""
    with newest_rig.job(mib=4, children=1) as job:
        signal_all([job.pids[1]], signal.SIGSTOP)
        dumped = newest_rig.dump(job, newest_rig.images())
        assert dumped.status != 0
        assert "the process is stopped" in dumped.log
        assert dumped.seconds < 10
        os.kill(job.pids[1], signal.SIGCONT)
        job.run_on()
        dumped = newest_rig.dump(job, newest_rig.images(), "--leave-running")
        assert dumped.status == 0, dumped.errors
        job.run_on()


def test_nothing_piles_up_in_the_job(newest_rig: Rig) -> None:
    repetition.run(newest_rig, LEAK_DUMPS).require_clean()


@pytest.mark.parametrize("cuda", [True, False], ids=["GPU memory", "CPU memory"])
def test_two_tasks_with_one_pid_of_their_own_are_refused(newest_rig: Rig, *, cuda: bool) -> None:
    """Their images would have one name: the second in the place of the first, which is dropped."""
    script = newest_rig.scratch / "tree.sh"
    logs = [newest_rig.scratch / f"steps-{number}" for number in range(2)]
    starts = [
        f"unshare --pid --fork --kill-child {newest_rig.programs.job} --seed {number} "
        f"--cuda {int(cuda)} >{log} 2>&1 &"
        for number, log in enumerate(logs)
    ]
    script.write_text("\n".join([*starts, "wait"]))
    job = Job(["/bin/sh", script], newest_rig.scratch / "tree.log", newest_rig.environ)
    try:
        wait_for_steps(logs)
        images = newest_rig.images()
        words = newest_rig.dump_words(job, images, ["--leave-running"])
        dumped = newest_rig.run(words, images, "dump", None if cuda else OURS)
        assert dumped.status != 0
        said = r"processes \d+ and \d+ use CUDA and both have pid 1 in"
        said = said if cuda else "two processes have pid 1 in their pid namespaces, and an image of"
        assert re.search(said, dumped.log), dumped.errors
        assert list(images.glob("gpustasis-*.img")) == []
        newest_rig.settle(images)
        wait_for_steps(logs)
    finally:
        job.end()


def wait_for_steps(logs: list[Path]) -> None:
    """Until each log says three more times that memory is right, and nothing else."""
    counts = [log.read_text().count(" ok\n") if log.exists() else 0 for log in logs]
    deadline = time.monotonic() + WAIT_S
    for log, before in zip(logs, counts, strict=True):
        while not log.exists() or log.read_text().count(" ok\n") < before + 3:
            assert time.monotonic() < deadline, log.read_text()[-500:] if log.exists() else log
            time.sleep(0.01)
        assert "MISMATCH" not in log.read_text()
