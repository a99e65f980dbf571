# SPDX-License-Identifier: Apache-2.0
"""criu, the plugin's worker and both are killed with SIGKILL during a restore of direct GPU memory,
at any moment of it, and while the worker puts that memory back.

Meanwhile criu only waits, so that few of the kills at its system calls (kill_restore.py) fall
there. So the driver is asked from outside whether it is RESTORING a process. Nothing of a job that
lacks memory may run: a criu that lives on kills what it has made, unless the worker had no more to
do, and with a criu that dies the kernel does. The checkpoint is as before: it is restored."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from campaigns import damage
from campaigns.direct_dump import Watch
from campaigns.hits import Hits
from campaigns.kill_restore import BUSY_S, EXACT, GONE, HALF_MADE, SETTLE_S, end, judge, log_of
from campaigns.rig import CRIU_TIMEOUT_S, Rig, criu_errors, end_strays, log_path, workers
from campaigns.tally import Tally
from campaigns.victims import WATCH_S, Victims, signal_all, stop, strike
from support.restore_kills import ALL_HELD, PLUGIN_ASKED

VICTIMS = (Victims.CRIU, Victims.WORKER, Victims.BOTH)
PUT_BACK = "killed while memory was put back"
_LIMIT = 12  # restores for each hit that is asked for
_TRIES = 10  # restores for each kill at any moment
_MEASURED = 20  # restores at most


@dataclass(slots=True)
class _Killed:
    """victim: who was to die. done: in time. put_back: the driver was RESTORING a process, while
    criu and the worker stood still. status: criu's."""

    victim: Victims
    done: bool = False
    put_back: bool = False
    status: int = 0


def run(rig: Rig, random: Random, count: int, each: int, checkpoint: damage.Checkpoint) -> Tally:
    """`count` kills at any moment, and then as many while memory is put back as make `each` of
    those. Restores in which nobody was killed are no trials, and must succeed."""
    tally, hits = Tally(), Hits((PUT_BACK,), VICTIMS, each)
    output = checkpoint.job.log.read_bytes()
    whole_s, back_s = _measure(rig, checkpoint, output)
    for victim, waits in _turns(tally, hits, count):
        seconds = random.uniform(0, back_s if waits else whole_s)
        killed = _Killed(victim)
        try:
            _kill(rig, checkpoint, killed, seconds, waits)
            if killed.put_back:
                hits.add(PUT_BACK, victim)
            tally.counts["trials" if killed.done else "too late"] += 1
            tally.counts[PUT_BACK] += killed.put_back
            found = _judge(rig, checkpoint, output, killed)
            tally.counts[found] += killed.done
        except AssertionError as failure:
            what = PUT_BACK if killed.put_back else f"killed {seconds * 1000:.0f} ms after "
            what += "" if killed.put_back else "memory was" if waits else "the worker's start"
            tally.failures.append(f"{victim} {what}: {failure}")
        end(checkpoint.job, output)
    end_strays()
    if not tally.counts[PUT_BACK]:
        tally.failures.append("nobody was killed while memory was put back")
    hits.note(tally)
    try:
        _measure(rig, checkpoint, output)
    except AssertionError as failure:
        tally.failures.append(f"the checkpoint, after all of that: {failure}")
    return tally


def _turns(tally: Tally, hits: Hits[Victims], count: int) -> Iterator[tuple[Victims, bool]]:
    """Who is to be killed next, and whether when memory is put back."""
    for index in range(_TRIES * count):
        if tally.trials >= count:
            break
        yield VICTIMS[index % len(VICTIMS)], False
    if tally.trials < count and not tally.failures:
        tally.failures.append(f"{count} restores killed, cannot be had: {dict(tally.counts)}")
    for _ in hits.aims(tally, _LIMIT):
        yield hits.whose_turn(PUT_BACK, VICTIMS), True


def _start(rig: Rig, checkpoint: damage.Checkpoint) -> subprocess.Popen[bytes]:
    """A restore whose worker is there."""
    images = checkpoint.images
    for stage in ("pid", "restore"):
        log_path(images, stage).unlink(missing_ok=True)
    criu = rig.start(rig.restore_words(images))
    while not workers(images):
        assert criu.poll() is None, criu_errors(images, "restore")
        time.sleep(WATCH_S)
    return criu


def _watch(rig: Rig, checkpoint: damage.Checkpoint) -> Watch:
    return Watch(rig, checkpoint.images, checkpoint.job.pids)


def _is_asked(checkpoint: damage.Checkpoint) -> bool:
    """The plugin is at work: before, what criu makes of a process knows no driver."""
    return PLUGIN_ASKED in log_of(checkpoint)


def _measure(rig: Rig, checkpoint: damage.Checkpoint, output: bytes) -> tuple[float, float]:
    """How long criu runs on when its worker is there, and how long memory is put back meanwhile, in
    a restore that nobody disturbs, which must be exact."""
    for _ in range(_MEASURED):  # on a busy machine one may not be looked at in time
        whole_s, seen = _measure_one(rig, checkpoint, output)
        if seen:
            return whole_s, seen[-1] - seen[0]
    raise AssertionError("no restore is ever seen to put memory back")


def _measure_one(
    rig: Rig, checkpoint: damage.Checkpoint, output: bytes
) -> tuple[float, list[float]]:
    """And each time at which it was seen that memory is put back."""
    seen: list[float] = []
    criu = _start(rig, checkpoint)
    begin = time.monotonic()
    with _watch(rig, checkpoint) as watch:
        while criu.poll() is None:
            if _is_asked(checkpoint) and watch.is_restoring():
                seen.append(time.monotonic())
            time.sleep(WATCH_S)
    whole_s = time.monotonic() - begin
    assert criu.returncode == 0, criu_errors(checkpoint.images, "restore")
    rig.settle(checkpoint.images)
    checkpoint.job.run_on()
    end(checkpoint.job, output)
    return whole_s, seen


def _kill(
    rig: Rig, checkpoint: damage.Checkpoint, killed: _Killed, seconds: float, waits: bool
) -> None:
    """So many seconds after the worker's start, or if it waits for that, after the driver has first
    said that it is RESTORING."""
    criu = _start(rig, checkpoint)
    with _watch(rig, checkpoint) as watch:
        while waits and criu.poll() is None:
            if _is_asked(checkpoint) and watch.is_restoring():
                break
            time.sleep(WATCH_S)
        deadline = time.monotonic() + seconds
        while criu.poll() is None and time.monotonic() < deadline:
            time.sleep(WATCH_S)
        if not stop(criu):
            killed.status = criu.wait()
            return
        found = workers(checkpoint.images)
        signal_all(found, signal.SIGSTOP)
        if killed.victim is not Victims.CRIU and not found:
            criu.send_signal(signal.SIGCONT)
            killed.status = criu.wait(CRIU_TIMEOUT_S)
            return
        killed.put_back = _is_asked(checkpoint) and watch.is_restoring_now()
        killed.done = True
        strike(criu, found, killed.victim, 0.0, lambda: None)
        killed.status = criu.wait(CRIU_TIMEOUT_S)


def _judge(rig: Rig, checkpoint: damage.Checkpoint, output: bytes, killed: _Killed) -> str:
    """What became of the job. Raises AssertionError: it may not."""
    job = checkpoint.job
    rig.settle(checkpoint.images)
    if not killed.done:
        assert killed.status == 0, f"nobody was killed, and criu ended with {killed.status}"
    criu_died = killed.status == -signal.SIGKILL
    assert criu_died or killed.victim is Victims.WORKER or not killed.done, (
        f"criu was killed, and ended with {killed.status}"
    )
    held = not criu_died or ALL_HELD in log_of(checkpoint)
    outcome = judge(job, output, BUSY_S if held else SETTLE_S)
    assert outcome != HALF_MADE or not held, "left half-made by a criu that had all tasks"
    if criu_died:
        assert outcome == GONE or not killed.put_back, f"it lacks memory, and {outcome}"
    else:
        wanted = EXACT if killed.status == 0 else GONE
        assert outcome == wanted, f"criu ended with {killed.status}, and {outcome}"
    return outcome
