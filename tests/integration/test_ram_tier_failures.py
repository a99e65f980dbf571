# SPDX-License-Identifier: Apache-2.0
"""tier = "ram": who dies, what is full, and who comes at the same time."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from campaigns.ram_dump import is_finished
from campaigns.rig import Rig, with_config, with_driver, workers
from gpustasis._core import ARENA_MARKER, find_checkpoint_record, find_drop_record
from gpustasis.criu.images import INVENTORY_NAME
from gpustasis.draining import drain as draining
from gpustasis.draining.drain import drain
from gpustasis.draining.recycle import look_into, recycle
from gpustasis.errors import CheckpointError, ImageError, LocalError
from gpustasis.image.arena import Tier, stored_directory, tier_of
from gpustasis.image.directory import try_exclude
from gpustasis.image.verification import verify_directory
from support.arena import dump, ram, restore
from support.broken_dumps import dump_and_stop, recover
from support.cpu_memory import running
from support.direct_memory import DRIVER

KILLS = 12
MIDWAY = 4  # of these, at least, while an image is being written
COMMAND = (sys.executable, "-m", "gpustasis")


@contextmanager
def drain_at_work(rig: Rig, images: Path, rate: str) -> Iterator[subprocess.Popen[bytes]]:
    """A drain that has begun to write an image. The block ends it."""
    words = [*COMMAND, "drain", str(images), "--rate-limit", rate]
    with subprocess.Popen(words, env=dict(rig.environ)) as at_work:
        try:
            deadline = time.monotonic() + 20
            while not parts(images):
                assert at_work.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.005)
            yield at_work
        finally:
            at_work.kill()  # nothing, if it has ended


@contextmanager
def stopped_drain(rig: Rig, images: Path) -> Iterator[None]:
    """A drain that stands still in the middle of an image, and comes to its end after the block."""
    with drain_at_work(rig, images, "1M") as at_work:
        at_work.send_signal(signal.SIGSTOP)
        assert parts(images)
        yield
        assert parts(images)
        at_work.send_signal(signal.SIGCONT)
        assert at_work.wait(timeout=60) == 0


def settle(rig: Rig, stored: Path) -> None:
    """Until nobody has to do with it: who ends has its lock for some moments longer."""
    rig.settle(stored)
    deadline = time.monotonic() + 20
    while (lock := try_exclude(stored)) is None:
        assert time.monotonic() < deadline, f"{stored} stays locked"
        time.sleep(0.01)
    lock.close()


def parts(images: Path) -> list[Path]:
    """What a drain has begun to write."""
    return list(images.glob(".gpustasis-*.part"))


def test_a_drain_that_is_killed_leaves_it_local_or_durable(newest_rig: Rig, arena: Path) -> None:
    rig = newest_rig
    moments = random.Random(7)
    states = set()
    midway = 0
    with rig.job(mib=32, children=1) as job:
        for _ in range(KILLS):
            images = dump(rig, job, "--leave-running", **ram(arena))
            with drain_at_work(rig, images, "4M") as killed:
                time.sleep(moments.uniform(0, 4))  # it takes some more than four seconds
                killed.kill()
            midway += bool(parts(images))
            states.add(tier_of(images))
            assert not verify_directory(images).problems
            drain(images)
            assert tier_of(images) == Tier.DURABLE
            assert not (images / ARENA_MARKER).exists()
            assert not verify_directory(images).problems
            assert look_into(arena).kept == []
        job.run_on()
        job.end()
        rig.settle(images)
        done = rig.restore(images)
        assert done.status == 0, done.errors
        job.run_on()
    assert Tier.LOCAL in states
    assert midway >= MIDWAY


def test_it_is_restored_while_it_is_drained(newest_rig: Rig, arena: Path) -> None:
    rig = newest_rig
    with rig.job(mib=32) as job:
        images = dump(rig, job, **ram(arena))
        job.wait()
        with stopped_drain(rig, images):
            restore(rig, job, images)
        assert tier_of(images) == Tier.DURABLE
        assert not verify_directory(images).problems


def test_two_drains_and_a_dump_into_the_same_place(
    newest_rig: Rig, arena: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = newest_rig
    monkeypatch.setattr(draining, "PATIENCE_S", 0.2)
    with rig.job(mib=32) as job:
        images = dump(rig, job, "--leave-running", **ram(arena))
        with stopped_drain(rig, images):
            with pytest.raises(CheckpointError, match="a drain or a seal is at work"):
                drain(images)
            done = rig.dump(job, images, "--leave-running")
            assert done.status != 0
            assert "another dump, or a drain, is at work in that directory" in done.log
            job.run_on()
        assert drain(images).images == 0  # it is durable
        assert not verify_directory(images).problems


def test_a_disk_that_is_full(newest_rig: Rig, arena: Path) -> None:
    rig = newest_rig
    disk = rig.images()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", disk], check=True)
    try:
        with rig.job(mib=16) as job:
            images = disk / "checkpoint"
            images.mkdir(mode=0o700)
            done = rig.dump(job, images, "--leave-running", config=ram(arena))
            assert done.status == 0, done.errors
            with (disk / "filler").open("wb", buffering=0) as filler:
                while filler.write(bytes(1 << 14)) == 1 << 14:
                    if os.statvfs(disk).f_bavail < 8:
                        break
            with pytest.raises(LocalError, match="No space left on device"):
                drain(images)
            assert tier_of(images) == Tier.LOCAL
            assert not verify_directory(images).problems
            (disk / "filler").unlink()
            drain(images)
            assert not verify_directory(images).problems
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def await_waiting(criu: subprocess.Popen[bytes], images: Path) -> None:
    """Until its dump into `images` waits for room."""
    log = images.with_name(f"{images.name}.dump.log")
    deadline = time.monotonic() + 20
    while "waiting for a drain: " not in (log.read_text() if log.exists() else ""):
        assert criu.poll() is None, log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_dump_waits_until_a_drain_has_made_room(newest_rig: Rig, arena: Path) -> None:
    rig = newest_rig
    with rig.job(mib=32) as job:
        config = ram(arena, arena_limit=48 << 20, when_full="wait", when_full_timeout_s=200)
        first = dump(rig, job, "--leave-running", **config)
        second = rig.images()
        criu = rig.start(rig.dump_words(job, second, ["--leave-running"]), config)
        await_waiting(criu, second)
        job.run_on()  # nothing of it is locked
        drain(first)
        assert criu.wait(timeout=200) == 0
        assert tier_of(second) == Tier.LOCAL
        assert not verify_directory(second).problems
        job.run_on()


def test_a_parent_that_is_drained_while_its_child_waits_for_room_is_not_removed(
    newest_rig: Rig, arena: Path, memory_job: Path
) -> None:
    """A tree without CUDA has no marker before it has room: no store says that it needs one."""
    rig = newest_rig
    with running(rig, memory_job, mib=64) as job:
        config = ram(arena, cpu_memory="ours", when_full="wait", when_full_timeout_s=200)
        first = dump(rig, job, "--leave-running", **config)
        job.run_on()
        other = dump(rig, job, "--leave-running", **config)
        job.run_on()
        kept = sum(one.size for one in look_into(arena).kept)
        config |= {"parent": str(first), "arena_limit": kept + (24 << 20)}
        second = rig.images()
        criu = rig.start(rig.dump_words(job, second, ["--leave-running"]), config)
        await_waiting(criu, second)
        assert not (second / ARENA_MARKER).exists()
        drain(first)
        assert try_exclude(first) is None  # as of a prune
        drain(other)
        assert criu.wait(timeout=200) == 0
        job.run_on()
    drain(second)
    assert not verify_directory(second).problems


@pytest.mark.parametrize("gpu_memory", ["staged", "direct"])
@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "all killed"])
def test_criu_is_killed_when_memory_is_out_of_the_job(
    newest_rig: Rig, arena: Path, guarded: bool, gpu_memory: str
) -> None:
    """What is missing is put back out of the arena, which nobody clears before."""
    find_record = find_checkpoint_record if gpu_memory == "direct" else find_drop_record
    with (
        with_driver(newest_rig, DRIVER) as on_disk,
        on_disk.job(mib=16, children=1) as job,
    ):
        rig = with_config(on_disk, ram(arena, gpu_memory=gpu_memory))
        images = rig.images()
        kill_criu = dump_and_stop(rig, job, images)
        stored = stored_directory(images)
        for pid in workers(stored) if not guarded else []:
            os.kill(pid, signal.SIGKILL)
        kill_criu()
        if not guarded:
            settle(rig, stored)  # else their lock keeps it
            assert all(find_record(pid) for pid in job.pids)
            assert bool(find_drop_record(job.pid)) == (gpu_memory == "staged")
            (images / INVENTORY_NAME).unlink()  # as if criu had not come to its end
            assert recycle(arena) == []
            for pid in job.pids:
                recover(rig, pid, "-D", images)
        rig.settle(stored)
        assert not any(find_record(pid) for pid in job.pids)
        job.run_on()
        if guarded:
            drain(images)  # criu had written all
            assert not verify_directory(images).problems
        else:
            with pytest.raises(ImageError, match="was broken off"):
                drain(images)
            assert recycle(arena) == [stored]
        assert not (images / ARENA_MARKER).exists()
        assert look_into(arena).kept == []
        images = dump(on_disk, job)
        assert job.wait() == -signal.SIGKILL
        restore(rig, job, images)


@pytest.mark.parametrize(
    ("after", "numbers"),
    [("locked pid", range(1, 400, 23)), ("Writing image inventory", (*range(1, 601, 40), 0))],
    ids=["in the middle", "near the end"],
)
def test_criu_is_killed_at_many_points(
    newest_rig: Rig, arena: Path, after: str, numbers: Iterable[int]
) -> None:
    """The job runs on, and what the arena has of the dump is a whole checkpoint, or found to be
    nobody's. numbers: of criu's calls; 0: it is not killed."""
    rig = with_config(newest_rig, ram(arena))
    count = rig.scratch / "system-calls"
    killed = 0
    whole = set()  # whether the dump was complete, and whether criu was killed all the same
    with rig.job(mib=8) as job:
        for number in numbers:
            images = rig.images()
            killer = [str(rig.programs.killer), str(count), str(number), "-", after]
            words = [*killer, *rig.dump_words(job, images, ["--leave-running"])]
            ended = rig.run(words, images, "dump")
            assert ended.status in (0, 137), ended.errors
            killed += ended.status == 137
            for kept in look_into(arena).kept:
                settle(rig, kept.directory)
            rig.settle(images)
            job.run_on(1)
            is_whole = is_finished(images)
            whole.add((is_whole, ended.status == 137))
            recycle(arena)
            if is_whole:
                assert tier_of(images) == Tier.LOCAL
                drain(images)
                assert not verify_directory(images).problems
            else:
                assert look_into(arena).kept == []
                assert not (images / ARENA_MARKER).exists()
        images = dump(rig, job)
        job.wait()
        restore(rig, job, images)
    assert killed > 5
    assert (False, False) not in whole
    if after != "locked pid":
        assert whole == {(False, True), (True, True), (True, False)}
