# SPDX-License-Identifier: Apache-2.0
"""A store in daily use: a changing job is dumped on top of earlier checkpoints, some are flattened,
old ones are pruned, also while a dump is under way, and from time to time the job dies and is
restored. Every checkpoint that is kept is whole at every moment, and the job is exact.
"""

from __future__ import annotations

import shutil
import signal
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from campaigns import kill_points
from campaigns.rig import Rig
from campaigns.steady_job import SteadyJob
from campaigns.tally import Tally
from gpustasis._core import ImageReader
from gpustasis.image.flatten import flatten
from gpustasis.image.prune import Action, Rules, prune
from support.chains import is_whole

_FULL_EVERY = 6  # dumps, about
_KILLS = 12  # of one job: later the parent has too little in common with it
_SMALL_CHUNK = 4096  # bytes; more of them stay the same
_DUMP_S = 0.4  # a prune begins within this time after a dump


@dataclass(slots=True)
class _Store:
    rig: Rig
    random: Random
    tally: Tally
    place: Path
    count: int = 0
    names: list[str] = field(default_factory=list)

    def whole(self) -> list[Path]:
        """What a dump has finished, oldest first."""
        there = [self.place / name for name in self.names]
        return [path for path in there if (path / "inventory.img").exists()]

    def new(self, kind: str) -> Path:
        self.count += 1
        path = self.place / f"{self.count:04}-{kind}"
        self.names.append(path.name)
        return path


def run(rig: Rig, random: Random, rounds: int) -> Tally:
    tally = Tally()
    place = rig.scratch / "store"
    place.mkdir()
    store = _Store(rig, random, tally, place)
    with rig.job(mib=8, children=1) as job:
        for number in range(rounds):
            tally.counts["trials"] += 1
            try:
                _round(store, job)
                broken = [path.name for path in store.whole() if not is_whole(path)]
                assert not broken, f"no longer whole: {broken}"
            except AssertionError as failure:
                tally.failures.append(f"round {number}: {failure}")
                break
    shutil.rmtree(place)
    assert tally.failures or tally.counts["images with references"], "nothing was referred to"
    return tally


def run_kills(
    rig: Rig, random: Random, count: int, *, whole_bound: bool = True
) -> tuple[Tally, Tally]:
    """kill_points during dumps on top of a parent: with the worker's help, and without it.

    whole_bound: as there.
    """
    with_parent = _rig_with_parent(rig, random)
    by_worker, by_hand = Tally(), Tally()
    for _ in range(0, count, _KILLS):
        for tally, with_worker in ((by_worker, False), (by_hand, True)):
            found = kill_points.run(
                with_parent, random, _KILLS, with_worker=with_worker, whole_bound=whole_bound
            )
            _add(tally, found)
    for path in rig.scratch.glob("*-images/gpustasis-[0-9]*.img"):
        by_worker.counts["images with references"] += ImageReader.open(path).totals.ref.chunks > 0
    assert by_worker.counts["images with references"] > 0, "nothing was referred to"
    return by_worker, by_hand


def _rig_with_parent(rig: Rig, random: Random) -> Rig:
    """Every dump of this rig is made on top of one: of a job that began as the others will."""
    job = kill_points.start_job(rig, True, random)
    try:
        parent = rig.images()
        chunks: dict[str, bool | int | str] = {"chunk_size": _SMALL_CHUNK}
        dumped = rig.dump(job, parent, "--leave-running", config=chunks)
        assert dumped.status == 0, dumped.errors
        rig.settle(parent)
    finally:
        job.end()
    environ = rig.environment(chunks | {"parent": str(parent)})
    return replace(rig, environ=environ)


def _add(total: Tally, part: Tally) -> None:
    total.counts += part.counts
    total.failures += part.failures


def _round(store: _Store, job: SteadyJob) -> None:
    kind = store.random.choice(["dump", "dump", "dump", "restore", "flatten", "prune"])
    if not store.whole() or kind == "dump":
        _dump(store, job)
    elif kind == "restore":
        _die_and_return(store, job)
    elif kind == "flatten":
        # The newest checkpoint of the store must stay the newest: its copy has the same time.
        flatten(store.random.choice(store.whole()), store.new("flat"))
        store.tally.counts["flattened"] += 1
    else:
        _prune(store)


def _parent(store: _Store) -> Path | None:
    whole = store.whole()
    if not whole or store.random.randrange(_FULL_EVERY) == 0:
        return None
    return store.random.choice(whole[-5:])


def _dump(store: _Store, job: SteadyJob) -> None:
    """In half of the cases a prune comes between."""
    parent = _parent(store)
    images = store.new("dump")
    images.mkdir(mode=0o700)
    words = store.rig.dump_words(job, images, ["--leave-running"])
    log = images.with_name(f"{images.name}.dump.log")
    criu = store.rig.start(words, _config(parent))
    if store.random.random() < 0.5:
        time.sleep(store.random.uniform(0, _DUMP_S))
        _prune(store)
    status = criu.wait(60)
    store.rig.settle(images)
    text = log.read_text(errors="replace")
    log.unlink()
    job.run_on()
    if status == 0:
        store.tally.counts["dumped on a parent" if parent else "dumped in full"] += 1
        _count_references(store, images)
        return
    reasons = [line for line in text.splitlines() if "Error (gpustasis): cuda_plugin: " in line]
    assert parent is not None and not parent.exists(), f"a dump failed: {reasons}"
    assert any(parent.name in line for line in reasons), f"the parent is not named: {reasons}"
    assert not (images / "inventory.img").exists(), "a dump without its parent looks complete"
    store.tally.counts["refused: the parent was pruned"] += 1
    shutil.rmtree(images)
    store.names.remove(images.name)


def _config(parent: Path | None) -> dict[str, bool | int | str]:
    chunks: dict[str, bool | int | str] = {"chunk_size": _SMALL_CHUNK}
    return chunks if parent is None else chunks | {"parent": str(parent)}


def _count_references(store: _Store, images: Path) -> None:
    for path in images.glob("gpustasis-[0-9]*.img"):
        references = ImageReader.open(path).totals.ref.chunks
        store.tally.counts["images with references"] += references > 0


def _die_and_return(store: _Store, job: SteadyJob) -> None:
    parent = _parent(store)
    images = store.new("last")
    images.mkdir(mode=0o700)
    dumped = store.rig.dump(job, images, config=_config(parent))
    assert dumped.status == 0, dumped.errors
    assert job.wait() == -signal.SIGKILL
    store.rig.settle(images)
    place = images
    if store.random.random() < 0.3:
        place = store.new("flat")
        flatten(images, place)
    restored = store.rig.restore(place)
    assert restored.status == 0, restored.errors
    for path in store.place.glob("*.*"):  # logs
        path.unlink()
    job.run_on()
    store.tally.counts["restored"] += 1


def _prune(store: _Store) -> None:
    done = prune(store.place, Rules(last=store.random.randint(1, 3)))
    gone = [v.entry.name for v in done.verdicts if v.action is Action.REMOVED]
    store.tally.counts["pruned"] += len(gone)
    store.names = [name for name in store.names if name not in gone]
