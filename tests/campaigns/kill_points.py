"""CRIU is killed with SIGKILL at many points of a dump: the job must live, and be exact.

Half of the points are system calls of criu's main thread, the other half moments, for the phases in
which other threads work. Both are chosen so that every phase of a dump gets its share: the next
point is one in the phase that has had the fewest, as far as earlier points tell where that is.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from random import Random

from campaigns.rig import Jobs, Rig, workers
from campaigns.steady_job import SteadyJob, exit_status, process_state
from campaigns.tally import Tally

# Phases in their order, each with what criu's log holds once it has begun.
_PHASES = (
    ("start", ""),
    ("lock", "cuda_plugin: backend"),
    ("freeze", "Seized task"),
    ("checkpoint", "' hook 11 "),
    ("drop", ""),  # told by the image, see _phase
    ("collect", "Collecting netns"),
    ("dump tasks", "Dumping task (pid:"),
    ("finish", "Writing image inventory"),
)
_CRIUS_SIGNALS = {"SIGTRAP", "SIGSEGV"}  # what stock CRIU's victims die of in this campaign
_PLUGIN_PHASES = ("lock", "checkpoint", "drop")
_NAMES = tuple(name for name, _ in _PHASES)
_STOCK_NAMES = ("start", "freeze", "dump tasks", "finish")
_EXPLORED = 12  # places before the phases' own places are used
_JITTER = 0.02
_OVERTIME = 1.1  # the latest moment, in lengths of an undisturbed dump


class _Aim:
    """Chooses places (0: start of a dump, 1: its end) so that all phases are hit alike."""

    def __init__(self, random: Random, names: tuple[str, ...], end: float) -> None:
        self._random = random
        self._hits: dict[str, list[float]] = {name: [] for name in names}
        self._end = end
        self._asked = 0

    def next_place(self) -> float:
        """At first evenly spread; then in turn near a hit of the phase with the fewest, and
        between the phases around one that was never hit."""
        self._asked += 1
        if self._asked <= _EXPLORED:
            return (self._asked - self._random.random()) / _EXPLORED * self._end
        names = list(self._hits)
        missed = [index for index, name in enumerate(names) if not self._hits[name]]
        if missed and self._asked % 2 == 0:
            index = self._random.choice(missed)
            low = max((p for name in names[:index] for p in self._hits[name]), default=0.0)
            high = min((p for name in names[index:] for p in self._hits[name]), default=self._end)
            return self._random.uniform(*sorted((low, high)))
        fewest = min((hits for hits in self._hits.values() if hits), key=len)
        place = self._random.choice(fewest) + self._random.gauss(0, _JITTER)
        return min(max(place, 0.0), self._end)

    def hit(self, name: str, place: float) -> None:
        self._hits.setdefault(name, []).append(place)


def run(
    rig: Rig,
    random: Random,
    count: int,
    *,
    plugin: bool = True,
    with_worker: bool = False,
    whole_bound: bool = True,
) -> Tally:
    """Kill criu at `count` points of dumps of one job, which must survive all of them.

    plugin False: stock CRIU and a job without CUDA, for comparison; what that loses is counted, and
    is not a failure of ours. with_worker: the plugin's
    worker is killed at the same instant, and `gpustasis recover` has to do its work.
    whole_bound False: a loss in CRIU's own window (_not_crius_own) is counted and is no failure; what
    this leaves is what the plugin itself can break.
    """
    tally = Tally()
    names = _NAMES if plugin else _STOCK_NAMES
    by_call, by_time = _Aim(random, names, 1.0), _Aim(random, names, _OVERTIME)
    with Jobs(lambda: start_job(rig, plugin, random)) as jobs:
        calls, seconds = _measure(rig, jobs.get(), plugin)
        for index in range(count):
            job, images = jobs.get(), rig.images()
            aim = by_call if with_worker or index % 2 == 0 else by_time
            place = aim.next_place()
            if aim is by_call:
                number = 1 + int(place * calls)
                point = f"system call {number} of {calls}"
                _kill_at_call(rig, job, images, number, plugin, with_worker)
            else:
                point = f"{place * seconds * 1000:.0f} ms of {seconds * 1000:.0f}"
                _kill_at_time(rig, job, images, place * seconds, plugin)
            phase = _phase(images)
            aim.hit(phase, place)
            tally.counts["trials"] += 1
            tally.counts[f"in {phase}"] += 1
            try:
                if with_worker:
                    _recover(rig, job, images)
                job.run_on()
                rig.settle(images)
                job.threads()
                if (images / "gpustasis-undo.log").exists():
                    tally.counts["brought back by the worker"] += 1
            except AssertionError as lost:
                signals = _deadly_signals(job)
                tally.counts[f"LOST in {phase} to {' and '.join(signals) or 'a hang'}"] += 1
                why = _not_crius_own(job, phase, signals)
                if plugin and (why or whole_bound):
                    why = why or "CRIU's own code stood in the task"
                    tally.failures.append(f"killed at {point} ({phase}): {lost}; {why}")
                jobs.drop()
    return tally


def run_worker_kills(rig: Rig, random: Random, count: int) -> Tally:
    """The plugin's worker alone is killed, at `count` moments of dumps of one job."""
    tally = Tally()
    with Jobs(lambda: start_job(rig, True, random)) as jobs:
        _, seconds = _measure(rig, jobs.get(), True)
        for _ in range(count):
            job, images = jobs.get(), rig.images()
            threads = job.threads()
            moment = random.uniform(0, seconds)
            criu = rig.start(_words(rig, job, images, True))
            while criu.poll() is None and not (found := workers(images)):
                pass
            time.sleep(moment)
            for pid in found if criu.poll() is None else ():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            status = criu.wait(60)
            tally.counts["trials"] += 1
            tally.counts["dump done" if status == 0 else "dump failed"] += 1
            try:
                job.run_on()
                rig.settle(images)
                assert job.threads() == threads, "its threads have changed"
            except AssertionError as lost:
                what = f"worker killed {moment * 1000:.0f} ms after its start"
                tally.failures.append(f"{what}: {lost}")
                jobs.drop()
    return tally


def _deadly_signals(job: SteadyJob) -> list[str]:
    """What killed processes of the tree; children are killed with their parent, which is left
    out."""
    statuses = {exit_status(pid) for pid in job.pids if process_state(pid) == "Z"}
    names = {signal.Signals(-status).name if status < 0 else "exit" for status in statuses}
    return sorted(names - {"SIGKILL"} or names)


def _not_crius_own(job: SteadyJob, phase: str, signals: list[str]) -> str:
    """What tells that a loss is not owed to CRIU's own code in the task; empty: nothing does.

    CRIU runs code of its own in the tasks, which it puts in the place of the task's and leads by
    breakpoints: a task that stands there when criu is killed dies, with any plugin or none. Who
    dies so is the only one, and never in a phase in which the plugin is at work.
    """
    if phase in _PLUGIN_PHASES:
        return "the plugin was at work"
    if not signals or not set(signals) <= _CRIUS_SIGNALS:
        return f"that is not how criu's code in the task ends: {signals or 'a hang'}"
    job.pids = tuple(job.alive_pids())
    try:
        job.run_on()
    except AssertionError as hung:
        return f"the others do not run on: {hung}"
    return ""


def start_job(rig: Rig, plugin: bool, random: Random) -> SteadyJob:
    """Without the plugin, one with as many threads and processes, and no CUDA."""
    name = rig.scratch / f"job-{random.randrange(1 << 30):x}"
    if plugin:
        return SteadyJob(rig.program, name, rig.environ, mib=8, children=1, pinned_kib=64)
    shape = {"cuda": 0, "plain_children": 1, "plain_threads": 3}
    return SteadyJob(rig.program, name, rig.environ, mib=8, **shape)


def _words(rig: Rig, job: SteadyJob, images: Path, plugin: bool) -> list[str]:
    return rig.dump_words(job, images, ["--leave-running"], plugin=plugin)


def _measure(rig: Rig, job: SteadyJob, plugin: bool) -> tuple[int, float]:
    """System calls and seconds of an undisturbed dump."""
    dumped = rig.run(_words(rig, job, images := rig.images(), plugin), images, "dump")
    assert dumped.status == 0, dumped.errors
    calls = _kill_at_call(rig, job, rig.images(), 0, plugin, False)
    job.run_on()
    return calls, dumped.seconds


def _kill_at_call(
    rig: Rig, job: SteadyJob, images: Path, number: int, plugin: bool, with_worker: bool
) -> int:
    """Returns how many system calls were made."""
    count = rig.scratch / "system-calls"
    prefix = [str(rig.killer), str(count), str(number), str(int(with_worker))]
    ended = rig.run([*prefix, *_words(rig, job, images, plugin)], images, "dump")
    assert ended.status in (0, 137), ended.errors
    return int(count.read_text())


def _kill_at_time(rig: Rig, job: SteadyJob, images: Path, seconds: float, plugin: bool) -> None:
    criu = rig.start(_words(rig, job, images, plugin))
    time.sleep(seconds)
    criu.kill()
    criu.wait()


def _recover(rig: Rig, job: SteadyJob, images: Path) -> None:
    for pid in job.pids:
        recovered = subprocess.run(
            [sys.executable, "-m", "gpustasis", "recover", str(pid), "-D", str(images)],
            env=dict(rig.environ),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert recovered.returncode == 0, f"recover: {recovered.stderr}"


def _phase(images: Path) -> str:
    log = images.with_name(f"{images.name}.dump.log")
    text = log.read_text(errors="replace") if log.exists() else ""
    phase = next(name for name, mark in reversed(_PHASES) if name != "drop" and mark in text)
    # The image has its name, and the log does not say yet that the task is done with.
    stored = len([path for path in images.glob("gpustasis-[0-9]*.img")])
    return "drop" if stored > text.count("cuda_plugin: checkpointed pid") else phase
