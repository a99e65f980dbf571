# SPDX-License-Identifier: Apache-2.0
"""Markers that a process has in its memory, its GPU's, its environment and its arguments are in no
file that a path leads to, while sealed dumps and restores run and after each that is killed.

tests/programs/marked_job.c has them. That the search finds them is shown first, in each run, by
dumps that are not sealed.
"""

from __future__ import annotations

import secrets
import shutil
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random

from campaigns import damage, kill_points, kill_restore
from campaigns.marker_scan import SHARED_PLACES, Scanner, Watch, running_criu
from campaigns.rig import Rig, end_strays, with_config
from campaigns.steady_job import SteadyJob
from campaigns.tally import Tally
from gpustasis.criu.plugin import Setting

_KINDS = {"memory": 1, "shared memory": 2, "pipe": 3, "unlinked file": 4, "GPU memory": 5}
_ROUNDS = 3  # whole dumps and restores that are watched
_CLEAR: tuple[Mapping[str, Setting], ...] = (
    {"cpu_memory": "criu"},
    {"cpu_memory": "ours", "layout": "packed"},
)


@dataclass(frozen=True, slots=True)
class Marked:
    """The two texts that a marked job is started with; the other markers are made of the first."""

    argument: str
    environment: str

    @classmethod
    def new(cls) -> Marked:
        return cls(secrets.token_hex(16), secrets.token_hex(16))

    def markers(self) -> dict[str, bytes]:
        text = self.argument.encode()
        derived = {
            place: bytes(text[at * 7 % 32] ^ (0x90 + kind) for at in range(32))
            for place, kind in _KINDS.items()
        }
        return {"arguments": text, "environment": self.environment.encode()} | derived

    def start(self, rig: Rig) -> SteadyJob:
        return SteadyJob(
            rig.programs.marked,
            rig.scratch / f"marked-{secrets.token_hex(4)}.log",
            self.environ(rig),
            argument=self.argument,
            plain_children=1,
        )

    def environ(self, rig: Rig) -> dict[str, str]:
        return dict(rig.environ) | {"MARKED": self.environment}


def run(
    rig: Rig, random: Random, sealed: Mapping[str, Setting], kills: int, *, whole: bool = False
) -> Tally:
    """`kills` dumps and half as many restores of a sealed job that are killed, and some that are
    not. sealed: the configuration of dumps and restores. whole: nothing else runs on this machine,
    whose file systems are all searched at the end."""
    tally = Tally()
    marked = Marked.new()
    scanner = Scanner(marked.markers(), time.time_ns(), alone=whole)
    _prove(rig, marked, scanner)
    sealing = with_config(replace(rig, scratch=rig.images()), sealed)
    places = [sealing.scratch, *SHARED_PLACES]

    def require_nothing(pids: tuple[int, ...] = ()) -> None:
        end_strays()
        found = scanner.below(places) | scanner.held_open({*pids, *running_criu()})
        assert not found, f"in the clear: {found}"

    with Watch(scanner, places) as watch:
        _rounds(sealing, marked, tally)
    _count(tally, "watched rounds", watch.found)
    assert watch.rounds > 0
    jobs: list[SteadyJob] = []

    def start() -> SteadyJob:
        jobs.append(marked.start(sealing))
        return jobs[-1]

    dumps = kill_points.run(
        sealing,
        random,
        kills,
        whole_bound=False,
        settings=sealed,
        start=start,
        after=lambda _: require_nothing(jobs[-1].pids),
    )
    _add(tally, dumps, "dump")
    checkpoint = damage.take(
        replace(sealing, programs=replace(sealing.programs, job=sealing.programs.marked)),
        marked.environ(sealing),
        argument=marked.argument,
        plain_children=1,
    )
    restores = kill_restore.run(sealing, random, max(1, kills // 2), checkpoint, require_nothing)
    _add(tally, restores, "restore")
    if whole:
        _count(tally, "searches of the whole machine", scanner.everywhere())
    tally.counts["files searched"] = scanner.files
    return tally


def _rounds(rig: Rig, marked: Marked, tally: Tally) -> None:
    """Dumps that leave the job running, one that ends it, and a restore of that."""
    job = marked.start(rig)
    try:
        for index in range(_ROUNDS):
            images = rig.images()
            dumped = rig.dump(job, images, *(["--leave-running"] if index else []))
            assert dumped.status == 0, dumped.errors
            if not index:
                assert job.wait() == -signal.SIGKILL
                rig.settle(images)
                restored = rig.restore(images)
                assert restored.status == 0, restored.errors
            job.run_on()
            rig.settle(images)
            tally.counts["dumps watched"] += 1
    finally:
        job.end()


def _prove(rig: Rig, marked: Marked, scanner: Scanner) -> None:
    """Each marker is found in dumps that are not sealed, in a file of each shared place, and in
    one that has no name."""
    for settings in _CLEAR:
        clear = replace(rig, scratch=rig.images())
        job = marked.start(clear)
        try:
            images = clear.images()
            dumped = clear.dump(job, images, "--leave-running", config=settings)
            assert dumped.status == 0, dumped.errors
            held = scanner.held_open()
            assert any("unlinked file" in places for places in held.values()), held
            job.run_on()
            clear.settle(images)
        finally:
            job.end()
        found = set().union(*scanner.below([images]).values())
        missing = scanner.markers.keys() - found
        assert not missing, f"the search does not find {missing} in a dump with {settings}"
        shutil.rmtree(clear.scratch)
    for place in SHARED_PLACES:
        file = place / f"gpustasis-marked-{secrets.token_hex(4)}"
        try:
            file.write_bytes(bytes(4095) + scanner.markers["memory"])
            assert str(file) in scanner.below([place]), f"the search does not look into {place}"
        finally:
            file.unlink()


def _count(tally: Tally, what: str, found: Mapping[str, set[str]]) -> None:
    tally.counts["trials"] += 1
    tally.counts[what] += 1
    if found:
        tally.failures.append(f"{what}: in the clear: {found}")


def _add(tally: Tally, other: Tally, what: str) -> None:
    tally.counts["trials"] += other.trials
    tally.counts[f"{what}s killed"] += other.trials
    for key, value in other.counts.items():
        if key != "trials":
            tally.counts[f"{what}: {key}"] += value
    tally.failures += [f"{what}: {failure}" for failure in other.failures]
