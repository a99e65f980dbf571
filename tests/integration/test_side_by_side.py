# SPDX-License-Identifier: Apache-2.0
"""All CUDA tasks of a tree are locked, checkpointed and restored side by side."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from campaigns import damage
from campaigns.rig import Rig, await_line, log_path
from campaigns.steady_job import SteadyJob
from gpustasis.criu.plugin import Scalar
from gpustasis.emulator import RATES_OFF, Options
from support.held_pipe import held_pipe
from support.job_ranks import wait_for

MIB = 1 << 20
TASKS = 4
PTRACE_SEIZE, PTRACE_CONT, PTRACE_DETACH = 0x4206, 7, 17
PTRACE_O_TRACEEXIT, WALL = 0x40, 0x40000000
DELAY_MS = 10_000  # of a call that others of a tree do not wait for: they are done by then
IN_TURN_MS = 3_000  # of one that they do wait for
STUCK_MS = 100_000  # of one that nobody waits for


@contextmanager
def four_tasks(rig: Rig, **words: str) -> Iterator[SteadyJob]:
    """On a machine of as many GPUs."""
    rig.emulator.stop()
    rig.emulator.start(
        Options(gpus=TASKS, memory_bytes=512 * MIB, driver="580.95.05", rates=RATES_OFF)
    )
    place = rig.scratch / f"four-{len(list(rig.scratch.iterdir()))}"
    job = SteadyJob(rig.programs.job, place, {**rig.environ, **words}, mib=8, children=TASKS - 1)
    try:
        yield job
    finally:
        job.end()


def statistics(images: Path, stage: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((images / f"gpustasis-{stage}.json").read_text())
    assert len(found["tasks"]) == TASKS
    return found


def delay(rig: Rig, operation: str, *pids: int, by_ms: int) -> None:
    for pid in pids:
        rig.emulator.add_fault(operation, "delay", delay_ms=by_ms, pid=pid)


def order(log: str, job: SteadyJob, what: str) -> list[int]:
    """Of the lines of each task that say so: which task of the job's."""
    found = [int(pid) for pid in re.findall(rf"cuda_plugin: {what} pid (\d+)", log)]
    assert sorted(found) == sorted(job.pids), what
    return [job.pids.index(pid) for pid in found]


def began_after_s(log: str, pid: int) -> float:
    """To bring that task back, after the first one."""
    found = re.findall(r"\((\d+\.\d+)\) cuda_plugin: bringing back pid (\d+)", log)
    return float(next(at for at, one in found if int(one) == pid)) - float(found[0][0])


def require_at_once(found: list[int], count: int) -> None:
    """So many calls were made at once, the first tasks' first: those took long, the others no
    time."""
    if count == 1:
        assert found == [0, 1, 2, 3]
    elif count == 2:
        assert found[0] in (0, 1), found
    else:
        assert set(found[:2]) == {2, 3}, found


def test_all_tasks_are_locked_before_any_is_frozen(own_rig: Rig) -> None:
    with four_tasks(own_rig) as job:
        images = own_rig.images()
        delay(own_rig, "lock", *job.pids[:2], by_ms=DELAY_MS)
        config = {"parallel_gpus": 1, "lock_timeout_ms": 60_000}
        dumped = own_rig.dump(job, images, "--leave-running", config=config)
        assert dumped.status == 0, dumped.errors
        require_at_once(order(dumped.log, job, "locked"), TASKS)
        assert dumped.log.rindex("cuda_plugin: locked pid") < dumped.log.index("Seized task")
        job.run_on()


@pytest.mark.one_criu
@pytest.mark.parametrize(("at_once", "staging"), [(0, "drop"), (1, "drop"), (2, "keep")])
def test_the_driver_works_in_as_many_tasks_at_once_as_is_said(
    own_rig: Rig, at_once: int, staging: str
) -> None:
    """0: as many as there are GPUs or processors. On the way back of a job that is left running,
    too, and in a restore."""
    used = at_once or max(TASKS, len(os.sched_getaffinity(0)))
    by_ms = IN_TURN_MS if at_once else DELAY_MS
    config: dict[str, Scalar] = {"parallel_gpus": at_once, "staging": staging}
    with four_tasks(own_rig) as job:
        for extra in (["--leave-running"], []):
            images = own_rig.images()
            delay(own_rig, "checkpoint", *job.pids[:2], by_ms=by_ms)
            if extra:
                delay(own_rig, "restore", *job.pids[:2], by_ms=by_ms)
            dumped = own_rig.dump(job, images, *extra, config=config)
            assert dumped.status == 0, dumped.errors
            found = statistics(images, "dump")
            assert (found["parallel_gpus"], found["in_turn_because"]) == (used, "")
            require_at_once(order(dumped.log, job, "checkpointed"), used)
            if extra:
                assert order(dumped.log, job, "brought back")
                # A task waits until one of those before it is done.
                last = began_after_s(dumped.log, job.pids[2]) * 1000
                assert last < by_ms if used >= TASKS else last >= by_ms * (2 // used)
                job.run_on()
        job.wait()
        own_rig.settle(images)
        delay(own_rig, "restore", *job.pids[:2], by_ms=by_ms)
        restored = own_rig.restore(images, config=config)
        assert restored.status == 0, restored.errors
        assert statistics(images, "restore")["parallel_gpus"] == used
        require_at_once(order(restored.log, job, "restored"), used)
        # All are restored before any may work on its GPU.
        log = restored.log
        assert log.rindex("cuda_plugin: restored pid") < log.index("cuda_plugin: unlocked pid")
        job.run_on()


@pytest.mark.parametrize("operation", ["lock", "checkpoint"])
def test_one_task_that_fails_brings_all_back(own_rig: Rig, operation: str) -> None:
    with four_tasks(own_rig) as job:
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


def test_one_task_whose_restore_thread_is_lost_is_named(own_rig: Rig) -> None:
    """It may hang for ever in its next CUDA call; the others run on."""
    with four_tasks(own_rig) as job:
        own_rig.emulator.add_fault("checkpoint", "end_thread", pid=job.pids[2])
        dumped = own_rig.dump(job, own_rig.images())
        assert dumped.status != 0
        assert f"pid {job.pids[2]} is left as it is" in dumped.log
        assert dumped.log.count("cuda_plugin: brought back pid") == TASKS - 1


def pipe_of(pid: int) -> int:
    """A writing end of one that the task has to itself: its driver's, after which a thread is
    named."""
    names = [each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/comm")]
    (name,) = (name for name in names if re.fullmatch(r"cuda[0-9a-f]{11}\n", name))
    return os.open(f"/proc/{pid}/fd/{int(name[4:], 16) & 0x3FFFFF}", os.O_WRONLY | os.O_NONBLOCK)


def test_a_task_that_is_about_to_end_is_no_other_program(own_rig: Rig) -> None:
    """Its threads are gone, and it closes what it has open, when criu comes to it: that may take
    as long as it likes."""
    libc = ctypes.CDLL(None, use_errno=True)
    with four_tasks(own_rig) as job:
        ending, images = job.pids[2], own_rig.images()
        pipe = pipe_of(ending)
        delay(own_rig, "lock", job.pid, by_ms=DELAY_MS)
        words = own_rig.dump_words(job, images, ["--leave-running"])
        criu = own_rig.start(words, {"lock_timeout_ms": 60_000})
        log = log_path(images, "dump")
        await_line(criu, log, f"locked pid {ending}")
        assert libc.ptrace(PTRACE_SEIZE, ending, 0, PTRACE_O_TRACEEXIT) == 0
        os.kill(ending, signal.SIGTERM)
        assert os.waitpid(ending, WALL)[0] == ending  # it gets the signal
        assert libc.ptrace(PTRACE_CONT, ending, 0, signal.SIGTERM) == 0
        assert os.waitpid(ending, WALL)[0] == ending  # it is about to end
        wait_for(lambda: os.listdir(f"/proc/{ending}/task") == [str(ending)], "its last thread")
        with held_pipe(pipe):
            assert libc.ptrace(PTRACE_DETACH, ending, 0, 0) == 0
            await_line(criu, log, f"pid {ending} has ended since it was locked")
            assert Path(f"/proc/{ending}").exists()
        os.close(pipe)
        assert criu.wait(60) == 0, log.read_text()[-3000:]
        assert f"pid {ending} has ended since it was locked" in log.read_text()
        assert json.loads((images / "gpustasis-dump.json").read_text())["result"] == "ok"


def test_one_task_that_cannot_be_restored_ends_them_all(own_rig: Rig) -> None:
    with four_tasks(own_rig) as job:
        images = own_rig.images()
        assert own_rig.dump(job, images).status == 0
        job.wait()
        own_rig.settle(images)
        own_rig.emulator.add_fault("restore", "error", code=999, delay_ms=3000, pid=job.pids[1])
        delay(own_rig, "restore", job.pids[2], by_ms=STUCK_MS)
        begin = time.monotonic()
        assert damage.expect_refusal(own_rig, job, images) == "killed what was made"
        assert time.monotonic() - begin < STUCK_MS / 2000
        own_rig.emulator.clear_faults()
        log = log_path(images, "restore").read_text()
        assert f"pid {job.pids[1]}: cuCheckpointProcessRestore" in log
        assert "cuda_plugin: unlocked pid" not in log
        restored = own_rig.restore(images)
        assert restored.status == 0, restored.errors
        job.run_on()


def test_tasks_of_a_job_of_cuda_ipc_take_turns(own_rig: Rig) -> None:
    """Its file is the driver's to write, for one task after the other."""
    name = "CUDA_CHECKPOINT_JOB_FILE"
    with four_tasks(own_rig, **{name: "/nonexistent"}) as job:
        images = own_rig.images()
        for operation in ("lock", "checkpoint"):
            delay(own_rig, operation, *job.pids[:2], by_ms=IN_TURN_MS)
        dumped = own_rig.dump(job, images)
        assert dumped.status == 0, dumped.errors
        found = statistics(images, "dump")
        assert found["parallel_gpus"] == 1
        assert name in found["in_turn_because"]
        for what in ("locked", "checkpointed"):
            require_at_once(order(dumped.log, job, what), 1)
        job.wait()
        own_rig.settle(images)
        delay(own_rig, "restore", *job.pids[:2], by_ms=IN_TURN_MS)
        restored = own_rig.restore(images)
        assert restored.status == 0, restored.errors
        found = statistics(images, "restore")
        assert (found["parallel_gpus"], name in found["in_turn_because"]) == (1, True)
        require_at_once(order(restored.log, job, "restored"), 1)
        job.run_on()
