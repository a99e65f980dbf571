# SPDX-License-Identifier: Apache-2.0
"""CRIU is killed with SIGKILL at many points of a restore: never a job on wrong memory.

A tree whose restore breaks off is not complete. Either all of it runs and is exact (criu was killed
when it had let go), or it is dead, or none of it has made a step. What CRIU leaves standing
half-made before it has attached to all tasks is counted: stock CRIU does the same. From then on the
kernel kills them with criu, until all of their memory is there (docs/design.md, "The life of a
restore").
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from random import Random

from campaigns import damage
from campaigns.rig import CRIU_TIMEOUT_S, Rig, criu_errors, end_strays, log_path, workers
from campaigns.steady_job import SteadyJob, is_alive
from campaigns.tally import Tally
from support.restore_kills import ALL_HELD

_SETTLE_S = 0.3
_WATCH_S = 0.001
_BUSY_S = 20.0  # a job that is to run, or has been killed, has done so by then on a busy machine
_TRIES = 10  # no two restores make as many system calls: a late one may not come
_HALF_MADE = "left half-made by criu, does nothing"


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
    _end(job, output)
    for index in range(count):
        for _ in range(_TRIES):
            number = 1 + int(random.uniform(index / count, (index + 1) / count) * calls)
            killed, made = _restore(rig, checkpoint, number)
            if killed:
                break
            calls = min(calls, made)  # the first one may have waited longer than others do
            job.run_on()
            _end(job, output)
        assert killed, f"in {_TRIES} restores there was no system call {number} of {calls}"
        tally.counts["trials"] += 1
        try:
            rig.settle(checkpoint.images)
            held = ALL_HELD in _log(checkpoint)
            tally.counts["criu had attached to all"] += held
            outcome = _judge(job, output, _BUSY_S if held else _SETTLE_S)
            tally.counts[outcome] += 1
            assert outcome != _HALF_MADE or not held, "left half-made by a criu that had all tasks"
            _end(job, output)
            after()
        except AssertionError as failure:
            tally.failures.append(f"killed at system call {number} of {calls}: {failure}")
            _end(job, output)
    end_strays()
    return tally


def run_with_worker(rig: Rig, random: Random, count: int, checkpoint: damage.Checkpoint) -> Tally:
    """The plugin's worker is killed at `count` moments of restores, alone and at the same instant
    as criu, in turn. A criu that lives on must kill what it has made, unless the worker had no more
    to do. Restores in which nobody was killed are no trials, and must succeed."""
    tally = Tally()
    job = checkpoint.job
    output = job.log.read_bytes()
    seconds = -1.0
    for _ in range(1 + _TRIES * count):
        if tally.trials + len(tally.failures) >= count:
            break
        first = seconds < 0
        alone, moment = tally.trials % 2 == 0, random.uniform(0, max(0.0, seconds))
        try:
            criu, found = _start(rig, checkpoint)
            begin = time.monotonic()
            if first:  # how long a worker lives
                assert criu.wait(CRIU_TIMEOUT_S) == 0, criu_errors(checkpoint.images, "restore")
                seconds = time.monotonic() - begin
                job.run_on()
                _end(job, output)
                continue
            time.sleep(moment)
            alive = [pid for pid in found if is_alive(pid)]
            for pid in alive:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not alone:
                criu.kill()
            status = criu.wait(CRIU_TIMEOUT_S)
            rig.settle(checkpoint.images)
            alone = alone or status != -signal.SIGKILL  # criu had ended by itself
            if not alive and alone:
                tally.counts["too late"] += 1
                assert status == 0, f"nobody was killed, and criu ended with {status}"
                job.run_on()
                _end(job, output)
                continue
            tally.counts["trials"] += 1
            tally.counts["the worker was alive"] += bool(alive)
            held = not alone and ALL_HELD not in _log(checkpoint)
            outcome = _judge(job, output, _SETTLE_S if held else _BUSY_S)
            tally.counts[outcome] += 1
            assert outcome != _HALF_MADE or held, "left half-made by a criu that had all tasks"
            if alone:
                wanted = "the job runs and is exact" if status == 0 else "nothing is left"
                assert outcome == wanted, f"criu ended with {status}, and {outcome}"
        except AssertionError as failure:
            who = "the worker" if alone else "criu and the worker"
            what = f"{who} killed {moment * 1000:.0f} ms after the worker's start"
            tally.failures.append(f"{what}: {failure}")
        _end(job, output)
    end_strays()
    if tally.trials < count and not tally.failures:
        tally.failures.append(f"{count} restores killed, cannot be had: {dict(tally.counts)}")
    if not tally.counts["the worker was alive"]:
        tally.failures.append("no worker was killed")
    return tally


def _start(rig: Rig, checkpoint: damage.Checkpoint) -> tuple[subprocess.Popen[bytes], list[int]]:
    """A restore, and its worker."""
    images = checkpoint.images
    for stage in ("pid", "restore"):
        log_path(images, stage).unlink(missing_ok=True)
    criu = rig.start(rig.restore_words(images))
    while not (found := workers(images)):
        assert criu.poll() is None, criu_errors(images, "restore")
        time.sleep(_WATCH_S)
    return criu, found


def _restore(rig: Rig, checkpoint: damage.Checkpoint, number: int) -> tuple[bool, int]:
    """Restore, killing criu at that system call, 0: at none. Whether it was; how many it made."""
    count = rig.scratch / "system-calls"
    images = checkpoint.images
    images.with_name(f"{images.name}.pid").unlink(missing_ok=True)
    prefix = [str(rig.programs.killer), str(count), str(number), "-", ""]
    ended = rig.run([*prefix, *rig.restore_words(images)], images, "restore")
    assert ended.status == 0 or (number and ended.status == 137), ended.errors
    return ended.status == 137, int(count.read_text())


def _log(checkpoint: damage.Checkpoint) -> str:
    images = checkpoint.images
    log = images.with_name(f"{images.name}.restore.log")
    return log.read_text(errors="replace") if log.exists() else ""


def _judge(job: SteadyJob, output: bytes, patience_s: float) -> str:
    """patience_s: for it to run, or to be dead."""
    deadline = time.monotonic() + patience_s
    while True:
        job.reap()
        if not job.alive_pids():
            job.steps()  # some may have been made before it was killed: each was right
            return "nothing is left"
        if job.log.read_bytes() != output:
            time.sleep(_SETTLE_S)  # what was killed is gone then
            if job.alive_pids():
                job.run_on()
                return "the job runs and is exact"
        elif time.monotonic() > deadline:
            return _HALF_MADE
        time.sleep(0.01)


def _end(job: SteadyJob, output: bytes) -> None:
    job.end()
    job.reap()
    job.log.write_bytes(output)  # CRIU restores a file only at the size that it had
