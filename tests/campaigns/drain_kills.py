# SPDX-License-Identifier: Apache-2.0
"""`gpustasis drain` is killed with SIGKILL in each of its phases.

The checkpoint is local or durable, never neither, and every byte of it is right. It can be restored
as it is. A second drain makes it durable, and `gpustasis arena clean` takes back what is left of it
in memory. No agent takes part: that is agent_kills.py."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from campaigns.ram_dump import FAILED, make_older, require_only, settle, start_job
from campaigns.ram_kills import Place
from campaigns.rig import CRIU_TIMEOUT_S, Jobs, Rig
from campaigns.steady_job import SteadyJob
from campaigns.tally import Tally
from campaigns.victims import WATCH_S, kill_or_done
from gpustasis._core import ARENA_MARKER, MANIFEST_NAME, read_manifest
from gpustasis.draining.drain import drain
from gpustasis.image.arena import OVER, Tier, stored_directory, tier_of
from gpustasis.image.directory import is_there
from gpustasis.image.verification import verify_directory
from support.arena import dump, restore

BEGIN, WRITING, SYNCING, MARKED, RECYCLING, END = (
    "begin",
    "writing an image",
    "syncing and writing the manifest",
    "the manifest is there, and the marker",
    "the marker is gone, and memory is taken back",
    "end",
)
_ORDER = (BEGIN, WRITING, SYNCING, MARKED, RECYCLING, END)
PHASES = _ORDER[1:-1]  # at which a drain is aimed
_COMMAND = (sys.executable, "-m", "gpustasis", "drain")
_RATE, _WRITING_S = "48M", 0.6  # 32 MiB are written
LIMIT = 12  # drains for each hit that is asked for
_USED_EACH = 4  # of checkpoints whose drain was killed, one in so many is restored as it is
_KILLED = 137
_SYNCING_CALLS, _MARKED_CALLS = 100, 12  # at most


@dataclass(frozen=True, slots=True)
class Local:
    """A checkpoint that is local before its drain, and what its images are called."""

    images: Path
    stored: Path
    names: tuple[str, ...]

    def phase(self) -> str:
        """Of its drain, by what is there."""
        if not (self.images / ARENA_MARKER).exists():
            return RECYCLING if self.stored.exists() else END
        if (self.images / MANIFEST_NAME).exists():
            return MARKED
        if all((self.images / name).exists() for name in self.names):
            return SYNCING
        return WRITING if any(self.images.glob(".gpustasis-*.part")) else BEGIN

    def mark(self, phase: str) -> str:
        """The name that a file gets last before the phase begins."""
        return self.names[-1] if phase == SYNCING else MANIFEST_NAME


def dump_local(place: Place, job: SteadyJob, *extra: str) -> Local:
    images = dump(place.rig, job, *extra)
    settle(images, place.arena)
    stored = stored_directory(images)
    assert stored != images
    tasks = read_manifest(stored).tasks
    return Local(images, stored, tuple(task.image_name for task in tasks if task.externalized))


class _Calls:
    """At which system calls of its first thread, counted from a rename to the mark of the first of
    these phases, a drain is in which of them: learnt from those that were killed. first: about how
    many the first has."""

    def __init__(self, place: Place, random: Random, phases: Sequence[str], first: int) -> None:
        self.phases = phases
        self._place, self._random, self._short = place, random, first
        self._found: list[tuple[int, int]] = []
        self._last = 0

    def measure(self, local: Local) -> None:
        """Of a drain that comes to its end."""
        _, self._last = self._run(local, 0)
        assert self._last > 0, f"nothing is ever renamed to {local.mark(self.phases[0])}"

    def kill(self, local: Local, wanted: str) -> bool:
        """Whether the drain of it was killed, in that phase as far as is known."""
        number = self._choose(_ORDER.index(wanted), wanted == self.phases[0])
        killed, _ = self._run(local, number)
        self._found.append((number, _ORDER.index(local.phase() if killed else END)))
        return killed

    def _choose(self, wanted: int, first: bool) -> int:
        most = self._short if first else self._last
        low = max((number for number, phase in self._found if phase < wanted), default=1)
        high = min((number for number, phase in self._found if phase > wanted), default=most)
        return self._random.randint(min(low, high), max(low, high))

    def _run(self, local: Local, number: int) -> tuple[bool, int]:
        rig = self._place.rig
        count = rig.scratch / "system-calls"
        killer = [
            str(rig.programs.killer),
            str(count),
            str(number),
            "-",
            local.mark(self.phases[0]),
        ]
        ended = subprocess.run(
            [*killer, *_COMMAND, str(local.images)],
            env=dict(rig.environ),
            capture_output=True,
            text=True,
            timeout=CRIU_TIMEOUT_S,
            check=False,
        )
        assert ended.returncode in (0, _KILLED), ended.stderr
        return ended.returncode == _KILLED, int(count.read_text())


def run(rig: Rig, arena: Path, random: Random, each: int, phases: Sequence[str] = PHASES) -> Tally:
    """Drains of checkpoints of one job on `rig` (ram_dump.slow_ram) that are killed, until each of
    the phases was hit `each` times. Those that end before they are killed are no trials."""
    tally = Tally()
    hits: Counter[str] = Counter()
    place = Place(rig, arena, make_older(rig, arena))
    with Jobs(lambda: start_job(rig)) as jobs:
        synced = _Calls(place, random, (SYNCING,), _SYNCING_CALLS)
        marked = _Calls(place, random, (MARKED, RECYCLING), _MARKED_CALLS)
        for calls in (synced, marked):
            calls.measure(dump_local(place, jobs.get(), "--leave-running"))
        for index in itertools.count():
            phase = min(phases, key=lambda name: hits[name])
            if hits[phase] >= each:
                break
            if index >= LIMIT * each * len(phases):
                tally.failures.append(f"each phase hit {each} times, cannot be had: {dict(hits)}")
                break
            job = jobs.get()
            used = hits[phase] % _USED_EACH == 0
            local = dump_local(place, job, *(() if used else ("--leave-running",)))
            if used:
                job.wait()
            found = phase
            try:
                if phase == WRITING:
                    killed = _kill_writing(rig, local, random)
                else:
                    killed = (synced if phase == SYNCING else marked).kill(local, phase)
                found = local.phase()
                hits[found] += killed
                tally.counts.update(["trials", f"in {found}"] if killed else ["too late"])
                tally.counts[judge(place, local, job if used else None)] += killed
                tally.counts[f"restored as it was left in {found}"] += killed and used
                if not used:
                    job.run_on()
            except FAILED as wrong:
                tally.failures.append(f"the drain, killed in {found}: {wrong}")
                jobs.drop()
            shutil.rmtree(local.images)
    for phase in phases:
        if not tally.counts[f"restored as it was left in {phase}"]:
            tally.failures.append(f"none that was left in {phase} was restored")
    try:
        place.older.require_exact(rig)
    except FAILED as wrong:
        tally.failures.append(f"the older local checkpoint: {wrong}")
    return tally


def start_drain(rig: Rig, local: Local, *words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*_COMMAND, str(local.images), *words],
        env=dict(rig.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def await_drain(at_work: subprocess.Popen[bytes], local: Local, phase: str) -> None:
    """Until the drain is in it, or behind it, or has ended."""
    later = _ORDER[_ORDER.index(phase) :]
    while at_work.poll() is None and local.phase() not in later:
        time.sleep(WATCH_S)


def _kill_writing(rig: Rig, local: Local, random: Random) -> bool:
    at_work = start_drain(rig, local, "--compress", "none", "--rate-limit", _RATE)
    await_drain(at_work, local, WRITING)
    time.sleep(random.uniform(0, _WRITING_S))
    return kill_or_done(at_work, "the drain")


def judge(place: Place, local: Local, job: SteadyJob | None, beside: Sequence[Path] = ()) -> str:
    """What became of a checkpoint whose drain was killed, and its second drain. Raises
    AssertionError: it may not. job: that is restored from it, as it is and when it is durable.
    beside: other directories of the arena that are needed."""
    phase, images = local.phase(), local.images
    wanted = Tier.DURABLE if phase in (MARKED, RECYCLING, END) else Tier.LOCAL
    found = tier_of(images)
    assert found == wanted, f"it is {found}, and not {wanted}"
    problems = verify_directory(images).problems
    assert not problems, f"it is {found}, and damaged: {problems[0]}"
    needed = [place.older.stored, *beside]
    if phase not in (RECYCLING, END):  # where not, a drain of another takes it back
        # So it does from the note on, which comes before the marker goes.
        is_over = is_there(local.stored / OVER)
        assert not is_over or found == Tier.DURABLE
        require_only(place.arena, needed if is_over else [*needed, local.stored])
    if job is not None:
        restore(place.rig, job, images)
        job.end()
    drain(images)
    assert tier_of(images) == Tier.DURABLE
    assert not (images / ARENA_MARKER).exists()
    left = [path.name for path in images.iterdir() if path.name.endswith(".part")]
    assert not left, f"a second drain leaves {left}"
    problems = verify_directory(images).problems
    assert not problems, f"a second drain leaves it damaged: {problems[0]}"
    if phase not in (RECYCLING, END):
        assert not local.stored.exists(), "a second drain does not take the memory back"
    require_only(place.arena, needed)
    place.older.require_untouched()
    if job is not None:
        restore(place.rig, job, images)
    return f"was {found}"
