# SPDX-License-Identifier: Apache-2.0
"""What of a checkpoint that is only in memory a later dump may not take away, with real CRIU."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from campaigns.rig import Rig
from campaigns.steady_job import SteadyJob
from gpustasis._core import ARENA_MARKER, ImageReader, image_name
from gpustasis.criu.plugin import Setting
from gpustasis.draining.drain import drain
from gpustasis.draining.recycle import look_into, recycle
from gpustasis.image.arena import Tier, stored_directory, tier_of
from gpustasis.image.verification import verify_directory
from support.arena import dump, ram, restore, statistics
from support.arena_by_hand import locked
from support.cpu_memory import running
from support.signatures import make_signer

from .test_restore_worker import await_log


def files_of(images: Path) -> dict[str, bytes]:
    """Of the checkpoint; a dump that is refused writes an account and a log."""
    return {
        path.name: path.read_bytes()
        for path in images.iterdir()
        if path.is_file() and path.suffix not in (".json", ".log") and path.name != "stats-dump"
    }


def require_refused(
    rig: Rig, job: SteadyJob, images: Path, arena: Path, config: dict[str, Setting]
) -> None:
    before = files_of(images)
    done = rig.dump(job, images, "--leave-running", config=config)
    assert done.status != 0 and "only in memory" in done.errors, done.errors
    job.run_on()
    assert files_of(images) == before
    assert recycle(arena) == []
    assert tier_of(images) == Tier.LOCAL and not verify_directory(images).problems


@pytest.mark.parametrize("way", ["packed", "signed", "packed and signed"])
def test_no_other_way_to_store_takes_it_away(
    newest_rig: Rig, arena: Path, tmp_path: Path, way: str
) -> None:
    """What these remove of an earlier dump goes before anything of CUDA is looked at."""
    rig = newest_rig
    signer = make_signer(tmp_path)
    config: dict[str, Setting] = {"layout": "packed"} if "packed" in way else {}
    if "signed" in way:
        config |= {"sign": str(signer.key), "sign_certificate": str(signer.certificate)}
    with rig.job(mib=8) as job:
        images = dump(rig, job, "--leave-running", **ram(arena))
        require_refused(rig, job, images, arena, config)
        drain(images)
        job.run_on()
        last = dump(rig, job, **ram(arena))
        job.wait()
        restore(rig, job, last)


def test_nor_does_a_tree_without_cuda(newest_rig: Rig, arena: Path, memory_job: Path) -> None:
    rig = newest_rig
    with rig.job(mib=8) as job:
        images = dump(rig, job, "--leave-running", **ram(arena))
        with running(rig, memory_job, mib=8) as other:
            require_refused(rig, other, images, arena, {"cpu_memory": "criu"})
        job.run_on()


@pytest.mark.parametrize("tier", ["ram", "disk"])
def test_nor_what_one_in_memory_is_built_on(newest_rig: Rig, arena: Path, tier: str) -> None:
    """It is drained, and has no marker any more."""
    rig = newest_rig
    with rig.job(mib=8) as job:
        first = dump(rig, job, "--leave-running", **ram(arena))
        job.run_on()
        second = dump(rig, job, "--leave-running", **ram(arena, parent=str(first)))
        drain(first)
        before = files_of(first)
        config = {**ram(arena), "tier": tier}
        done = rig.dump(job, first, "--leave-running", config=config)
        words = f"the checkpoint in {second} is only in memory yet, and built on what {first} holds"
        assert done.status != 0 and words in done.errors, done.errors
        job.run_on()
        assert files_of(first) == before
        drain(second)
        assert not verify_directory(second).problems
        done = rig.dump(job, first, "--leave-running", config=config)
        assert done.status == 0, done.errors  # as ever: what is on the disk is its owner's to keep


def test_nor_what_one_in_memory_is_built_on_through_another(newest_rig: Rig, arena: Path) -> None:
    rig = newest_rig
    with rig.job(mib=8) as job:
        chain: list[Path] = []
        for _ in range(3):
            parent = {"parent": str(chain[-1])} if chain else {}
            chain.append(dump(rig, job, "--leave-running", **ram(arena, **parent)))
            job.run_on()
        first, second, third = chain
        drain(first)
        drain(second)
        done = rig.dump(job, first, "--leave-running", config=ram(arena))
        words = f"the checkpoint in {third} is only in memory yet, and built on what {first} holds"
        assert done.status != 0 and words in done.errors, done.errors
        job.run_on()
        drain(third)
        assert not verify_directory(third).problems


@pytest.mark.parametrize("first_tier", ["ram", "disk"])
def test_a_directory_that_was_emptied_takes_a_dump(
    newest_rig: Rig, arena: Path, first_tier: str
) -> None:
    """What one in memory is built on was there, and is gone: nothing can be replaced. So it is with
    a new directory that has the number of the old one."""
    rig = newest_rig
    with rig.job(mib=8) as job:
        first = dump(rig, job, "--leave-running", **(ram(arena) | {"tier": first_tier}))
        job.run_on()
        dump(rig, job, "--leave-running", **ram(arena, parent=str(first)))
        job.run_on()
        if first_tier == "ram":
            drain(first)
        for path in first.iterdir():
            path.unlink()
        for _ in range(2):  # then a dump is there, and no other needs that one
            done = rig.dump(job, first, "--leave-running", config=ram(arena) | {"tier": "disk"})
            assert done.status == 0, done.errors
            job.run_on()


def test_one_in_another_arena_is_no_parent(newest_rig: Rig, arena: Path) -> None:
    """What is built on it would not keep it there."""
    rig, other = newest_rig, arena.with_name("other")
    with rig.job(mib=8) as job:
        first = dump(rig, job, "--leave-running", **ram(arena))
        job.run_on()
        images = rig.images()
        config = ram(other, parent=str(first))
        done = rig.dump(job, images, "--leave-running", config=config)
        words = f"the parent {stored_directory(first)} is in another arena: drain it first"
        assert done.status != 0 and words in done.log, done.errors
        job.run_on()
        rig.settle(images)
        assert look_into(other).kept == []
        assert not (images / ARENA_MARKER).exists()
        drain(first)
        second = dump(rig, job, "--leave-running", **config)
        assert statistics(second)["parent"] is not None, statistics(second)["full_because"]
        job.run_on()


def test_what_cannot_be_told_is_not_taken_for_lost(newest_rig: Rig, arena: Path) -> None:
    rig = newest_rig
    with rig.job(mib=8) as job:
        images = dump(rig, job, "--leave-running", **ram(arena))
        stored = stored_directory(images)
        owner = stored / "owner"
        text = owner.read_text()
        owner.write_text(text.replace("gpustasis-arena-owner 1", "gpustasis-arena-owner 2"))
        done = rig.dump(job, images, "--leave-running")
        assert done.status != 0 and "cannot be told" in done.errors, done.errors
        assert "version 2 is not known" in done.errors
        job.run_on()
        owner.write_text(text)
        assert (images / ARENA_MARKER).exists()
        drain(images)
        assert not verify_directory(images).problems


def test_a_drain_does_not_go_back_to_a_damaged_parent(newest_rig: Rig, arena: Path) -> None:
    """What was stored anew, because the parent was found damaged, is in the drained image too."""
    rig = newest_rig
    with rig.job(mib=8) as job:
        first = dump(rig, job, "--leave-running")
        path = first / image_name(job.pid)
        image = ImageReader.open(path)
        raw = bytearray(path.read_bytes())
        held = [c for c in map(image.chunk, range(len(image))) if c.stored_size]
        for chunk in held:
            raw[chunk.offset + chunk.stored_size // 2] ^= 1
        path.write_bytes(raw)
        second = dump(rig, job, **ram(arena, parent=str(first), parent_check="data"))
        job.wait()
        assert not verify_directory(second).problems
        drain(second)
        assert not verify_directory(second).problems
        assert ImageReader.open(second / image_name(job.pid)).totals.ref.chunks == 0
        restore(rig, job, second)


def test_a_restore_in_the_foreground_does_not_hold_the_arena(newest_rig: Rig, arena: Path) -> None:
    """It stays as long as the job does, and needs nothing of the images any more."""
    rig = newest_rig
    with rig.job(mib=8) as job:
        images = dump(rig, job, **ram(arena))
        job.wait()
        stored = stored_directory(images)
        rig.settle(images)
        criu = rig.start(
            [word for word in rig.restore_words(images) if word != "--restore-detached"]
        )
        try:
            await_log(images, "Restore finished successfully")
            rig.settle(stored)  # its worker ends at about this time
            drain(images)
            assert not stored.exists()
            assert criu.poll() is None, "criu is not in the foreground"
        finally:
            criu.kill()
            criu.wait()
        job.run_on()


def test_who_builds_on_one_that_is_only_in_memory_keeps_who_gives_it_up_out(
    newest_rig: Rig, arena: Path
) -> None:
    """Who does so holds the arena's lock from the look for others to the end."""
    rig = newest_rig
    with rig.job(mib=8) as job:
        first = dump(rig, job, "--leave-running", **ram(arena))
        job.run_on()
        images = rig.images()
        with locked(arena, fcntl.LOCK_EX):
            config = ram(arena, parent=str(first))
            done = rig.dump(job, images, "--leave-running", config=config)
            assert done.status != 0 and f"the arena above {arena}" in done.errors, done.errors
        job.run_on()
        dump(rig, job, "--leave-running", **ram(arena, parent=str(first)))
        job.run_on()
