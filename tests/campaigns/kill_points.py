# SPDX-License-Identifier: Apache-2.0
"""CRIU is killed with SIGKILL at many points of a dump: the job must live, and be exact.

Each trial aims at the phase of a dump that has had the fewest hits so far. It kills criu at a
system call of its main thread, counted from the line of the log with which the phase begins, or at
a moment after that line, for what other threads do meanwhile.

Whose loss a job is that does not live on, losses.py says.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

from campaigns import criu_code, losses
from campaigns.rig import (
    CRIU_TIMEOUT_S,
    Jobs,
    Rig,
    criu_errors,
    log_path,
    with_config,
    workers,
)
from campaigns.steady_job import SteadyJob, Thread, is_alive, restore_thread
from campaigns.tally import Tally
from gpustasis.criu.plugin import Setting

# Phases in their order, each with what criu's log holds once it has begun.
_PHASES = {
    "start": "",
    "lock": "cuda_plugin: backend",
    "freeze": "Seized task",
    "checkpoint": "' hook 11 ",
    "drop": "cuda_plugin: dropping",
    "store": "cuda_plugin: storing CPU memory",
    "collect": "Collecting netns",
    losses.CRIUS_PHASE: "Dumping task (pid:",
    "finish": "Writing image inventory",
    "refill": "cuda_plugin: bringing back",
}
_DROPPED = "cuda_plugin: checkpointed pid"  # the drop of one task is over
_STORED = " MiB of CPU memory of pid "  # the CPU memory of one task is in its image
_DROP = "drop"  # none where staged memory is kept
_STORE = "store"  # a phase only where the plugin stores CPU memory, of all tasks at once
_REFILLED = "cuda_plugin: brought back pid"
_STOCK = ("start", "freeze", losses.CRIUS_PHASE, "finish")
_LIMIT = 30  # trials for each hit that is asked for, in the phase that is hardest to hit
_TRIES = 4  # dumps for each kill that is asked for: on a busy machine some end before theirs
# Every job has a child, mapped host memory, and kernels under way on streams whenever it is
# stopped.
_BUSY = {"children": 1, "pinned_kib": 64, "registered_kib": 64, "streams": 2}
SMALL: Mapping[str, int] = {"mib": 8} | _BUSY
LARGE: Mapping[str, int] = {"mib": 64} | _BUSY  # drop and refill take long enough to be hit
# Beside what a CUDA process holds of its GPU memory in its own, to compare, a process without CUDA.
_PLAIN = {"plain_children": 1, "plain_threads": 2}
SMALL_CPU, LARGE_CPU = SMALL | _PLAIN, LARGE | _PLAIN
SMALL_ALL, LARGE_ALL = SMALL_CPU | {"shared_mib": 2}, LARGE_CPU | {"shared_mib": 8}
_SHORT_S = 0.003  # a phase that is shorter is hit by counting calls only
_WATCH_S = 0.0003  # how often a dump is looked at for its phase


def run(
    rig: Rig,
    random: Random,
    count: int,
    *,
    plugin: bool = True,
    with_worker: bool = False,
    whole_bound: bool = True,
    each: int = 0,
    shape: Mapping[str, int] = SMALL,
    settings: Mapping[str, Setting] | None = None,
    start: Callable[[], SteadyJob] | None = None,
    after: Callable[[Path], None] = lambda _: None,
) -> Tally:
    """Kill criu at `count` points of dumps of one job, which must survive all of them. Dumps that
    end before they are killed are no trials.

    plugin False: stock CRIU and a job without CUDA, for comparison; what that loses is counted, and
    is not a failure of ours. with_worker: the plugin's worker is killed at the same instant, and
    `gpustasis recover` has to do its work.
    whole_bound False: a loss that is proved to be CRIU's own is counted and is no failure, as long
    as they are few; what this leaves is what the plugin itself can break. each: go on until every
    phase of the plugin's dump was hit that often; one that cannot be hit is a failure. shape: of
    the job, with the plugin. settings: the plugin's configuration; with cpu_memory = "ours" a dump
    has a phase more, and with recipients, private_key opens what `recover` needs. start: makes
    another job than this module's. after: asked about the image directory of each dump when the job
    runs on, or has been ended; an AssertionError of it is a failure.
    """
    tally = Tally()
    phases = phases_of(settings)
    names = phases if plugin else _STOCK
    if settings:
        rig = with_config(rig, settings)
    key = str((settings or {}).get("private_key", ""))
    hits: Counter[str] = Counter()
    with Jobs(start or (lambda: start_job(rig, plugin, random, shape))) as jobs:
        spans = _measure(rig, jobs.get(), plugin, phases)
        calls = _count_calls(rig, jobs.get(), plugin, names)
        for index in itertools.count():
            fewest = min(names, key=lambda name: hits[name])
            if tally.trials >= count and hits[fewest] >= each:
                break
            if index >= max(_TRIES * count, _LIMIT * each):
                wanted = f"{count} dumps killed, and each phase hit {each} times"
                tally.failures.append(f"{wanted}, cannot be had: {dict(hits)}")
                break
            job, images = jobs.get(), rig.images()
            threads = job.threads()
            kill = _Kill(rig, job, images, with_worker, phases)
            words = _words(rig, job, images, plugin)
            users = [pid for pid in job.pids if with_worker and restore_thread(pid)]  # of CUDA
            by_calls = index % 2 == 0
            point, proofs = kill.aim(words, random, fewest, calls[fewest], spans[fewest], by_calls)
            phase = phase_in_log(images, phases)
            hits[phase] += kill.done
            tally.counts.update(["trials", f"in {phase}"] if kill.done else ["too late"])
            try:
                if with_worker:
                    _recover(rig, users, images, key)
                job.run_on()
                rig.settle(images)
                now = job.threads()
                # While CRIU dumps tasks, which signals a thread had blocked is lost with it.
                if plugin and phase != losses.CRIUS_PHASE:
                    changed = describe_changes(threads, now)
                    assert not changed, f"its threads have changed: {changed}"
                after(images)
                if (images / "gpustasis-undo.log").exists():
                    tally.counts["brought back by the worker"] += 1
                shutil.rmtree(images)  # hundreds of them fill a disk
            except AssertionError as lost:
                loss = losses.judge_in(phase, job, proofs)
                owner = "not proved to be CRIU's" if loss.lacks else "CRIU's own code stood there"
                tally.counts[f"LOST in {phase} to {loss.of_what}, {owner}"] += 1
                if plugin and (loss.lacks or whole_bound):
                    why = loss.lacks or "; ".join(proofs.values())
                    tally.failures.append(f"killed at {point} ({phase}): {lost}; {why}")
                jobs.drop()
                try:
                    rig.settle(images)
                    after(images)
                except AssertionError as left:
                    tally.failures.append(f"killed at {point} ({phase}), the job is gone: {left}")
    if plugin and not whole_bound:
        losses.limit(tally)
    return tally


def describe_changes(before: Mapping[int, Thread], now: Mapping[int, Thread]) -> str:
    tids = sorted(before.keys() | now.keys())
    return "; ".join(
        f"{tid}: {before.get(tid)}, then {now.get(tid)}"
        for tid in tids
        if before.get(tid) != now.get(tid)
    )


def require_kills(tally: Tally) -> None:
    """No failure, in dumps that were killed: a kill that comes too late proves nothing."""
    tally.require_clean()
    assert tally.counts["in end"] <= tally.trials // 3, tally.counts


def run_worker_kills(rig: Rig, random: Random, count: int) -> Tally:
    """The plugin's worker alone is killed, at `count` moments of dumps of one job. If none of
    these moments finds one alive, that is a failure."""
    tally = Tally()
    with Jobs(lambda: start_job(rig, True, random)) as jobs:
        seconds = sum(map(sum, _measure(rig, jobs.get(), True, phases_of(None)).values()))
        for _ in range(count):
            job, images = jobs.get(), rig.images()
            threads = job.threads()
            moment = random.uniform(0, seconds)
            criu = rig.start(_words(rig, job, images, True))
            while criu.poll() is None and not (found := workers(images)):
                time.sleep(_WATCH_S)
            time.sleep(moment)
            alive = [pid for pid in found if is_alive(pid)] if criu.poll() is None else []
            for pid in alive:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            status = criu.wait(60)
            tally.counts["trials"] += 1
            tally.counts["worker killed"] += bool(alive)
            tally.counts["dump done" if status == 0 else "dump failed"] += 1
            try:
                job.run_on()
                rig.settle(images)
                assert job.threads() == threads, "its threads have changed"
                shutil.rmtree(images)
            except AssertionError as lost:
                what = f"worker killed {moment * 1000:.0f} ms after its start"
                tally.failures.append(f"{what}: {lost}")
                jobs.drop()
    if not tally.counts["worker killed"]:
        tally.failures.append("no worker was killed")
    return tally


def start_job(
    rig: Rig, plugin: bool, random: Random, shape: Mapping[str, int] = SMALL
) -> SteadyJob:
    """Without the plugin, one with as many threads and processes, and no CUDA."""
    name = rig.scratch / f"job-{random.randrange(1 << 30):x}"
    if plugin:
        return SteadyJob(rig.programs.job, name, rig.environ, module=rig.programs.kernels, **shape)
    stock = {"cuda": 0, "plain_children": 1, "plain_threads": 3}
    return SteadyJob(rig.programs.job, name, rig.environ, mib=8, **stock)


def _words(rig: Rig, job: SteadyJob, images: Path, plugin: bool) -> list[str]:
    return rig.dump_words(job, images, ["--leave-running"], plugin=plugin)


def _measure(
    rig: Rig, job: SteadyJob, plugin: bool, phases: Sequence[str]
) -> dict[str, list[float]]:
    """The seconds that each phase of an undisturbed dump lasts: each time, where tasks go through
    it in turn. A phase that is too short to be seen has none."""
    images = rig.images()
    criu = rig.start(_words(rig, job, images, plugin))
    spans: dict[str, list[float]] = {name: [] for name in phases}
    phase, begun = "start", time.monotonic()
    while criu.poll() is None:
        found, now = phase_in_log(images, phases), time.monotonic()
        if found != phase:
            spans.setdefault(phase, []).append(now - begun)
            phase, begun = found, now
        time.sleep(_WATCH_S)
    assert criu.returncode == 0, criu_errors(images, "dump")
    job.run_on()
    rig.settle(images)  # nobody traces the job
    if _STORE in phases:  # all of them have some
        stored = log_path(images, "dump").read_text(errors="replace").count(_STORED)
        assert stored == len(job.pids), f"the CPU memory of {stored} processes was stored"
    return spans


def _count_calls(rig: Rig, job: SteadyJob, plugin: bool, names: Sequence[str]) -> dict[str, int]:
    """System calls of criu's main thread from the begin of each phase to the next; for one that
    comes again with the next task, of the first time."""
    marks = [_PHASES[name] for name in names]
    left = {}
    ends_of = {_DROP: _DROPPED, "refill": _REFILLED}
    ends_of = {name: end for name, end in ends_of.items() if name in names}
    for mark in {*marks, *ends_of.values()}:
        images = rig.images()
        kill = _Kill(rig, job, images, False, names)
        kill.at_call(_words(rig, job, images, plugin), 0, mark)
        left[mark] = kill.calls
        job.run_on()
        rig.settle(images)
    ends = [*marks[1:], ""]
    for name, end in ends_of.items():
        ends[names.index(name)] = end
    return {
        name: left[mark] - (left[end] if end else 0)
        for name, mark, end in zip(names, marks, ends, strict=True)
    }


@dataclass(slots=True)
class _Kill:
    """One dump that criu does not survive. calls: system calls that were counted. done: it was
    killed; else it had ended before."""

    rig: Rig
    job: SteadyJob
    images: Path
    with_worker: bool
    phases: Sequence[str]
    calls: int = 0
    done: bool = False

    def aim(
        self,
        words: list[str],
        random: Random,
        phase: str,
        calls: int,
        spans: Sequence[float],
        by_calls: bool,
    ) -> tuple[str, dict[int, str]]:
        """At a point of the phase, which made so many calls and lasted so long when it was
        measured. What point it was, and in which tasks CRIU's code stood."""
        # Dumps of a busy machine differ, so a count that is a difference may be none.
        turn = random.randrange(max(1, len(spans)))
        length = spans[turn] if spans else 0
        if length < _SHORT_S or (by_calls and calls > 0):
            number = random.randint(1, max(1, calls))
            point = f"system call {number} of {calls} of {phase}"
            return point, self.at_call(words, number, _PHASES[phase])
        seconds = random.uniform(0, length)
        point = f"{seconds * 1000:.1f} ms of {length * 1000:.1f} of {phase} {turn + 1}"
        return point, self.in_phase(words, phase, turn, seconds)

    def at_call(self, words: list[str], number: int, mark: str) -> dict[int, str]:
        """At that system call after the mark, 0: at none. In which tasks CRIU's code stood."""
        count = self.rig.scratch / "system-calls"
        how = "po" if self.with_worker else "p"
        prefix = [str(self.rig.programs.killer), str(count), str(number), how, mark]
        killer = self.rig.start([*prefix, *words])
        proofs = {}
        if _stops(killer):
            proofs = criu_code.proofs(self.job.pids)
            killer.send_signal(signal.SIGCONT)
        status = killer.wait(CRIU_TIMEOUT_S)
        if status not in (0, 137):
            errors = criu_errors(self.images, "dump")
            raise AssertionError(f"criu ended with {status}: {errors}")
        self.calls = int(count.read_text())
        self.done = status == 137
        return proofs

    def in_phase(self, words: list[str], phase: str, turn: int, seconds: float) -> dict[int, str]:
        """That long after the phase has begun, `turn` times before not counted. In which tasks
        CRIU's code stood."""
        criu = self.rig.start(words)
        while criu.poll() is None and _log(self.images).count(_PHASES[phase]) <= turn:
            time.sleep(_WATCH_S)
        time.sleep(seconds)
        proofs = {}
        if criu.poll() is not None:
            return proofs  # too late: it has ended
        criu.send_signal(signal.SIGSTOP)
        if _stops(criu):
            proofs = criu_code.proofs(self.job.pids)
            for pid in workers(self.images) if self.with_worker else ():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        criu.kill()
        self.done = criu.wait() == -signal.SIGKILL
        return proofs


def _stops(process: subprocess.Popen[bytes]) -> bool:
    """Wait until a child has stopped; False if it ends instead. It stays to be waited for."""
    events = os.WSTOPPED | os.WEXITED | os.WNOWAIT
    found = os.waitid(os.P_PID, process.pid, events)
    return found is not None and found.si_code == os.CLD_STOPPED


def _recover(rig: Rig, pids: Sequence[int], images: Path, key: str) -> None:
    words = ["-D", str(images), *(("--key", key) if key else ())]
    for pid in pids:
        recovered = subprocess.run(
            [sys.executable, "-m", "gpustasis", "recover", str(pid), *words],
            env=dict(rig.environ),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert recovered.returncode == 0, f"recover: {recovered.stderr}"


def _log(images: Path) -> str:
    log = log_path(images, "dump")
    return log.read_text(errors="replace") if log.exists() else ""


def phase_in_log(images: Path, phases: Sequence[str]) -> str:
    """In which of these phases a dump is, or was killed, by criu's log."""
    return phase_in(_log(images), phases)


def phase_in(text: str, phases: Sequence[str]) -> str:
    """The same by what is in that log."""
    phase = next(name for name in reversed(phases) if _PHASES[name] in text)
    if phase == _DROP:  # the next task goes through checkpoint and drop again
        begun = {_PHASES["checkpoint"]: "checkpoint", _PHASES[_DROP]: _DROP}
        begun[_DROPPED] = "checkpoint"
        return begun[max(begun, key=text.rfind)]
    # A task's refill is over when the next task's begins.
    if phase == "refill" and text.count(_REFILLED) == text.count(_DROPPED):
        return "end"
    return phase


def phases_of(settings: Mapping[str, Setting] | None) -> tuple[str, ...]:
    """Of a dump with this configuration of the plugin, in their order."""
    asked = settings or {}
    has = {_STORE: asked.get("cpu_memory") == "ours", _DROP: asked.get("staging") != "keep"}
    return tuple(name for name in _PHASES if has.get(name, True))
