# SPDX-License-Identifier: Apache-2.0
"""A job that fails at a random step is restored by itself, and ends with the sums of an
uninterrupted run: four ranks with CRIU, emulated GPUs and TCP between network namespaces."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from statistics import median

from campaigns.job_faults import Place
from campaigns.tally import Tally
from gpustasis.jobs.lives import Recovery, Stage
from gpustasis.jobs.records import Keys
from gpustasis.jobs.steering import all_recoveries, find_life
from support.json_output import check_document
from support.ring import WORLD, Ring
from support.ring_faults import end_all
from support.ring_stores import RingStore

EACH_JOB = 3  # faults: so many happen before it has come to its end
NEW_KEEPER_S = 2.0  # what supervises keepers takes at most so long


class Fault(StrEnum):
    """RANK: its program. NODE: all that runs in its namespace, its keeper as well; then its keeper
    is started again. HANG: it sends nothing any more, so all wait."""

    RANK = "a rank killed"
    NODE = "a node killed"
    HANG = "a rank hangs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Of a job. recovered_s, end_s: it is waited for so long."""

    steps: int = 4000
    hang_after_s: int = 3
    recovered_s: float = 90.0
    end_s: float = 120.0


@dataclass(slots=True)
class Found:
    """seconds: from the fault until every rank had said something new."""

    counts: Counter[str] = field(default_factory=Counter)
    seconds: dict[Fault, list[float]] = field(default_factory=lambda: {one: [] for one in Fault})


def planned(each: int) -> list[Fault]:
    """Each fault so often."""
    return [fault for fault in Fault for _ in range(each)]


@contextmanager
def recovered(place: Place, faults: int, terms: Terms) -> Iterator[Recovered]:
    """A job that was just started."""
    with place.ring(terms.steps) as (ring, store):
        job = Recovered(ring, store, faults, terms)
        try:
            job.begin()
            yield job
        finally:
            job.close()


class Recovered:
    """A ring, and what happens to it."""

    def __init__(self, ring: Ring, store: RingStore, faults: int, terms: Terms) -> None:
        self.ring = ring
        self._terms = terms
        self._keys = Keys(ring.name)
        self._client = store.client()
        self._words = ["--restarts", str(faults), "--hang-after", str(terms.hang_after_s)]

    def begin(self) -> None:
        self.ring.start_all(*self._words)
        self.ring.wait(lambda: min(self.ring.steps_now()) > 0)

    def checkpoint(self) -> int:
        """Its epoch. The job runs on."""
        made = self.ring.job("checkpoint", "--world", str(WORLD), "--leave-running", "--json")
        assert made.returncode == 0, made.stderr + self.ring.logs()
        return int(check_document(made.stdout, "job checkpoint")["epoch"])

    def trial(self, fault: Fault, random: Random, newest: int) -> float:
        """newest: the epoch that was committed last. -> s until all ranks are seen to run again."""
        ring = self.ring
        before = all_recoveries(self._client, self._keys)
        time.sleep(random.uniform(0, 1))
        victim = random.randrange(WORLD)
        what = f"{fault}, rank {victim}, steps {ring.steps_now()}"
        begin = time.monotonic()
        self._strike(fault, victim, random)
        recovery = self._wait_for(len(before), what)
        lines = self._lines()
        ring.wait(lambda: all(n > w for n, w in zip(self._lines(), lines, strict=True)))
        seconds = time.monotonic() - begin
        ring.check()
        assert recovery.restored == newest, f"{what}: {recovery}, and {newest} was made last"
        hangs = "hangs" in recovery.reason
        assert hangs is (fault is Fault.HANG), f"{what}: {recovery}"
        assert ring.locked() == [], f"{what}: {ring.locked()}"
        return seconds

    def _strike(self, fault: Fault, victim: int, random: Random) -> None:
        ring = self.ring
        match fault:
            case Fault.RANK:
                os.kill(ring.program_of(victim), signal.SIGKILL)
            case Fault.HANG:
                os.kill(ring.program_of(victim), signal.SIGUSR1)
            case Fault.NODE:
                ring.kill_node(victim)
                time.sleep(random.uniform(0, NEW_KEEPER_S))
                ring.start(victim, *self._words, "--standby", command=False)

    def _wait_for(self, count: int, what: str) -> Recovery:
        deadline = time.monotonic() + self._terms.recovered_s
        while len(found := all_recoveries(self._client, self._keys)) == count:
            life = find_life(self._client, self._keys)
            assert not life.stage.is_final, f"{what}: {life}\n{self.ring.logs()}"
            assert time.monotonic() < deadline, f"{what}: {life}\n{self.ring.logs()}"
            time.sleep(0.02)
        assert len(found) == count + 1, f"{what}: restored more than once: {found}"
        return found[-1]

    def _lines(self) -> list[int]:
        return [self.ring.output(rank).count("step ") for rank in range(WORLD)]

    def end(self, faults: int) -> None:
        """It comes to its end, as an uninterrupted one."""
        ring = self.ring
        statuses = ring.ends(self._terms.end_s)
        assert statuses == [0] * WORLD, f"keepers ended with {statuses}\n{ring.logs()}"
        ring.check_end()
        life = find_life(self._client, self._keys)
        assert (life.stage, life.begun) == (Stage.DONE, faults), life
        assert ring.pids() == []
        assert ring.locked() == []

    def close(self) -> None:
        self._client.close()
        end_all(self.ring)


def run(place: Place, random: Random, faults: Sequence[Fault], terms: Terms = Terms()) -> Tally:
    """Each fault that was asked for, of jobs that have some of them each."""
    wanted = list(faults)
    random.shuffle(wanted)
    found = Found()
    tally = Tally()
    while wanted:
        part, wanted = wanted[:EACH_JOB], wanted[EACH_JOB:]
        tally.counts["trials"] += len(part)
        tally.counts.update(f"{fault}: tried" for fault in part)
        try:
            with recovered(place, len(part), terms) as job:
                for fault in part:
                    newest = job.checkpoint()
                    found.seconds[fault].append(job.trial(fault, random, newest))
                job.end(len(part))
                tally.counts["jobs that ended as an uninterrupted one"] += 1
        except AssertionError as exc:
            tally.failures.append(str(exc)[:1500] + " ... " + str(exc)[-6000:])
    for fault, seconds in found.seconds.items():
        if seconds:
            tally.counts[f"{fault}: recovered"] = len(seconds)
            tally.counts[f"{fault}: median, ms"] = round(1000 * median(seconds))
            tally.counts[f"{fault}: worst, ms"] = round(1000 * max(seconds))
    return tally
