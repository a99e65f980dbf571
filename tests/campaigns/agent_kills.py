# SPDX-License-Identifier: Apache-2.0
"""The agent is killed with SIGKILL, alone, with criu, with the plugin's worker, and with both,
while it makes checkpoints in memory, writes down that one is made, and drains them.

The job runs on, and is exact: by criu or the worker where one is left, else by the agent that is
started next. That one says `done` of each checkpoint that is whole, and of no other, and drains
it. Whole are, as long as the job runs, each that was finished, by its files, when all stood still,
and each whose criu lives on. The checkpoint that the killed agent was draining meanwhile becomes
durable as well. In the arena is nothing that nobody needs."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Any

from campaigns import criu_code, losses
from campaigns.hits import Hits
from campaigns.ram_dump import (
    FAILED,
    PHASES,
    STORING,
    Older,
    Watch,
    is_finished,
    make_older,
    require_only,
    settle,
    start_job,
    workers_of,
)
from campaigns.ram_kills import Killed, note_loss
from campaigns.rig import CRIU_TIMEOUT_S, Jobs, Rig
from campaigns.steady_job import SteadyJob
from campaigns.tally import FINISHED, RESTORED, Sample, Tally
from campaigns.victims import WATCH_S, signal_all
from gpustasis._core import ARENA_MARKER
from gpustasis.agent.work import CRIU, REQUESTED
from gpustasis.draining.recycle import recycle
from gpustasis.image.arena import Tier, tier_of
from gpustasis.image.directory import is_there
from gpustasis.image.verification import verify_directory
from gpustasis.task import find_users
from support.agent import Agent
from support.arena import restore


class Who(StrEnum):
    AGENT = "the agent"
    WITH_CRIU = "the agent and criu"
    WITH_WORKER = "the agent and the worker"
    ALL = "the agent, criu and the worker"


BEFORE, TAKING, AFTER, NOTING, DRAINING, END = (
    "before the memory is taken",
    "while it is taken",
    "after that, until criu ends",
    "before it is written down that it is done",
    "while it is drained",
    "end",
)
_TAKING_FROM, _AFTER_FROM = PHASES.index(STORING) - 1, PHASES.index(STORING) + 2
_OF_DUMP = {
    name: BEFORE if at < _TAKING_FROM else TAKING if at < _AFTER_FROM else AFTER
    for at, name in enumerate(PHASES)
}
ALL_OF_DUMP, ALONE = (BEFORE, TAKING, AFTER), (NOTING, DRAINING)
_ORDER = (*ALL_OF_DUMP, *ALONE, END)
_LIMIT = 10  # trials for each hit that is asked for
_REACH_S = 0.2  # after the begin of a phase, at most, at first
_BESIDE = 0.5  # share of the trials in which an earlier checkpoint is drained meanwhile
_RESTORED_EACH = 6  # of the checkpoints that killed ones have left, one in so many
_LINES = 'tier = "ram"\ndrain_rate = "24M"\nkeep_last = 3\n'


@dataclass(slots=True)
class _Killed(Killed):
    """criu_in: the phase of the dump, where criu has died in it. drained: an earlier checkpoint was
    being drained. goes_on: criu was at work, and it and its worker live on."""

    drained: bool = False
    goes_on: bool = False


@dataclass(slots=True)
class _Place:
    """used: which of the checkpoints that are left are restored, by when somebody was killed, and
    whether criu was; restored: how many were."""

    rig: Rig
    arena: Path
    agent: Agent
    older: Older
    used: Sample = field(default_factory=lambda: Sample(_RESTORED_EACH))
    restored: int = 0

    def operation(self, id: str) -> dict[str, Any]:
        """As it is on the disk: an agent that was killed answers nothing."""
        path = self.agent.store / "operations" / f"{id}.json"
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def run(
    rig: Rig,
    arena: Path,
    random: Random,
    each: int,
    phases: Sequence[str] = (*ALL_OF_DUMP, *ALONE),
) -> Tally:
    """Checkpoints of one job on `rig` (ram_dump.slow_ram) that an agent makes, until each of the
    phases was hit `each` times. Those that end before anybody is killed are no trials."""
    tally = Tally()
    older = make_older(rig, arena)
    with tempfile.TemporaryDirectory(prefix="agent-") as name:  # short: a socket's path is
        agent = Agent(Path(name), rig.environ, rig.criu, _LINES)
        agent.start()
        try:
            place = _Place(rig, arena, agent, older)
            with Jobs(lambda: start_job(rig)) as jobs:
                for some in (ALL_OF_DUMP, ALONE):
                    wanted = [one for one in some if one in phases]
                    _hit(place, jobs, tally, random, each, wanted)
            tally.counts[RESTORED] = place.restored
            tally.require_restored()
        finally:
            agent.close()
    try:
        older.require_exact(rig)
    except FAILED as wrong:
        tally.failures.append(f"the older local checkpoint: {wrong}")
    losses.limit(tally)
    return tally


def _hit(
    place: _Place,
    jobs: Jobs,
    tally: Tally,
    random: Random,
    each: int,
    phases: Sequence[str],
) -> None:
    whom = tuple(Who) if set(phases) & set(ALL_OF_DUMP) else (Who.AGENT,)
    hits = Hits(phases, whom, each)
    reach = dict.fromkeys(phases, _REACH_S)
    for phase in hits.aims(tally, _LIMIT):
        who = hits.whose_turn(phase, whom)
        job, killed, beside = jobs.get(), _Killed(), ""
        try:
            if random.random() < _BESIDE:
                beside = _checkpoint(place, job)
            id, killed = _kill(place, job, who, phase, random.uniform(0, reach[phase]))
        except FAILED as wrong:
            tally.failures.append(f"{who} to be killed {phase}: {wrong}")
            jobs.drop()
            if place.agent.process is None:
                place.agent.start()
            continue
        if killed.done:
            hits.add(killed.phase, who)
        factor = 1.5 if killed.phase == phase else 0.5
        reach[phase] = min(_REACH_S, max(factor * reach[phase], 0.001))
        tally.counts["trials" if killed.done else "too late"] += 1
        if killed.done and killed.criu_in:
            tally.counts[f"in {killed.criu_in}"] += 1
        tally.counts[f"killed {killed.phase}"] += killed.done
        tally.counts[FINISHED] += killed.done and killed.finished
        tally.counts["while an earlier one was drained"] += killed.done and killed.drained
        lives = False
        try:
            _settle(place, id)
            job.run_on()
            lives = True
        except FAILED as wrong:
            note_loss(tally, job, f"{who} killed", killed, wrong)
            jobs.drop()
        try:
            found = _judge(place, id, beside, job if lives else None, killed)
            tally.counts[found] += killed.done
        except FAILED as wrong:
            tally.failures.append(f"{who} killed {killed.phase}: {wrong}")
            jobs.drop()
    hits.note(tally)


def _checkpoint(place: _Place, job: SteadyJob) -> str:
    """The id of one that is done, and is drained from now on."""
    with place.agent.client() as client:
        found = client.checkpoint(pid=job.pid)
    assert found["state"] == "done", found
    return str(found["id"])


def _kill(
    place: _Place, job: SteadyJob, who: Who, phase: str, seconds: float
) -> tuple[str, _Killed]:
    """Begin one, and kill them that long after the begin of that phase."""
    watch = Watch(Path(), place.arena)
    with place.agent.client() as client:
        id = str(client.checkpoint(pid=job.pid, wait=False)["id"])
    deadline = time.monotonic() + CRIU_TIMEOUT_S
    while not place.operation(id)["place"]:
        assert time.monotonic() < deadline, "the agent does not begin"
        time.sleep(WATCH_S)
    images = Path(place.operation(id)["place"])
    dump = _Dump(place, id, images, watch)
    later = _ORDER[_ORDER.index(phase) :]
    while dump.phase() not in later:
        assert time.monotonic() < deadline, f"no {phase} is seen"
        time.sleep(WATCH_S)
    end = time.monotonic() + seconds
    while dump.phase() != END and time.monotonic() < end:
        time.sleep(WATCH_S)
    # First: what stands still when its parent dies gets a SIGHUP of the kernel.
    place.agent.stop(signal.SIGKILL)
    found = _criu_at(images)
    signal_all(found, signal.SIGSTOP)
    workers = workers_of(images, place.arena) if images.is_dir() else []
    signal_all(workers, signal.SIGSTOP)
    killed = _Killed(phase=dump.phase(), drained=_drains_beside(place, images))
    killed.finished = is_finished(images)
    killed.goes_on = bool(found) and who is Who.AGENT
    victims = [*(found if who in (Who.WITH_CRIU, Who.ALL) else [])]
    victims += workers if who in (Who.WITH_WORKER, Who.ALL) else []
    is_alone = who is Who.AGENT
    in_dump = killed.phase in ALL_OF_DUMP
    lacks = (who in (Who.WITH_CRIU, Who.ALL) and not found) or (
        who in (Who.WITH_WORKER, Who.ALL) and not workers
    )
    killed.done = killed.phase != END and not lacks and (in_dump or is_alone)
    if in_dump and found and who in (Who.WITH_CRIU, Who.ALL):
        killed.criu_in, killed.proofs = watch.phase(), criu_code.proofs(job.pids)
    signal_all(victims, signal.SIGKILL)
    signal_all([one for one in (*found, *workers) if one not in victims], signal.SIGCONT)
    return id, killed


@dataclass(slots=True)
class _Dump:
    """One that an agent makes. criu: its process; empty: not seen yet."""

    place: _Place
    id: str
    images: Path
    watch: Watch
    criu: Sequence[int] = ()

    def phase(self) -> str:
        if not self.criu:
            self.criu = _criu_at(self.images)
            if self.criu:
                self.watch.follow(_log_of(self.criu[0]))
            elif self.place.operation(self.id)["state"] == "running":
                return BEFORE if not self._is_written() else NOTING
        if any(os.path.exists(f"/proc/{pid}") for pid in self.criu):
            return _OF_DUMP.get(self.watch.phase(), AFTER)
        if self.place.operation(self.id)["state"] == "running":
            return NOTING
        return DRAINING if is_there(self.images / ARENA_MARKER) else END

    def _is_written(self) -> bool:
        return is_there(self.images / "stats-dump")


def _log_of(criu: int) -> Path:
    """Where it logs to, as it was told: the file has its name in the image directory at the end."""
    with suppress(FileNotFoundError, ProcessLookupError):
        words = Path(f"/proc/{criu}/cmdline").read_bytes().split(b"\0")
        if b"--log-file" in words:
            return Path(os.fsdecode(words[words.index(b"--log-file") + 1]))
    return Path("/nonexistent")


def _criu_at(images: Path) -> list[int]:
    """But for what it has started, and waits for in a call in which it cannot be stopped."""
    found: list[int] = []
    with suppress(FileNotFoundError):
        found = find_users(images, *CRIU)
    return [pid for pid in found if _parent_of(pid) not in found]


def _parent_of(pid: int) -> int:
    """0: it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        return int(stat[stat.rindex(")") + 2 :].split()[1])
    return 0


def _drains_beside(place: _Place, images: Path) -> bool:
    """Whether another checkpoint of the agent's is in memory still."""
    markers = place.agent.store.glob(f"{REQUESTED}/*/*/*/{ARENA_MARKER}")
    return any(marker.parent != images for marker in markers)


def _settle(place: _Place, id: str) -> None:
    """Until the next agent has said what became of it."""
    place.agent.start()
    place.agent.wait_for_state(id, "done", "interrupted", "failed")
    with suppress(FileNotFoundError):  # it was not made yet
        settle(Path(place.operation(id)["place"]), place.arena)


def _judge(place: _Place, id: str, beside: str, job: SteadyJob | None, killed: _Killed) -> str:
    """What became of the checkpoint, and of the one before it. Raises AssertionError: it may not.
    job: that lives; sometimes it goes on from its checkpoint."""
    agent = place.agent
    agent.wait_for(lambda: agent.metric("gpustasis_agent_local") == 0, CRIU_TIMEOUT_S)
    found = place.operation(id)
    images = Path(found["place"])
    whole = is_finished(images)
    assert whole or not killed.finished, f"it was finished, and is gone: {found}"
    assert whole or not killed.goes_on, f"nobody has killed its criu, and it is none: {found}"
    assert whole or found["state"] != "done", f"it is done, and not whole: {found}"
    assert not whole or found["state"] == "done" or job is None, f"it is whole, and {found}"
    if beside:
        _require_durable(Path(place.operation(beside)["place"]))
    if whole:
        _require_durable(images)
    recycle(place.arena)
    place.older.require_untouched()
    require_only(place.arena, [place.older.stored])
    if not whole:
        return "there is no checkpoint"
    kind = killed.phase, bool(killed.criu_in)
    if job is not None and killed.done and place.used.takes(kind):
        job.end()
        restore(place.rig, job, images)
        place.restored += 1
    return "it is durable"


def _require_durable(images: Path) -> None:
    assert tier_of(images) == Tier.DURABLE, f"{images} is in memory alone, and nobody drains it"
    problems = verify_directory(images).problems
    assert not problems, f"{images}: {problems[0]}"
