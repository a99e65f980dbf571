# SPDX-License-Identifier: Apache-2.0
"""Dumps with tier = "ram" on a driver that copies slowly: where they go, what phase one is in, and
what has to be true of what they leave in the arena."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from campaigns.kill_points import phase_in, phase_in_log, phases_of
from campaigns.rig import GPU_MEMORY, SETTLE_S, Rig, with_config, workers
from campaigns.steady_job import SteadyJob
from gpustasis._core import ARENA_MARKER, ARENA_OWNER, read_manifest
from gpustasis.criu.images import INVENTORY_NAME
from gpustasis.draining.drain import finished_manifest
from gpustasis.draining.recycle import POOL, RESERVED, is_name, recycle, size_of
from gpustasis.draining.room import contents_of
from gpustasis.emulator import Emulator, Options, Rates, api_version_of
from gpustasis.errors import CheckpointError
from gpustasis.image.arena import Tier, stored_directory, tier_of
from gpustasis.image.directory import is_there
from gpustasis.image.peer_record import PEER_RECORD
from gpustasis.image.verification import verify_directory
from gpustasis.recovery import GUARDIAN_COMM, WORKER_COMM
from support.arena import dump, ram, restore
from support.job import reap_workers
from support.openers import find_openers

DRIVER = "580.95.05"
SLOW: Rates = (0.4, 0.4)  # GB/s of a GPU each way: 16 MiB take 40 ms
DELAY_MS = 15  # of each lock and unlock: phases that are too short to be hit else
_SCRIPT = (
    "slow.sh"  # run by criu when its inventory is written, and the job is not yet brought back
)
# Two processes with GPU memory, and kernels and copies under way on streams whenever they are
# stopped.
SHAPE = {"mib": 16, "children": 1, "pinned_kib": 64, "registered_kib": 64, "streams": 2}
MOST = 40 << 20  # bytes that a dump of it takes in the arena, if nothing of it is zero
STORING = "storing"  # some image is being written into the arena
END = "end"
_CHECKPOINT = "checkpoint"
_OF_LOG = phases_of(None)
_AT = _OF_LOG.index(_CHECKPOINT) + 1
PHASES = (*_OF_LOG[:_AT], STORING, *_OF_LOG[_AT:])
WITH_WORKER = PHASES[1:]  # those in which there is one
_OLDER_MIB = 4
_PAGE = 4096  # bytes
# What a trial fails with: something is not as it must be, or the product itself says so.
FAILED = (AssertionError, CheckpointError)


@contextmanager
def slow_ram(rig: Rig, rates: Rates = SLOW) -> Iterator[tuple[Rig, Path]]:
    """The same on an emulator of its own, with tier = "ram" in every dump; and the arena, on a
    tmpfs."""
    api = api_version_of(DRIVER)
    place = rig.images()
    above = Path(tempfile.mkdtemp(prefix="gpustasis-kills-", dir="/dev/shm"))
    emulator = Emulator(path=place / "emulator" / "socket")
    emulator.start(Options(gpus=2, memory_bytes=GPU_MEMORY, driver=DRIVER, rates=rates))
    try:
        for operation in ("lock", "unlock"):
            emulator.add_fault(operation, "delay", count=0, delay_ms=DELAY_MS)
        environ = dict(rig.environ) | emulator.environment(api)
        slow = replace(rig, emulator=emulator, environ=environ, scratch=place)
        arena = above / "arena"
        script = place / _SCRIPT
        script.write_text(
            f'#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" != post-dump ] || sleep {DELAY_MS / 1000}\n'
        )
        script.chmod(0o755)
        yield with_config(slow, ram(arena)), arena
    finally:
        emulator.stop()
        shutil.rmtree(above)


def start_job(rig: Rig) -> SteadyJob:
    """One whose dumps have every phase."""
    name = rig.images().with_suffix(".job")
    return SteadyJob(rig.programs.job, name, rig.environ, module=rig.programs.kernels, **SHAPE)


def start(rig: Rig, job: SteadyJob, images: Path) -> subprocess.Popen[bytes]:
    """A dump that leaves the job running, and has every phase."""
    extra = ["--leave-running", "--action-script", str(rig.scratch / _SCRIPT)]
    return rig.start(rig.dump_words(job, images, extra))


def workers_of(images: Path, arena: Path) -> list[int]:
    """Live workers and guardians of the plugin that have to do with `images`, or with any
    checkpoint in the arena."""
    return sorted({*workers(images), *find_openers(f"{arena}/", WORKER_COMM, GUARDIAN_COMM)})


def settle(images: Path, arena: Path) -> None:
    """Wait until none of them is left. Fails if one stays."""
    deadline = time.monotonic() + SETTLE_S
    while left := workers_of(images, arena):
        assert time.monotonic() < deadline, f"worker {left} is left behind"
        time.sleep(0.01)
    reap_workers()


class Watch:
    """One dump that is about to begin, looked at again and again: no other goes into the arena."""

    def __init__(self, images: Path, arena: Path) -> None:
        self._images, self._arena = images, arena
        self._known = set(self._names())
        self._stored: Path | None = None
        self._log: Path | None = None

    def follow(self, log: Path) -> None:
        """Its log, where the image directory was not known before."""
        self._log = log

    def phase(self) -> str:
        if self._log is None:
            phase = phase_in_log(self._images, _OF_LOG)
        else:
            phase = phase_in(self._log.read_text() if self._log.exists() else "", _OF_LOG)
        return STORING if phase == _CHECKPOINT and self._is_writing() else phase

    def _is_writing(self) -> bool:
        if self._stored is None:
            new = [name for name in self._names() if name not in self._known]
            if not new:
                return False
            self._stored = self._arena / new[0]
        with suppress(FileNotFoundError):
            return any(name.endswith(".part") for name in os.listdir(self._stored))
        return False

    def _names(self) -> list[str]:
        with suppress(FileNotFoundError):
            return [name for name in os.listdir(self._arena) if is_name(name)]
        return []


def fingerprint(directory: Path) -> dict[str, tuple[int, str]]:
    """Of each file but the record of a copy, whole or not: when it was changed, and its digest."""
    return {
        path.name: (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in directory.iterdir()
        if path.is_file() and path.name not in (PEER_RECORD, f".{PEER_RECORD}.part")
    }


@dataclass(frozen=True, slots=True)
class Older:
    """A local checkpoint in the arena that nothing may touch, of a job that has ended."""

    job: SteadyJob
    images: Path
    stored: Path
    files: tuple[dict[str, tuple[int, str]], dict[str, tuple[int, str]]]

    def require_untouched(self) -> None:
        found = fingerprint(self.images), fingerprint(self.stored)
        changed = [
            set(now.items()) ^ set(was.items()) for now, was in zip(found, self.files, strict=True)
        ]
        assert changed == [set(), set()], f"the older local checkpoint was changed: {changed}"
        assert tier_of(self.images) == Tier.LOCAL, "the older local checkpoint is not local"
        problems = verify_directory(self.images).problems
        assert not problems, f"the older local checkpoint: {problems[0]}"

    def require_exact(self, rig: Rig) -> None:
        """Restored, it runs on; then it is ended."""
        try:
            restore(rig, self.job, self.images)
        finally:
            self.job.end()


def make_older(rig: Rig, arena: Path, mib: int = _OLDER_MIB) -> Older:
    name = rig.images().with_suffix(".job")
    job = SteadyJob(rig.programs.job, name, rig.environ, mib=mib)
    try:
        images = dump(rig, job)
        job.wait()
        settle(images, arena)
    except BaseException:
        job.end()
        raise
    stored = stored_directory(images)
    return Older(job, images, stored, (fingerprint(images), fingerprint(stored)))


def is_finished(images: Path) -> bool:
    """criu has come to its end, as what it has written says: there is a checkpoint, of which all
    files are there. Looked at here, and not with what the product decides by."""
    try:
        stored = stored_directory(images)
        manifest = read_manifest(stored)
        inventory = (images / INVENTORY_NAME).read_bytes()
    except (CheckpointError, OSError, ValueError):
        return False
    if f"checkpoint-{manifest.checkpoint_id.hex()}".encode() not in inventory:
        return False
    names = [task.image_name for task in manifest.tasks if task.externalized]
    return all((stored / name).exists() for name in names)


def is_whole(images: Path) -> bool:
    """Whether there is a local checkpoint, of which every byte is right. Fails if there is a part
    of one. What is in the arena was recycled before."""
    if not is_there(images / ARENA_MARKER):
        left = [path.name for path in images.glob("gpustasis-*.img")]
        assert not left, f"a dump that is none has left {left}"
        return False
    stored = stored_directory(images)
    finished_manifest(images, stored)
    assert tier_of(images) == Tier.LOCAL
    problems = verify_directory(images).problems
    assert not problems, f"a dump that is whole: {problems[0]}"
    return True


def require_only(arena: Path, needed: list[Path]) -> None:
    """After `gpustasis arena clean`: of what was in the arena there are only the directories
    `needed`, and a pool of no more than one dump takes."""
    recycle(arena)
    for name in os.listdir(arena):
        _require_empty_if_unowned(arena / name)
    recycle(arena)
    found = {one.directory: one for one in contents_of(arena).kept}
    assert set(found) == set(needed), f"in the arena are {sorted(map(str, found))}"
    assert {*os.listdir(arena)} <= {POOL, *(one.name for one in needed)}, os.listdir(arena)
    for stored in needed:
        assert not is_there(stored / RESERVED), f"{stored} has room reserved that nobody needs"
    pool = size_of(arena / POOL)
    assert pool <= MOST, f"the pool has {pool} bytes"


def _require_empty_if_unowned(directory: Path) -> None:
    """Who is killed in the first step, or in the last but one, leaves such a directory. It is
    removed when no dump can be making it any more: it is made old enough for that here."""
    if directory.name == POOL or is_there(directory / ARENA_OWNER):
        return
    with suppress(FileNotFoundError):  # an agent that runs has removed it meanwhile
        left = os.listdir(directory)
        assert size_of(directory) <= _PAGE, f"{directory} has no owner, and holds {left}"
        os.utime(directory, (0, 0))
