# SPDX-License-Identifier: Apache-2.0
"""tier = "ram", with real CRIU: a dump into memory, a restore out of it, a drain to a disk."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from campaigns.rig import Rig, with_config
from gpustasis._core import ARENA_MARKER, PARENT_LINK, ImageReader, read_manifest
from gpustasis.criu.plugin import Setting
from gpustasis.draining.drain import drain
from gpustasis.draining.recycle import look_into
from gpustasis.draining.room import contents_of, create
from gpustasis.draining.waiting import wait_for
from gpustasis.errors import CheckpointError, ImageError
from gpustasis.image.arena import Tier, stored_directory, tier_of
from gpustasis.image.prune import Rules, prune
from gpustasis.image.verification import verify_directory
from support.arena import dump, ram, restore, statistics
from support.criu_roots import criu_place
from support.json_output import check_document


def test_a_job_runs_on_is_drained_and_comes_back(rig: Rig, arena: Path) -> None:
    with rig.job(mib=16, children=1) as job:
        dump(rig, job, "--leave-running", **ram(arena))
        job.run_on()
        images = dump(rig, job, **ram(arena))
        assert job.wait() == -signal.SIGKILL
        assert tier_of(images) == Tier.LOCAL
        stored = stored_directory(images)
        assert stored.parent == arena
        assert statistics(images)["arena_directory"] == str(stored)
        assert not list(images.glob("gpustasis-*.img"))
        assert ImageReader.open(next(stored.glob("gpustasis-[0-9]*.img"))).totals.lz4.chunks == 0
        assert not verify_directory(images).problems

        restore(rig, job, images)
        job.end()
        rig.settle(stored)  # what a worker that is about to end holds is not given back
        done = drain(images)
        assert done.images == 2
        assert done.image_bytes < done.memory_bytes
        assert tier_of(images) == Tier.DURABLE
        assert not (images / ARENA_MARKER).exists()
        assert not stored.exists()
        assert not verify_directory(images).problems
        restore(rig, job, images)


@pytest.mark.parametrize("tier", ["ram", "disk"])
def test_one_that_is_only_in_memory_is_not_dumped_over(
    newest_rig: Rig, arena: Path, tier: str
) -> None:
    """Not even by a dump that fails, as for want of room."""
    with newest_rig.job(mib=8) as job:
        images = dump(newest_rig, job, "--leave-running", **ram(arena))
        config = {**ram(arena), "tier": tier}
        done = newest_rig.dump(job, images, "--leave-running", config=config)
        assert done.status != 0 and "only in memory yet" in done.errors, done.errors
        job.run_on()
        assert tier_of(images) == Tier.LOCAL and not verify_directory(images).problems
        aside = arena.with_name("aside")
        arena.rename(aside)  # as where criu does not see it
        for _ in range(2):
            done = newest_rig.dump(job, images, "--leave-running", config=config)
            assert done.status != 0 and "cannot be told" in done.errors, done.errors
            job.run_on()
            arena.mkdir(mode=0o700, exist_ok=True)  # that which it was mounted on
        arena.rmdir()
        aside.rename(arena)
        assert tier_of(images) == Tier.LOCAL and not verify_directory(images).problems
        shutil.rmtree(stored_directory(images))  # it is lost: there is nothing to keep
        dump_again = newest_rig.dump(job, images, "--leave-running", config=config)
        assert dump_again.status == 0, dump_again.errors
        job.run_on()


def test_a_chain_of_local_checkpoints_is_drained_from_its_last(
    newest_rig: Rig, arena: Path
) -> None:
    rig = newest_rig
    small = ram(arena, chunk_size=4096)  # on a busy host the job gets around to all large ones
    with rig.job(mib=16, children=1) as job:
        chain = [dump(rig, job, "--leave-running", **small)]
        for _ in range(2):
            job.run_on()
            chain.append(dump(rig, job, "--leave-running", **small, parent=str(chain[-1])))
            link = stored_directory(chain[-1]) / PARENT_LINK
            assert link.readlink() == Path("..") / stored_directory(chain[-2]).name
            assert statistics(chain[-1])["tasks"][0]["ref"]["chunks"] > 0
        job.run_on()
        last = dump(rig, job, **small, parent=str(chain[-1]))
        job.wait()
        rig.settle(stored_directory(last))
        assert len(look_into(arena).kept) == 4

        drain(chain[0])
        assert tier_of(chain[0]) == Tier.DURABLE
        assert len(look_into(arena).kept) == 4  # what is local is built on it
        assert not verify_directory(last).problems
        done = drain(last)
        assert done.earlier == (chain[1], chain[2])
        assert look_into(arena).kept == []
        assert {tier_of(images) for images in (*chain, last)} == {Tier.DURABLE}
        assert (last / PARENT_LINK).readlink() == Path("..") / chain[-1].name
        assert read_manifest(last).chain_length == 3
        for images in (*chain, last):
            assert not verify_directory(images).problems
        restore(rig, job, last)


def test_a_local_checkpoint_on_a_durable_one_and_the_other_way(
    newest_rig: Rig, arena: Path
) -> None:
    rig = newest_rig
    with rig.job(mib=16) as job:
        first = dump(rig, job, "--leave-running")
        second = dump(rig, job, "--leave-running", **ram(arena, parent=str(first)))
        assert (stored_directory(second) / PARENT_LINK).resolve() == first
        third = rig.images()
        done = rig.dump(job, third, config={"parent": str(second)})
        assert done.status != 0
        assert "drain it first" in done.log
        job.run_on()
        drain(second)
        third = dump(rig, job, parent=str(second))
        job.wait()
        assert not verify_directory(third).problems
        restore(rig, job, third)


def test_what_drained_files_have_is_written_into_again(newest_rig: Rig, arena: Path) -> None:
    """And nothing of the old content stays: one byte of it would make the image damaged."""
    rig = newest_rig
    with rig.job(mib=16) as job:
        images = dump(rig, job, "--leave-running", **ram(arena))
        rig.settle(stored_directory(images))
        size = sum(path.stat().st_size for path in stored_directory(images).iterdir())
        drain(images)
        pool = list((arena / "pool").iterdir())
        assert 0 < sum(path.stat().st_size for path in pool) <= size
        inodes = {path.stat().st_ino for path in pool}
        for _ in range(3):
            job.run_on()
            images = dump(rig, job, "--leave-running", **ram(arena))
            stored = next(stored_directory(images).glob("gpustasis-[0-9]*.img"))
            assert stored.stat().st_ino in inodes
            assert not verify_directory(images).problems
            rig.settle(stored.parent)
            drain(images)
        images = dump(rig, job, **ram(arena))
        job.wait()
        restore(rig, job, images)


def test_a_wait_ends_when_the_dump_has(newest_rig: Rig, arena: Path) -> None:
    """All files are there when criu runs the script, and the dump may fail yet."""
    rig = newest_rig
    script, seen, ended = (rig.scratch / name for name in ("slow.sh", "seen", "ended"))
    script.write_text(
        '#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" = post-dump ] || exit 0\n'
        f"while [ ! -e {seen} ] && kill -0 $PPID; do sleep 0.1; done; sleep 1; touch {ended}\n"
    )
    script.chmod(0o755)
    images = rig.images()
    words = ("--leave-running", "--action-script", str(script))
    with rig.job(mib=8) as job, ThreadPoolExecutor() as pool:
        dumped = pool.submit(rig.dump, job, images, *words, config=ram(arena))
        while not (images / ARENA_MARKER).exists() and not dumped.done():
            time.sleep(0.01)
        found = wait_for(images, Tier.LOCAL, 0)
        seen.touch()  # the script ends
        assert found is None
        assert wait_for(images, Tier.LOCAL, 60) == Tier.LOCAL
        assert ended.exists()
        assert dumped.result().status == 0
        assert not verify_directory(images).problems
        drain(images)
        assert wait_for(images, Tier.DURABLE, 0) == Tier.DURABLE
        job.run_on()


def test_a_lost_checkpoint_is_named_as_lost(newest_rig: Rig, arena: Path) -> None:
    rig = newest_rig
    with rig.job(mib=8) as job:
        images = dump(rig, job, "--leave-running", **ram(arena))
        stored = stored_directory(images)
        shutil.rmtree(stored)
        words = f"the checkpoint in {images} was never drained, and it is lost"
        with pytest.raises(ImageError, match=words) as raised:
            drain(images)
        assert str(stored) in str(raised.value)
        with pytest.raises(ImageError, match=words):
            verify_directory(images)
        job.end()
        done = rig.restore(images)
        assert done.status != 0
        assert words in done.log
        waited = subprocess.run(
            [sys.executable, "-m", "gpustasis", "wait", images, "--timeout", "60"],
            env=dict(rig.environ),
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        assert waited.returncode == ImageError.exit_code == 10, waited.stderr
        assert words in " ".join(waited.stderr.split())


def test_a_local_checkpoint_does_not_push_a_durable_one_out_of_a_store(
    newest_rig: Rig, arena: Path
) -> None:
    """The next boot may take what is in memory: a rule must not count it."""
    rig = newest_rig
    store = rig.images()
    durable, local = store / "a", store / "b"
    with rig.job(mib=8) as job:
        for images, config in ((durable, {}), (local, ram(arena))):
            images.mkdir(mode=0o700)
            done = rig.dump(job, images, "--leave-running", config=config)
            assert done.status == 0, done.errors
            rig.settle(stored_directory(images))
        assert [tier_of(durable), tier_of(local)] == [Tier.DURABLE, Tier.LOCAL]
        prune(store, Rules(last=1))
        assert durable.exists() and local.exists()
        drain(local)
        prune(store, Rules(last=1))
        assert not durable.exists() and local.exists()
        job.run_on()


def test_a_failed_dump_leaves_nothing_in_the_arena(newest_rig: Rig, arena: Path) -> None:
    rig = newest_rig
    with rig.job(mib=8) as job:
        images = rig.images()
        script = rig.scratch / "no.sh"
        script.write_text('#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" != post-dump ]\n')
        script.chmod(0o755)
        words = ("--leave-running", "--action-script", str(script))
        done = rig.dump(job, images, *words, config=ram(arena))
        assert done.status != 0
        job.run_on()
        rig.settle(images)
        assert look_into(arena).kept == []
        assert not (images / ARENA_MARKER).exists()
        # One that fails before criu has come so far:
        broken = rig.images()
        (broken / "pages-1.img").mkdir()
        assert rig.dump(job, broken, "--leave-running", config=ram(arena)).status != 0
        job.run_on()
        rig.settle(broken)
        assert look_into(arena).kept == []
        assert not (broken / ARENA_MARKER).exists()
        assert stored_directory(broken) == broken


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"layout": "packed"}, 'layout = "packed"'),
        ({"externalize": False}, "externalize = false"),
        ({"incremental": True}, "incremental"),
        ({"arena": "/var/tmp"}, "/var/tmp is not on a tmpfs"),
        ({"arena": "/var/tmp/no-such-arena"}, "is not on a tmpfs"),
        ({"arena_limit": 1 << 20}, "arena_limit is 1 MiB"),
        ({"arena_limit": 1 << 20, "when_full": "wait", "when_full_timeout_s": 1}, "no drain has"),
    ],
    ids=["packed", "externalize", "incremental", "disk", "missing", "full", "waits"],
)
def test_what_cannot_be_done_is_refused_before_anything_is_locked(
    newest_rig: Rig, arena: Path, config: dict[str, Setting], words: str
) -> None:
    rig = newest_rig
    with rig.job(mib=8) as job:
        images = rig.images()
        done = rig.dump(job, images, "--leave-running", config=ram(arena) | config)
        assert done.status != 0
        assert words in done.log, done.errors
        assert "locked pid" not in done.log
        assert not (images / ARENA_MARKER).exists()
        assert not arena.exists() or look_into(arena).kept == []
        job.run_on()


def test_others_may_not_have_the_arena(newest_rig: Rig, arena: Path) -> None:
    rig = newest_rig
    arena.mkdir(parents=True)
    arena.chmod(0o755)
    with rig.job(mib=8) as job:
        done = rig.dump(job, rig.images(), "--leave-running", config=ram(arena))
        assert done.status != 0
        assert f"{arena} has mode 0755: an arena has 0700" in done.log
        job.run_on()


def test_what_the_commands_say(newest_rig: Rig, arena: Path) -> None:
    rig = with_config(newest_rig, ram(arena))

    def run(*words: str | Path, status: int = 0) -> Any:
        ended = subprocess.run(
            [sys.executable, "-m", "gpustasis", *words, "--json"],
            env=dict(rig.environ),
            capture_output=True,
            check=False,
            timeout=100,
        )
        assert ended.returncode == status, ended.stderr
        command = " ".join(map(str, words[: 2 if words[0] == "arena" else 1]))
        return check_document(ended.stdout.decode(), command)

    store = rig.images()
    with rig.job(mib=8) as job:
        criu = ("--criu", criu_place(rig.criu))
        made = run("checkpoint", str(job.pid), "-D", store / "one", "-R", *criu)
        assert made["state"] == "local"
        job.run_on()
        assert run("wait", store / "one", "--for", "local")["state"] == "local"
        waited = run("wait", store / "one", "--timeout", "0.1", status=25)
        assert waited["error"]["name"] == "LocalError"
        assert [entry["state"] for entry in run("list", store)["entries"]] == ["local"]
        assert run("inspect", store / "one")["state"] == "local"
        assert run("verify", store / "one")["state"] == "local"
        assert run("verify", store)["checkpoints"][0]["problems"] == []
        refused = run("flatten", store / "one", "-o", store / "flat", status=25)
        assert "drain it first" in refused["error"]["message"]
        run("prune", store, "--keep-last", "1")
        assert (store / "one").exists()
        listed = run("arena", "list", "--arena", arena)["entries"]
        found = [(entry["directory"], entry["state"]) for entry in listed]
        assert found == [(str(store / "one"), "local")]

        drained = run("drain", store / "one")
        assert drained["images"] == 1
        assert run("wait", store / "one")["state"] == "durable"
        assert [entry["state"] for entry in run("list", store)["entries"]] == ["durable"]
        assert run("arena", "list", "--arena", arena)["pool_bytes"] > 0

        waits = ("--wait", "durable")
        made = run("checkpoint", str(job.pid), "-D", store / "two", "-R", *waits, *criu)
        assert made["state"] == "durable"
        run("checkpoint", str(job.pid), "-D", store / "three", "-R", *criu)
        rig.settle(stored_directory(store / "three"))
        assert run("arena", "discard", store / "three")["directory"] == str(store / "three")
        assert look_into(arena).kept == []
        assert run("arena", "clean", "--arena", arena)["freed"] == []
        refused = run("checkpoint", str(job.pid), "-o", store / "stream", status=20)
        assert "not for a stream" in refused["error"]["message"]
        on_disk = ("-R", "--tier", "disk", *waits, *criu)
        made = run("checkpoint", str(job.pid), "-D", store / "four", *on_disk)
        assert made["state"] == "durable"
        assert run("wait", store / "four")["state"] == "durable"
        job.run_on()


@pytest.mark.parametrize("staging", ["drop", "keep"])
def test_cpu_memory_goes_there_too(newest_rig: Rig, arena: Path, staging: str) -> None:
    rig = newest_rig
    with rig.job(mib=8, pinned_kib=1024, children=1) as job:
        config = ram(arena, cpu_memory="ours", staging=staging)
        first = dump(rig, job, "--leave-running", **config)
        job.run_on()
        images = dump(rig, job, **config, parent=str(first))
        job.wait()
        assert list(stored_directory(images).glob("gpustasis-memory-*.img"))
        assert not verify_directory(images).problems
        restore(rig, job, images)
        job.end()
        drain(images)
        assert list(images.glob("gpustasis-memory-*.img"))
        assert not verify_directory(images).problems
        restore(rig, job, images)


def test_an_arena_of_its_own(newest_rig: Rig) -> None:
    rig = newest_rig
    place = rig.scratch / "mounted"
    options = create(place, 256 << 20)
    try:
        assert f"size={256 << 20}" in options
        assert contents_of(place).kept == ()
        with pytest.raises(CheckpointError, match="is a mount point already"):
            create(place, 1 << 20)
        with rig.job(mib=8) as job:
            images = dump(rig, job, "--leave-running", **ram(place))
            assert [one.images for one in contents_of(place).kept] == [images]
            drain(images)
            job.run_on()
    finally:
        subprocess.run(["umount", "-l", place], check=True)
