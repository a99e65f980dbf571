# SPDX-License-Identifier: Apache-2.0
"""`gpustasis seal` of a checkpoint that is only in memory: what was in GPU memory is never on the
disk in the clear."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from campaigns.rig import Rig, small_filesystem
from gpustasis._core import ARENA_MARKER
from gpustasis.draining.drain import locked
from gpustasis.image.arena import Tier, stored_directory, tier_of
from gpustasis.image.peer_record import PEER_RECORD
from gpustasis.sealing import seal as sealing_module
from gpustasis.sealing.recipients import read_recipients
from support.arena import dump, ram, restore, statistics
from support.certificates import Pair
from support.json_output import check_document
from support.live_sealing import gpustasis, needles

MIB = 1 << 20


def sealing(images: Path, pair: Pair, out: Path) -> tuple[str | Path, ...]:
    return ("seal", images, "--to", pair.certificate, "-o", out)


def images_in(directory: Path) -> list[str]:
    """Of ours, with memory; but for what is sealed."""
    no_memory = ("gpustasis-sealed", "gpustasis-manifest")
    found = sorted(path.name for path in directory.glob("gpustasis-*.img"))
    return [name for name in found if not name.startswith(no_memory)]


def unsealed(rig: Rig, pair: Pair, sealed: Path, to: Path) -> Path:
    done = gpustasis(rig, "unseal", sealed, "--key", pair.key, "-o", to)
    assert done.returncode == 0, done.stderr
    return to


@contextmanager
def at_work(rig: Rig, images: Path, pair: Pair, out: Path) -> Iterator[subprocess.Popen[bytes]]:
    """One that takes long, and has begun to write `out`; killed, if it has not ended."""
    words = [sys.executable, "-m", "gpustasis", *map(str, sealing(images, pair, out))]
    with subprocess.Popen(
        [*words, "--rate-limit", "256K"], env=dict(rig.environ), stderr=subprocess.PIPE
    ) as sealer:
        try:
            deadline = time.monotonic() + 60
            while not list(out.parent.glob(f".{out.name}.part/.gpustasis-sealed-*.part")):
                assert sealer.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            yield sealer
        finally:
            sealer.kill()


@pytest.mark.parametrize("cpu_memory", ["criu", "ours"])
def test_there_and_back(
    newest_rig: Rig, arena: Path, me: Pair, tmp_path: Path, cpu_memory: str
) -> None:
    """Most of the memory of one process is that of the other: in the arena it is there once."""
    with newest_rig.job(mib=16, children=1, alike=1) as job:
        images = dump(newest_rig, job, **ram(arena, cpu_memory=cpu_memory))
        assert sum(task["alike"]["chunks"] for task in statistics(images)["tasks"]) > 0
        job.wait()
        out, names = tmp_path / "sealed", set(os.listdir(images))
        signed = ("--sign", me.key, "--sign-certificate", me.certificate)
        done = gpustasis(newest_rig, *sealing(images, me, out), *signed, "--json")
        assert done.returncode == 0, done.stderr
        found = check_document(done.stdout, "seal")
        assert found["state"] == "local" and found["in_clear"] == []
        assert found["signature"]["directory"] == str(out)
        assert found["plain_bytes"] >= 32 * MIB
        stored = sum(path.stat().st_size for path in out.glob("gpustasis-sealed*.img"))
        assert found["sealed_bytes"] == stored < found["plain_bytes"]

        wanted = needles(out, me)
        assert wanted
        for path in out.iterdir():
            content = path.read_bytes()
            others = ("inventory.img", "gpustasis-statement", "gpustasis-signature")
            assert path.name.startswith((*others, "gpustasis-sealed")), path.name
            assert not any(needle in content for needle in wanted), path.name
        assert tier_of(images) == Tier.LOCAL  # as before, and nothing of it was written there
        assert set(os.listdir(images)) == names

        given_up = gpustasis(newest_rig, "arena", "discard", images, "--arena", arena)
        assert given_up.returncode == 0, given_up.stderr
        restore(newest_rig, job, unsealed(newest_rig, me, out, tmp_path / "plain"))
        verified = gpustasis(newest_rig, "verify", tmp_path / "plain")
        assert verified.returncode == 0, verified.stderr


def test_what_is_of_the_directory_alone_is_not_sealed(
    newest_rig: Rig, arena: Path, me: Pair, tmp_path: Path
) -> None:
    """The marker, what is told of a copy at a neighbour, and an image of a drain that was killed,
    which need not be whole."""
    with newest_rig.job(mib=8) as job:
        images = dump(newest_rig, job, **ram(arena))
        job.wait()
        (name,) = images_in(stored_directory(images))
        left = {name, f".{name}.part", f".{PEER_RECORD}.part"}
        for each in left:
            (images / each).write_bytes(b"a part")
        (images / PEER_RECORD).write_text("{}")
        done = gpustasis(newest_rig, *sealing(images, me, tmp_path / "sealed"))
        assert done.returncode == 0, done.stderr
        assert f"gpustasis arena discard {images}" in done.stdout
        assert f"in the clear: .{name}.part, {name}" in done.stdout
        plain = unsealed(newest_rig, me, tmp_path / "sealed", tmp_path / "plain")
        kept = {path.name for path in images.iterdir()} - {ARENA_MARKER, PEER_RECORD, *left}
        assert {path.name for path in plain.iterdir()} == kept | {name, "gpustasis-manifest.img"}
        assert (plain / name).stat().st_size > 1000
        restore(newest_rig, job, plain)


def test_what_cannot_be_sealed_is_refused_and_stays_in_memory(
    newest_rig: Rig, arena: Path, me: Pair, tmp_path: Path
) -> None:
    out = tmp_path / "sealed"
    with newest_rig.job(mib=8) as job:
        first = dump(newest_rig, job, "--leave-running", **ram(arena))
        second = dump(newest_rig, job, "--leave-running", **ram(arena, parent=str(first)))
        done = gpustasis(newest_rig, *sealing(second, me, out))
        assert done.returncode == 14 and "gpustasis flatten" in done.stderr, done.stderr

        with (first / ARENA_MARKER).open("rb") as marker:
            fcntl.flock(marker, fcntl.LOCK_EX)  # a drain is at work
            done = gpustasis(newest_rig, *sealing(first, me, out))
            assert done.returncode == 3 and "a drain or a seal is at work" in done.stderr, (
                done.stderr
            )

        with small_filesystem(tmp_path / "small", 3 * MIB, 0) as small:
            done = gpustasis(newest_rig, *sealing(first, me, small / "sealed"))
            assert done.returncode == 3 and "No space left" in done.stderr, done.stderr
            assert f"cannot write {small / 'sealed'}" in done.stderr
            assert list(small.iterdir()) == []

        (name,) = images_in(stored_directory(first))
        with (stored_directory(first) / name).open("r+b") as image:
            image.seek(3 * MIB)
            byte = image.read(1)
            image.seek(3 * MIB)
            image.write(bytes([byte[0] ^ 1]))
        done = gpustasis(newest_rig, *sealing(first, me, out))
        assert done.returncode == 14 and name in done.stderr, done.stderr

        assert not out.exists() and not list(tmp_path.glob("*.part"))
        assert tier_of(first) == tier_of(second) == Tier.LOCAL
        job.run_on()


def test_a_rate_limit_is_for_what_is_in_memory(
    newest_rig: Rig, arena: Path, me: Pair, tmp_path: Path
) -> None:
    with newest_rig.job(mib=8) as job:
        images = dump(newest_rig, job, **ram(arena))
        job.wait()
        begin = time.monotonic()
        words = sealing(images, me, tmp_path / "slow")
        done = gpustasis(newest_rig, *words, "--rate-limit", "256K")
        assert done.returncode == 0, done.stderr
        assert time.monotonic() - begin > 7.5  # of 8 MiB 2 are random, at least
        done = gpustasis(newest_rig, "drain", images)
        assert done.returncode == 0, done.stderr
        done = gpustasis(
            newest_rig, *sealing(images, me, tmp_path / "sealed"), "--rate-limit", "1M"
        )
        assert done.returncode == 3 and "only in memory" in done.stderr
        assert not (tmp_path / "sealed").exists()


def test_one_that_is_killed_leaves_the_checkpoint_and_the_next_succeeds(
    newest_rig: Rig, arena: Path, me: Pair, tmp_path: Path
) -> None:
    with newest_rig.job(mib=8) as job:
        images = dump(newest_rig, job, **ram(arena))
        job.wait()
        out = tmp_path / "sealed"
        with at_work(newest_rig, images, me, out) as sealer:
            sealer.kill()
        assert tier_of(images) == Tier.LOCAL and not out.exists()
        left = [path.read_bytes() for path in (tmp_path / ".sealed.part").iterdir()]
        done = gpustasis(newest_rig, *sealing(images, me, out))
        assert done.returncode == 0, done.stderr
        wanted = needles(out, me)
        assert wanted and not any(needle in content for needle in wanted for content in left)
        assert not (tmp_path / ".sealed.part").exists()
        restore(newest_rig, job, unsealed(newest_rig, me, out, tmp_path / "plain"))


def test_a_file_that_changes_meanwhile_is_an_error(
    newest_rig: Rig, arena: Path, me: Pair, tmp_path: Path
) -> None:
    with newest_rig.job(mib=8) as job:
        images = dump(newest_rig, job, **ram(arena))
        job.wait()
        with at_work(newest_rig, images, me, tmp_path / "sealed") as sealer:
            (images / "pstree.img").touch()
            _, told = sealer.communicate(timeout=120)
        assert sealer.returncode == 14 and b"changed while it was sealed" in told, told
        assert list(tmp_path.glob("*sealed*")) == [] and tier_of(images) == Tier.LOCAL


def test_a_directory_that_is_exchanged_meanwhile_is_not_the_one_that_is_sealed(
    newest_rig: Rig, arena: Path, me: Pair, tmp_path: Path
) -> None:
    """Marker, images and arena stay those of the directory that was opened."""
    with newest_rig.job(mib=8) as job:
        first = dump(newest_rig, job, "--leave-running", **ram(arena))
        job.run_on()
        second = dump(newest_rig, job, **ram(arena))
        job.wait()
        away, plain = tmp_path / "away", tmp_path / "plain"
        with at_work(newest_rig, first, me, tmp_path / "sealed") as sealer:
            first.rename(away)
            second.rename(first)
            _, told = sealer.communicate(timeout=120)
        assert sealer.returncode == 0, told
        unsealed(newest_rig, me, tmp_path / "sealed", plain)
        names = {path.name for path in away.iterdir()} & {path.name for path in plain.iterdir()}
        assert {"inventory.img", "pages-1.img", "gpustasis-dump.json"} <= names
        assert all((plain / name).read_bytes() == (away / name).read_bytes() for name in names)
        told_of = [path / "gpustasis-dump.json" for path in (plain, first)]
        assert told_of[0].read_bytes() != told_of[1].read_bytes()
        restore(newest_rig, job, plain)


def test_one_that_is_drained_before_the_lock_is_had_is_sealed_from_the_disk(
    newest_rig: Rig, arena: Path, me: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with newest_rig.job(mib=8) as job:
        images = dump(newest_rig, job, **ram(arena))
        job.wait()

        def drained_first(directory: Path) -> object:
            done = gpustasis(newest_rig, "drain", images)
            assert done.returncode == 0, done.stderr
            return locked(directory)

        monkeypatch.setattr(sealing_module, "locked", drained_first)
        done = sealing_module.seal(images, read_recipients([me.certificate]), tmp_path / "sealed")
        assert done.state == Tier.DURABLE and done.in_clear == ()
        restore(newest_rig, job, unsealed(newest_rig, me, tmp_path / "sealed", tmp_path / "plain"))
