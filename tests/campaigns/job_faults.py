# SPDX-License-Identifier: Apache-2.0
"""Each part of a distributed job fails in each phase of a checkpoint: four ranks with CRIU,
emulated GPUs and TCP between network namespaces, and a real store (support/ring.py)."""

from __future__ import annotations

import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from campaigns.tally import Tally
from gpustasis.errors import CheckpointError, JobError, StoreError
from gpustasis.jobs.messages import Phase
from gpustasis.task import read_task
from support.driver_states import driver_of, not_running
from support.json_output import check_document
from support.ring import WORLD, Network, Ring, ring_of
from support.ring_faults import Case, Disks, Fault, Moment, Trouble, Watcher, end_all, held
from support.ring_stores import RingStore

STEPS_FIRST = 50
STEPS = 10_000_000  # they do not come to their end
RUNS_ON_S = 5.0
END_S = 20.0
CHECKPOINT_S = 120.0
# criu leaves the connections of a rank in TCP's repair mode when it is killed (docs/jobs.md).
BREAKS_RANKS = (Fault.CRIU, Fault.RANK)
BEFORE_DUMP = (Moment.LOOK, Moment.LOCK_CUDA, Moment.LOCK_NETWORK)
CANNOT_DUMP = (Fault.RANK, Fault.KEEPER, Fault.DISK)  # if it happens before the dump, there is none
FRESH_AFTER = 25  # trials: the images of them all are kept until then


@dataclass(slots=True)
class Place:
    """What a ring is made of. make_store(directory) -> a store that the ranks reach."""

    directory: Path
    network: Network
    program: Path
    environ: Mapping[str, str]
    criu: str
    make_store: Callable[[Path], RingStore]
    made: int = field(default=0)

    @contextmanager
    def ring(self, steps: int) -> Iterator[tuple[Ring, RingStore]]:
        """In a directory of its own; not started."""
        self.made += 1
        directory = self.directory / f"ring-{self.made}"
        directory.mkdir(mode=0o700)
        store = self.make_store(directory / "store")
        try:
            with ring_of(directory, self.network, self.program, self.environ, store.words) as ring:
                ring.criu, ring.steps = self.criu, steps
                yield ring, store
        finally:
            store.close()


@contextmanager
def troubled(place: Place) -> Iterator[Troubled]:
    """A job that runs, and has one whole checkpoint."""
    with place.ring(STEPS) as (ring, store):
        disks = Disks(ring)
        watcher = Watcher(ring, store)
        job = Troubled(ring, store, disks, watcher)
        try:
            job.begin()
            yield job
        finally:
            watcher.close()
            job.end()
            disks.close()


class Troubled:
    """A ring, and the trials on it. counts: what came of them. hits: trials whose fault was made in
    the phase that it was aimed at."""

    def __init__(self, ring: Ring, store: RingStore, disks: Disks, watcher: Watcher) -> None:
        self.ring, self.store, self.disks, self.watcher = ring, store, disks, watcher
        self.counts: Counter[str] = Counter()
        self.hits: Counter[Case] = Counter()
        self._whole = 0  # the epoch that was committed last, and is no restore
        self._pids: list[int] = []  # of the ranks' programs; restored ones have the same

    def begin(self) -> None:
        self.ring.start_all()
        self.ring.wait(lambda: min(self.ring.steps_now()) > STEPS_FIRST)
        self._pids = self.ring.pids()
        made = self.ring.job("checkpoint", "--world", str(WORLD), "--leave-running", "--json")
        assert made.returncode == 0, made.stderr + self.ring.logs()
        self._whole = check_document(made.stdout, "job checkpoint")["epoch"]
        self._wait_for_progress()

    def trial(self, case: Case, random: Random) -> None:
        """Raises AssertionError if anything is not as it must be."""
        trouble = Trouble(self.ring, self.store, self.disks, self.watcher, random, case)
        leave = random.random() < 0.6
        words = ["--leave-running"] if leave else []
        if trouble.fault is Fault.ABSENT:
            words += ["--look-limit", "2"]
        trouble.before()
        asked = self.ring.ask("checkpoint", "--world", str(WORLD), *words)
        try:
            hit = trouble.strike(lambda: asked.poll() is not None)
            trouble.heal()
            _, said = asked.communicate(timeout=CHECKPOINT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"job checkpoint does not end\n{self.ring.logs()}") from None
        finally:
            asked.kill()
            asked.wait()
        phase = self._decision(trouble)
        if hit:
            self.hits[case] += 1
            self.counts[f"{case[0]} in {case[1]}: {phase}"] += 1
        else:
            self.counts["phase missed"] += 1
        what = f"{case[0]} in {case[1]}, rank {trouble.victim}, {phase}, hit {hit}: {said}"
        must_abort = trouble.fault in {Fault.ABSENT, Fault.REFUSES}
        must_abort |= hit and case[0] in CANNOT_DUMP and case[1] in BEFORE_DUMP
        if must_abort:
            assert phase is Phase.ABORTED, what
        assert asked.returncode in {0, JobError.exit_code, StoreError.exit_code}, what
        assert "Traceback" not in said, what
        if asked.returncode == 0:
            assert phase is Phase.COMMITTED, what
        elif "was aborted" in said:
            assert phase is Phase.ABORTED, what
        if phase is Phase.COMMITTED:
            self._whole = trouble.number
        breaks = trouble.made and trouble.fault in BREAKS_RANKS
        self._require_one_end(trouble, phase, breaks, what)
        if phase is Phase.COMMITTED and not leave:
            self._require_ended(breaks, what)
            self.restore()
        elif breaks and not self._runs_on():
            self.counts["restored from the last whole checkpoint"] += 1
            self._require_unlocked(what)
            self.end()
            self.restore()
        else:
            self._require_running(what)

    def _decision(self, trouble: Trouble) -> Phase:
        """Of the epoch; all ranks have done what it says, or their keepers have ended."""
        ring, number = self.ring, trouble.number
        ring.wait(lambda: self.watcher.is_final(number))

        def all_done() -> bool:
            settled = self.watcher.standing(number).settled
            return all(
                rank in settled
                or ring.status(rank) is not None
                or not self.watcher.has_joined(number, rank)
                for rank in range(WORLD)
            )

        ring.wait(all_done)
        phase = self.watcher.phase(number)
        assert phase is not None
        return phase

    def _require_one_end(self, trouble: Trouble, phase: Phase, breaks: bool, what: str) -> None:
        """No rank has done anything but what was decided."""
        other = {Phase.COMMITTED: Phase.ABORTED, Phase.ABORTED: Phase.COMMITTED}[phase]
        standing = self.watcher.standing(trouble.number)
        for rank in range(WORLD):
            said = self.ring.log_whole(rank)
            assert f"epoch {trouble.number}: {other}" not in said, f"{what}: rank {rank} differs"
            problem = standing.problems.get(rank, "")
            if not breaks:
                assert not problem, f"{what}: rank {rank}: {problem}"
        if phase is Phase.COMMITTED:
            assert standing.is_whole, what

    def _require_ended(self, breaks: bool, what: str) -> None:
        statuses = self.ring.ends()
        allowed = {0, 1, JobError.exit_code, 137} if breaks else {0}
        assert set(statuses) <= allowed, f"{what}: keepers ended with {statuses}"
        assert self.ring.pids() == [], f"{what}: ranks run on"
        assert self.ring.locked() == [], f"{what}: {self.ring.locked()}"

    def _require_running(self, what: str) -> None:
        ring = self.ring
        try:
            self._wait_for_progress()
        except AssertionError as exc:
            raise AssertionError(f"{what}: not all run on\n{exc}") from None
        self._require_unlocked(what)
        statuses = [ring.status(rank) for rank in range(WORLD)]
        assert statuses == [None] * WORLD, f"{what}: keepers have ended: {statuses}\n{ring.logs()}"

    def _require_unlocked(self, what: str) -> None:
        """Nothing of ours holds a rank, and neither does the driver."""
        ring = self.ring
        driver = driver_of(ring.environ)

        def is_free() -> bool:
            if ring.locked() or held(ring) or any(map(_tracer, ring.pids())):
                return False
            return not not_running(driver, ring.pids())

        try:
            ring.wait(is_free, END_S)
        except AssertionError as exc:
            left = f"tables {ring.locked()}, held {held(ring)}, traced "
            left += str([pid for pid in ring.pids() if _tracer(pid)])
            left += f", driver {not_running(driver, ring.pids())}"
            raise AssertionError(f"{what}: left: {left}\n{exc}") from None
        ring.check()

    def _lines(self) -> list[int]:
        return [self.ring.output(rank).count("step ") for rank in range(WORLD)]

    def _has_progress(self, timeout_s: float) -> None:
        """Each says something. Not by its steps: a restored one says some of them again."""
        before = self._lines()
        self.ring.wait(
            lambda: all(now > was + 1 for now, was in zip(self._lines(), before, strict=True)),
            timeout_s,
        )

    def _wait_for_progress(self) -> None:
        self._has_progress(60)
        self.ring.check()

    def _runs_on(self) -> bool:
        ring = self.ring
        try:
            self._has_progress(RUNS_ON_S)
        except AssertionError:
            return False
        return all(ring.status(rank) is None for rank in range(WORLD))

    def restore(self) -> None:
        """The newest whole checkpoint, by new keepers: it must be there, and right."""
        ring = self.ring
        self._reap()
        ring.start_restoring()
        back = ring.job("restore", "--json")
        assert back.returncode == 0, f"job restore: {back.stderr}{ring.logs()}"
        restored = check_document(back.stdout, "job restore")["restores"]
        assert restored == self._whole, f"of epoch {restored}, and {self._whole} is the newest"
        assert ring.pids() == self._pids
        self._require_running("restored")

    def end(self) -> None:
        """Kill all of it."""
        end_all(self.ring)
        self._reap()

    def _reap(self) -> None:
        """Programs whose keepers were killed are this process's children, and their pids wanted."""
        deadline = time.monotonic() + END_S
        for pid in self._pids:
            with suppress(ChildProcessError):
                while os.waitpid(pid, os.WNOHANG)[0] == 0:
                    assert time.monotonic() < deadline, f"{pid} does not end"
                    time.sleep(0.01)

    def last(self) -> None:
        """All is killed; what was committed last comes back."""
        self.end()
        self.restore()
        self.counts["last whole checkpoint restored"] += 1


def _tracer(pid: int) -> int:
    with suppress(CheckpointError):  # it has ended
        return read_task(pid).tracer
    return 0


def run(place: Place, random: Random, cases: Sequence[Case], tries: int = 2) -> Tally:
    """Until each case was hit as often as it is there; with at most `tries` trials for each."""
    wanted = list(cases)
    random.shuffle(wanted)
    left = tries * len(wanted)
    tally = Tally()
    while wanted and left > 0:
        part, wanted = wanted[:FRESH_AFTER], wanted[FRESH_AFTER:]
        begun = left
        try:
            with troubled(place) as job:
                try:
                    while part and left > 0:
                        left -= 1
                        tally.counts["trials"] += 1
                        case = part.pop()
                        before = job.hits[case]
                        job.trial(case, random)
                        if job.hits[case] == before:
                            part.insert(0, case)
                    job.last()
                finally:
                    tally.counts.update(job.counts)
        except AssertionError as exc:
            tally.failures.append(str(exc)[:1500] + " ... " + str(exc)[-6000:])
        wanted += part
        if left == begun:  # the job could not be started: nor could the next one
            tally.counts["trials"] += 1
            break
    if wanted:
        missed = ", ".join(f"{fault} in {moment}" for fault, moment in sorted(set(wanted)))
        tally.failures.append(f"too few hits in {tries} tries for each: {missed}")
    return tally
