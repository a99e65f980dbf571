# SPDX-License-Identifier: Apache-2.0
"""criu, the plugin's worker or both are killed with SIGKILL in each phase of a dump with
tier = "ram".

The job runs on, and is exact: by the worker when criu has died, by criu when the worker has, by
`gpustasis recover` when both have. What the dump leaves is a whole local checkpoint or none:
`gpustasis arena clean` gives the room of anything else back, also when it comes before
`gpustasis recover`, whose memory it must not take. An older local checkpoint in the same arena is
never touched. No agent takes part: that is agent_kills.py."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from campaigns import criu_code, losses
from campaigns.hits import Hits
from campaigns.kill_points import describe_changes
from campaigns.ram_dump import (
    END,
    FAILED,
    MOST,
    PHASES,
    WITH_WORKER,
    Older,
    Watch,
    is_finished,
    is_whole,
    make_older,
    require_only,
    settle,
    start,
    start_job,
    workers_of,
)
from campaigns.rig import CRIU_TIMEOUT_S, Jobs, Rig, criu_errors
from campaigns.steady_job import SteadyJob, restore_thread
from campaigns.tally import FINISHED, RESTORED, Sample, Tally
from campaigns.victims import LATER_S, WATCH_S, Victims, signal_all, stop, strike
from gpustasis._core import find_drop_record
from gpustasis.draining.drain import drain
from gpustasis.draining.recycle import recycle, size_of
from gpustasis.draining.room import discard
from gpustasis.driver import ProcessState
from gpustasis.dump_records import find_begun
from gpustasis.errors import DriverError
from gpustasis.image.arena import Tier, stored_directory, tier_of
from gpustasis.image.verification import verify_directory
from support.arena import restore
from support.driver_states import driver_of

_LIMIT = 12  # dumps for each hit that is asked for
_MEASURED = 20  # dumps, at most
_CLEANED_AT_ONCE = 0.5  # share of the dumps
_USED_EACH = 3  # of dumps that are whole all the same, one in so many is restored, and drained
RECOVERED = "processes brought back by `gpustasis recover`"
_WITH_CRIU = (Victims.BOTH, Victims.WORKER_FIRST, Victims.CRIU_FIRST)


@dataclass(slots=True)
class Killed:
    """What was seen when the first victim died, while both stood still; done: it was in time.
    victim: who died of it; the second may have ended by itself.
    criu_in: the phase in which criu itself died, which may be a later one; proofs: in which tasks
    its code stood then.

    undisturbed: all had ended before, and nobody was killed. status: criu's. finished: there was a
    checkpoint, by its files, when somebody died, or before anything was cleaned: nobody may take it
    back, nor a criu that lives on, for its dump has not failed. recovered: how many processes
    `gpustasis recover` was asked for. cleans_at_once: `gpustasis arena clean` came while
    those that were left were still at work."""

    phase: str = ""
    victim: Victims = Victims.CRIU
    done: bool = False
    criu_in: str = ""
    proofs: dict[int, str] = field(default_factory=dict)
    undisturbed: bool = False
    status: int = 0
    finished: bool = False
    recovered: int = 0
    cleans_at_once: bool = False


@dataclass(slots=True)
class Place:
    """Where dumps go. used: which of the checkpoints that killed dumps have left are restored, by
    where criu died; restored: how many were."""

    rig: Rig
    arena: Path
    older: Older
    used: Sample = field(default_factory=lambda: Sample(_USED_EACH))
    restored: int = 0


def run(
    rig: Rig,
    arena: Path,
    random: Random,
    each: int,
    victims: Sequence[Victims] = (Victims.CRIU,),
    phases: Sequence[str] = PHASES,
) -> Tally:
    """Dumps of one job on `rig` (ram_dump.slow_ram) that are killed, until each of the phases was
    hit `each` times. victims: which of them, in turn; a worker dies in WITH_WORKER alone. What is
    judged and counted is who has died. Dumps that end before they are killed are no trials."""
    tally = Tally()
    names = phases if tuple(victims) == (Victims.CRIU,) else [*filter(WITH_WORKER.count, phases)]
    hits = Hits(names, victims, each)
    place = Place(rig, arena, make_older(rig, arena))
    with Jobs(lambda: start_job(rig)) as jobs:
        spans = measure(place, jobs.get(), names)
        reach = dict(spans)  # of the aim, shorter while a phase is missed
        for phase in hits.aims(tally, _LIMIT):
            victim = hits.whose_turn(phase, victims)
            job, images = jobs.get(), rig.images()
            threads = job.threads()
            aim = (phase, random.choice((0.0, random.uniform(0, reach[phase]))))
            later_s = random.uniform(0.001, hits.later_s(phase, victim, LATER_S))
            killed = kill(place, job, images, victim, aim, later_s)
            killed.cleans_at_once = not killed.undisturbed and random.random() < _CLEANED_AT_ONCE
            if killed.done:
                hits.add(killed.phase, killed.victim, victim)
            died = killed.victim if killed.done else victim
            factor = 1.5 if killed.phase == phase else 0.5
            reach[phase] = min(spans[phase], factor * reach[phase])
            tally.counts.update(["trials", f"in {killed.phase}"] if killed.done else ["too late"])
            tally.counts[FINISHED] += killed.done and killed.finished
            lives = False
            try:
                require_runs_on(place, job, images, killed)
                if losses.CRIUS_PHASE not in (killed.phase, killed.criu_in):
                    changed = describe_changes(threads, job.threads())
                    assert not changed, f"its threads have changed: {changed}"
                lives = True
            except FAILED as wrong:
                note_loss(tally, job, f"{died} killed", killed, wrong)
                jobs.drop()
            if killed.recovered:
                tally.counts[RECOVERED] += killed.recovered
            try:
                found = judge_arena(place, images, job if lives else None, killed)
                tally.counts[found] += killed.done
            except FAILED as wrong:
                tally.failures.append(f"{died} killed in {killed.phase}: {wrong}")
                jobs.drop()
            shutil.rmtree(images)
    tally.counts[RESTORED] = place.restored
    if PHASES[-1] in names:  # a criu that dies there has dumped all
        tally.require_restored()
    try:
        place.older.require_exact(rig)
    except FAILED as wrong:
        tally.failures.append(f"the older local checkpoint: {wrong}")
    hits.note(tally)
    losses.limit(tally)
    return tally


def note_loss(tally: Tally, job: SteadyJob, what: str, killed: Killed, wrong: Exception) -> None:
    """A failure, unless what was lost is CRIU's own loss."""
    loss = losses.judge_in(killed.criu_in, job, killed.proofs)
    if killed.criu_in == losses.CRIUS_PHASE and not loss.lacks:
        tally.counts[f"LOST to {loss.of_what}, CRIU's own code stood there"] += 1
    else:
        tally.failures.append(f"{what} in {killed.phase}: {wrong}; {loss.lacks}")


def measure(place: Place, job: SteadyJob, phases: Sequence[str]) -> dict[str, float]:
    """The seconds that each phase of an undisturbed dump lasts, at most; these were all seen."""
    spans = dict.fromkeys(PHASES, 0.0)
    for count in range(1, _MEASURED + 1):  # one may miss a short phase
        for phase, seconds in _measure_one(place, job).items():
            spans[phase] = max(spans.get(phase, 0.0), seconds)
        missed = [phase for phase in phases if not spans[phase]]
        if not missed and count > 1:
            return spans
    raise AssertionError(f"no dump is ever seen in {missed}: {spans}")


def _measure_one(place: Place, job: SteadyJob) -> dict[str, float]:
    """The same of one dump, of the phases that were seen."""
    rig = place.rig
    images = rig.images()
    spans: dict[str, float] = defaultdict(float)
    watch = Watch(images, place.arena)
    criu = start(rig, job, images)
    before = time.monotonic()
    while criu.poll() is None:
        phase, now = watch.phase(), time.monotonic()
        spans[phase] += now - before
        before = now
        time.sleep(WATCH_S)
    assert criu.returncode == 0, criu_errors(images, "dump")
    settle(images, place.arena)
    job.run_on()
    assert is_whole(images)
    taken = size_of(stored_directory(images))
    assert taken <= MOST, f"a dump takes {taken} bytes"
    discard(images)
    shutil.rmtree(images)
    return spans


def await_aim(criu: subprocess.Popen[bytes], watch: Watch, aim: tuple[str, float]) -> None:
    """Until that long after the begin of that phase, or the end of criu."""
    wanted, seconds = aim
    later = (*PHASES[PHASES.index(wanted) :], END)
    while criu.poll() is None and watch.phase() not in later:
        time.sleep(WATCH_S)
    deadline = time.monotonic() + seconds
    while criu.poll() is None and time.monotonic() < deadline:
        time.sleep(WATCH_S)


def kill(
    place: Place,
    job: SteadyJob,
    images: Path,
    victim: Victims,
    aim: tuple[str, float],
    later_s: float,
) -> Killed:
    """One dump. aim: the phase, and how many seconds after its begin. later_s: of the second of
    two, after the first."""
    killed = Killed()
    watch = Watch(images, place.arena)
    criu = start(place.rig, job, images)
    await_aim(criu, watch, aim)
    if not stop(criu):
        killed.phase, killed.undisturbed, killed.status = END, True, criu.wait()
        return killed
    found = workers_of(images, place.arena)
    signal_all(found, signal.SIGSTOP)
    killed.phase = watch.phase()

    def note() -> None:
        killed.finished |= is_finished(images)
        if victim is not Victims.WORKER and criu.poll() is None:
            killed.criu_in = watch.phase()
            killed.proofs = criu_code.proofs(job.pids)

    note()
    if victim is not Victims.CRIU and not found:
        criu.kill()
        killed.status = criu.wait()
        return killed
    killed.victim = strike(criu, found, victim, later_s, note)
    if killed.victim is Victims.WORKER:  # criu was not killed, wherever it once stood
        killed.criu_in, killed.proofs = "", {}
    killed.status = criu.wait(CRIU_TIMEOUT_S)
    killed.done = killed.phase != END
    return killed


def require_runs_on(place: Place, job: SteadyJob, images: Path, killed: Killed) -> None:
    """The job does, if need be after `gpustasis recover`. Raises AssertionError."""
    if killed.cleans_at_once:
        killed.finished |= is_finished(images)
        recycle(place.arena)
    settle(images, place.arena)
    killed.finished |= is_finished(images)
    assert killed.status == 0 or not killed.undisturbed, (
        f"nobody was killed, and criu ended with {killed.status}: {criu_errors(images, 'dump')}"
    )
    if killed.done and killed.victim in _WITH_CRIU:
        recycle(place.arena)  # before anybody has recovered anything
        killed.recovered = _recover(place.rig, job, images)
    job.run_on()


def _recover(rig: Rig, job: SteadyJob, images: Path) -> int:
    """Of each process that does not run, or of which a record is left; how many there are."""
    driver = driver_of(rig.environ)
    count = 0
    for pid in job.pids:
        if restore_thread(pid) is None:
            continue
        recorded = find_drop_record(pid) or find_begun(pid)
        try:
            runs = driver.get_state(pid) is ProcessState.RUNNING
        except DriverError as exc:
            raise AssertionError(f"pid {pid} ends: {exc}") from exc
        if runs and not recorded:
            continue
        recovered = subprocess.run(
            [sys.executable, "-m", "gpustasis", "recover", str(pid), "-D", str(images)],
            env=dict(rig.environ),
            capture_output=True,
            text=True,
            timeout=CRIU_TIMEOUT_S,
            check=False,
        )
        assert recovered.returncode == 0, f"recover: {recovered.stderr}"
        count += 1
    return count


def judge_arena(
    place: Place,
    images: Path,
    job: SteadyJob | None,
    killed: Killed,
    beside: Sequence[Path] = (),
) -> str:
    """What the dump has left. Raises AssertionError: it may not. One that is whole is given up, or
    the job, if it lives, goes on from it, and again when it is drained. beside: other directories
    of the arena that are needed."""
    settle(images, place.arena)
    recycle(place.arena)
    place.older.require_untouched()
    whole = is_whole(images)
    assert whole or not killed.finished, "the checkpoint was finished, and is gone"
    assert whole or killed.status != 0, "criu says that it has dumped, and there is no checkpoint"
    needed = [place.older.stored, *beside]
    require_only(place.arena, [*needed, *([stored_directory(images)] if whole else [])])
    if not whole:
        return "nothing is left"
    if job is not None and killed.done and place.used.takes(killed.criu_in):
        use(place.rig, job, images)
        place.restored += 1
    else:
        discard(images)
    require_only(place.arena, needed)
    return "a whole local checkpoint"


def use(rig: Rig, job: SteadyJob, images: Path) -> None:
    """Restore it out of the arena, and from the disk when it is drained; the job, whose checkpoint
    it is, goes on from it."""
    job.end()
    restore(rig, job, images)
    job.end()
    drain(images)
    assert tier_of(images) == Tier.DURABLE
    assert not verify_directory(images).problems
    restore(rig, job, images)
