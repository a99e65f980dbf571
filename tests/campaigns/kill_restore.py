# SPDX-License-Identifier: Apache-2.0
"""CRIU is killed with SIGKILL at many points of a restore: never a job on wrong memory.

A tree whose restore breaks off is not complete. Either all of it runs and is exact (criu was killed
when it had let go), or it is dead, or none of it has made a step. What CRIU leaves standing
half-made before it has attached to all tasks is counted: stock CRIU does the same. From then on the
kernel kills them with criu, until all of their memory is there (docs/design.md, "The life of a
restore").

While direct GPU memory is put back criu only waits: that is direct_restore_kills.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random

from campaigns import damage
from campaigns.rig import Rig, end_strays
from campaigns.steady_job import SteadyJob
from campaigns.tally import Tally
from support.restore_kills import ALL_HELD

SETTLE_S = 0.3
BUSY_S = 20.0  # a job that is to run, or has been killed, has done so by then on a busy machine
_TRIES = 10  # no two restores make as many system calls: a late one may not come
GONE, EXACT = "nothing is left", "the job runs and is exact"
HALF_MADE = "left half-made by criu, does nothing"


def run(
    rig: Rig,
    random: Random,
    count: int,
    checkpoint: damage.Checkpoint | None = None,
    after: Callable[[], None] = lambda: None,
) -> Tally:
    """checkpoint: another one than this module's. after: called when what a restore has left has
    been ended; an AssertionError of it is a failure."""
    tally = Tally()
    checkpoint = checkpoint or damage.take(rig, mib=4, children=1)
    job = checkpoint.job
    output = job.log.read_bytes()
    _, calls = _restore(rig, checkpoint, 0)
    job.run_on()
    end(job, output)
    for index in range(count):
        for _ in range(_TRIES):
            number = 1 + int(random.uniform(index / count, (index + 1) / count) * calls)
            killed, made = _restore(rig, checkpoint, number)
            if killed:
                break
            calls = min(calls, made)  # the first one may have waited longer than others do
            job.run_on()
            end(job, output)
        assert killed, f"in {_TRIES} restores there was no system call {number} of {calls}"
        tally.counts["trials"] += 1
        try:
            rig.settle(checkpoint.images)
            held = ALL_HELD in log_of(checkpoint)
            tally.counts["criu had attached to all"] += held
            outcome = judge(job, output, BUSY_S if held else SETTLE_S)
            tally.counts[outcome] += 1
            assert outcome != HALF_MADE or not held, "left half-made by a criu that had all tasks"
            end(job, output)
            after()
        except AssertionError as failure:
            tally.failures.append(f"killed at system call {number} of {calls}: {failure}")
            end(job, output)
    end_strays()
    return tally


def _restore(rig: Rig, checkpoint: damage.Checkpoint, number: int) -> tuple[bool, int]:
    """Restore, killing criu at that system call, 0: at none. Whether it was; how many it made."""
    count = rig.scratch / "system-calls"
    images = checkpoint.images
    images.with_name(f"{images.name}.pid").unlink(missing_ok=True)
    prefix = [str(rig.programs.killer), str(count), str(number), "-", ""]
    ended = rig.run([*prefix, *rig.restore_words(images)], images, "restore")
    assert ended.status == 0 or (number and ended.status == 137), ended.errors
    return ended.status == 137, int(count.read_text())


def log_of(checkpoint: damage.Checkpoint) -> str:
    images = checkpoint.images
    log = images.with_name(f"{images.name}.restore.log")
    return log.read_text(errors="replace") if log.exists() else ""


def judge(job: SteadyJob, output: bytes, patience_s: float) -> str:
    """patience_s: for it to run, or to be dead."""
    deadline = time.monotonic() + patience_s
    while True:
        job.reap()
        if not job.alive_pids():
            job.steps()  # some may have been made before it was killed: each was right
            return GONE
        if job.log.read_bytes() != output:
            return _judge_running(job)
        if time.monotonic() > deadline:
            return HALF_MADE
        time.sleep(0.01)


def _judge_running(job: SteadyJob) -> str:
    """One that has made steps."""
    deadline = time.monotonic() + BUSY_S
    time.sleep(SETTLE_S)  # what was killed is gone then
    while job.alive_pids():
        try:
            job.run_on()
        except AssertionError:  # if some have died, the others are perhaps about to
            if len(job.alive_pids()) == len(job.pids) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return EXACT
    job.reap()
    job.steps()  # some may have been made before it was killed: each was right
    return GONE


def end(job: SteadyJob, output: bytes) -> None:
    job.end()
    job.reap()
    job.log.write_bytes(output)  # CRIU restores a file only at the size that it had
