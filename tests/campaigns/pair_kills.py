# SPDX-License-Identifier: Apache-2.0
"""The drain of one checkpoint and a dump of another into the same arena are under way, and both are
killed with SIGKILL: of the dump criu or the plugin's worker, either of the two first.

Of the dump holds what ram_kills says, and of the drain what drain_kills says, at once: neither
takes from the other what it needs. No agent takes part."""

from __future__ import annotations

import itertools
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from campaigns import criu_code, losses, ram_dump
from campaigns.drain_kills import END as DRAINED
from campaigns.drain_kills import (
    LIMIT,
    MARKED,
    RECYCLING,
    SYNCING,
    WRITING,
    Local,
    await_drain,
    dump_local,
    judge,
    start_drain,
)
from campaigns.ram_dump import (
    FAILED,
    Watch,
    is_finished,
    make_older,
    start,
    start_job,
    workers_of,
)
from campaigns.ram_kills import (
    Killed,
    Place,
    await_aim,
    judge_arena,
    measure,
    note_loss,
    require_runs_on,
)
from campaigns.rig import CRIU_TIMEOUT_S, Jobs, Rig
from campaigns.steady_job import SteadyJob
from campaigns.tally import RESTORED, Tally
from campaigns.victims import LATER_S, Victims, kill_one, signal_all, stop

_SLOW_RATE = "8M"  # for a drain that is to be at work longer than a dump
_EARLY = ("lock", "freeze", "checkpoint")  # a dump that has begun


@dataclass(frozen=True, slots=True)
class Pair:
    """Who is killed with the drain of another checkpoint, and whether the drain is the first."""

    victim: Victims
    drain_first: bool

    def __str__(self) -> str:
        order = ("the drain", str(self.victim))
        return ", then ".join(order if self.drain_first else order[::-1])


PAIRS = tuple(Pair(one, first) for one in (Victims.CRIU, Victims.WORKER) for first in (True, False))


def run(
    rig: Rig,
    arena: Path,
    random: Random,
    each: int,
    pairs: Sequence[Pair] = PAIRS,
    phases: Sequence[str] = ram_dump.WITH_WORKER,
) -> Tally:
    """The drain of one checkpoint and a dump into the same arena are under way; both are killed,
    within LATER_S, until each of the pairs was so `each` times, and the dump in each of these
    phases. Every second time the dump is aimed at, in the phase that was hit least, while an image
    is written by the drain; else the last steps of the drain. No trials are those in which one of
    them had ended, or the plugin was not yet loaded."""
    tally = Tally()
    hits: Counter[Pair] = Counter()
    seen: Counter[str] = Counter()
    place = Place(rig, arena, make_older(rig, arena))
    with Jobs(lambda: start_job(rig)) as jobs:
        spans = measure(place, jobs.get(), [*phases, *_EARLY])
        for index in itertools.count():
            pair = min(pairs, key=lambda one: hits[one])
            if hits[pair] >= each and all(seen[phase] for phase in phases):
                break
            if index >= LIMIT * each * len(pairs):
                wanted = f"each pair hit {each} times, and {', '.join(phases)}"
                tally.failures.append(f"{wanted}, cannot be had: {dict(hits)}, {dict(seen)}")
                break
            job = jobs.get()
            local, images = dump_local(place, job, "--leave-running"), rig.images()
            late = bool(index // len(pairs) % 2)
            fewest = min(phases, key=lambda name: seen[name])
            phase = random.choice(_EARLY) if late else fewest
            aim = (phase, random.choice((0.0, random.uniform(0, spans[phase]))))
            killed, of_drain, status = _kill_pair(
                place, job, (local, images), pair, aim, late, random
            )
            if status not in (0, -signal.SIGKILL):
                tally.failures.append(f"nobody had killed the drain, and it ended with {status}")
            hits[pair] += killed.done
            seen[killed.phase] += killed.done
            tally.counts.update(
                ["trials", str(pair), f"the drain in {of_drain}", f"the dump in {killed.phase}"]
                if killed.done
                else ["too late"]
            )
            what = f"{pair} killed, the drain in {of_drain}, the dump"
            _judge_pair(place, jobs, tally, (local, images), what, killed)
            shutil.rmtree(local.images)
            shutil.rmtree(images)
    tally.counts[RESTORED] = place.restored  # of dumps
    try:
        place.older.require_exact(rig)
    except FAILED as wrong:
        tally.failures.append(f"the older local checkpoint: {wrong}")
    losses.limit(tally)
    return tally


def _judge_pair(
    place: Place,
    jobs: Jobs,
    tally: Tally,
    of: tuple[Local, Path],
    what: str,
    killed: Killed,
) -> None:
    job, (local, images) = jobs.get(), of
    lives = False
    try:
        require_runs_on(place, job, images, killed)
        lives = True
    except FAILED as wrong:
        note_loss(tally, job, what, killed, wrong)
        jobs.drop()
    try:
        beside = [] if local.phase() in (RECYCLING, DRAINED) else [local.stored]
        left = judge_arena(place, images, job if lives else None, killed, beside)
        tally.counts[f"the dump: {left}"] += killed.done
        tally.counts[f"the drain: {judge(place, local, None)}"] += killed.done
    except FAILED as wrong:
        tally.failures.append(f"{what} in {killed.phase}: {wrong}")
        jobs.drop()


def _kill_pair(
    place: Place,
    job: SteadyJob,
    of: tuple[Local, Path],
    pair: Pair,
    aim: tuple[str, float],
    late: bool,
    random: Random,
) -> tuple[Killed, str, int]:
    """One drain and one dump; in which phase the drain was, and its exit status. aim: of the dump.
    late: from then on it is waited for the last steps of the drain, which has stood still."""
    (local, images), killed = of, Killed(victim=pair.victim)
    watch = Watch(images, place.arena)
    rate = [] if late else ["--compress", "none", "--rate-limit", _SLOW_RATE]
    at_work = start_drain(place.rig, local, *rate)
    await_drain(at_work, local, WRITING)
    if late:
        at_work.send_signal(signal.SIGSTOP)
    seconds = random.uniform(0, LATER_S)
    if pair.drain_first and not late:  # the dump is hit at the aim
        seconds = min(seconds, aim[1])
        aim = (aim[0], aim[1] - seconds)
    criu = start(place.rig, job, images)
    await_aim(criu, watch, aim)
    if late:
        at_work.send_signal(signal.SIGCONT)
        await_drain(at_work, local, random.choice((SYNCING, MARKED, RECYCLING)))
    if pair.drain_first:
        drain_died = kill_one(at_work)
        of_drain = local.phase()
        time.sleep(seconds)
        dump_died = _kill_of_dump(place, criu, job, images, watch, pair, killed)
    else:
        dump_died = _kill_of_dump(place, criu, job, images, watch, pair, killed)
        time.sleep(seconds)
        drain_died = kill_one(at_work)
        of_drain = local.phase()
    killed.status = criu.wait(CRIU_TIMEOUT_S)  # it goes on without its worker
    killed.undisturbed = not dump_died
    killed.done = drain_died and dump_died and of_drain != DRAINED
    killed.done = killed.done and killed.phase not in ("start", ram_dump.END)
    return killed, of_drain, at_work.returncode


def _kill_of_dump(
    place: Place,
    criu: subprocess.Popen[bytes],
    job: SteadyJob,
    images: Path,
    watch: Watch,
    pair: Pair,
    killed: Killed,
) -> bool:
    """Whether it died: of criu or the worker the one that the pair names."""
    if not stop(criu):
        killed.phase = ram_dump.END
        return False
    found = [] if pair.victim is Victims.CRIU else workers_of(images, place.arena)
    killed.phase, killed.finished = watch.phase(), is_finished(images)
    if pair.victim is Victims.CRIU:
        killed.criu_in = killed.phase
        killed.proofs = criu_code.proofs(job.pids)
        died = kill_one(criu)
    else:
        signal_all(found, signal.SIGKILL)
        criu.send_signal(signal.SIGCONT)
        died = bool(found)
    return died
