# SPDX-License-Identifier: Apache-2.0
"""Sealed checkpoints on top of a sealed parent, with real CRIU: what is the same is not stored
again, who opens the last opens the chain, and nothing but that chain is taken for it."""

from __future__ import annotations

import json
import shutil
import signal
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from campaigns.rig import Rig, with_config
from campaigns.steady_job import SteadyJob
from gpustasis._core import (
    PARENT_LINK,
    ImageInfo,
    ImageReader,
    SealedReader,
    image_name,
    parse_manifest,
)
from gpustasis.criu.plugin import Scalar
from gpustasis.recovery import GUARDIAN_COMM, WORKER_COMM
from support.broken_dumps import break_off, recover
from support.certificates import Pair
from support.container import container
from support.cpu_memory import OURS, refused, require_dead
from support.live_sealing import gpustasis, key_of, needles, opened_by
from support.plain_sealed import open_directory, open_envelope
from support.recipients import make_recipient

from .test_containers import ask, contained
from .test_sealed_whole import flip_byte, require_sealed, sealed_for

ENVELOPE = "gpustasis-sealed.cms"
SMALL: dict[str, Scalar] = {"chunk_size": 4096}  # more of them stay the same


def on_top_of(parent: Path, pair: Pair, **more: Scalar) -> dict[str, Scalar]:
    return sealed_for(pair, **opened_by(pair), **SMALL, parent=str(parent), **more)


def dump(rig: Rig, job: SteadyJob, config: dict[str, Scalar], *, last: bool = False) -> Path:
    images = rig.images()
    dumped = rig.dump(job, images, *(() if last else ("--leave-running",)), config=SMALL | config)
    assert dumped.status == 0, dumped.errors
    if last:
        assert job.wait() == -signal.SIGKILL
    else:
        job.run_on()
    rig.settle(images)
    return images


def dump_chain(rig: Rig, job: SteadyJob, me: Pair, **more: Scalar) -> list[Path]:
    """Three, the last of which has ended the job."""
    chain = [dump(rig, job, sealed_for(me, **more))]
    chain.append(dump(rig, job, on_top_of(chain[0], me, **more)))
    chain.append(dump(rig, job, on_top_of(chain[1], me, **more), last=True))
    return chain


def info(images: Path, pair: Pair, pid: int) -> ImageInfo:
    return ImageReader.find_sealed(images, image_name(pid), key_of(images, pair)).info


def stored(images: Path) -> int:
    return sum(path.stat().st_size for path in images.glob("gpustasis-sealed-*.img"))


def restores(rig: Rig, images: Path, job: SteadyJob, pair: Pair) -> None:
    restored = rig.restore(images, config=opened_by(pair))
    assert restored.status == 0, restored.errors
    job.run_on()


def require_refused(rig: Rig, images: Path, job: SteadyJob, said: str, **config: Scalar) -> None:
    """Before anything is made."""
    log = refused(rig.restore(images, config=config))
    assert said in log, log[-2000:]
    assert "Forking task" not in log
    assert not job.alive_pids()


@pytest.mark.one_criu
@pytest.mark.parametrize("cpu_memory", ["criu", "ours"])
def test_a_chain_of_three_and_a_restore_through_it(rig: Rig, me: Pair, cpu_memory: str) -> None:
    with rig.job(mib=16, children=1) as job:
        chain = dump_chain(rig, job, me, cpu_memory=cpu_memory)
        for number, images in enumerate(chain):
            require_sealed(images, needles(images, me))
            key = key_of(images, me)
            assert key.ancestor_count == number
            content = SealedReader.open(images, key).read("gpustasis-manifest.img")
            assert parse_manifest(content, "").chain_length == number
        # A second reader, which knows docs/format.md alone, opens each with its own key, and finds
        # the keys of the others in it.
        records = [open_envelope((i / ENVELOPE).read_bytes(), me.key.read_bytes()) for i in chain]
        for images, record, parent in zip(chain[1:], records[1:], records, strict=False):
            assert open_directory(images, me.key)
            assert record[64:] == parent[16:]
        for pid in job.pids:  # some chunks have not changed since the first
            assert {source.depth for source in info(chain[2], me, pid).sources} == {1, 2}
        assert stored(chain[2]) < stored(chain[0])
        assert (chain[2] / PARENT_LINK).readlink() == Path("..") / chain[1].name
        restores(rig, chain[2], job, me)


@pytest.fixture
def chain(newest_rig: Rig, me: Pair) -> Iterator[tuple[SteadyJob, list[Path]]]:
    """Of a job that the last dump has ended. It is restored at the end."""
    with newest_rig.job(mib=16) as job:
        made = dump_chain(newest_rig, job, me)
        assert {source.depth for source in info(made[2], me, job.pid).sources} == {1, 2}
        yield job, made
        restores(newest_rig, made[2], job, me)


Chain = tuple[SteadyJob, list[Path]]


def test_nothing_but_that_chain_is_taken_for_it(newest_rig: Rig, chain: Chain, me: Pair) -> None:
    job, (first, second, third) = chain
    again = newest_rig.copy(first)
    with newest_rig.job(mib=8) as other:  # another job, the same recipient
        strange = dump(newest_rig, other, sealed_for(me))
    kept = newest_rig.scratch / "kept"
    for place in (first, second):
        place.rename(kept)
        require_refused(newest_rig, third, job, place.name, **opened_by(me))
        for instead in (strange, again if place == second else second):
            source = kept if instead == place else instead
            shutil.copytree(source, place, symlinks=True)
            require_refused(newest_rig, third, job, "of another sealed checkpoint", **opened_by(me))
            shutil.rmtree(place)
        kept.rename(place)


def spoil_chunks(image: Path) -> None:
    """A byte in each frame that holds chunks alone: the image's index is in the last ones."""
    content = bytearray(image.read_bytes())
    frame = struct.unpack("<I", content[48:52])[0] + 32
    for at in range(128 + frame + 64, len(content) - (256 << 10), frame):
        content[at] ^= 1
    image.write_bytes(content)


def test_a_chain_with_a_changed_byte_is_refused(newest_rig: Rig, chain: Chain, me: Pair) -> None:
    """What says what there is, before anything is made; chunks, before they are used."""
    job, (first, second, third) = chain
    for place in (first, second):
        for name in ("gpustasis-sealed.img", "gpustasis-sealed-2.img"):
            path = place / name
            content = path.read_bytes()
            for at in (3, 60, len(content) - 200, len(content) - 5):
                flip_byte(path, at)
                require_refused(newest_rig, third, job, name, **opened_by(me))
                path.write_bytes(content)
            path.rename(newest_rig.scratch / "away")
            require_refused(newest_rig, third, job, name, **opened_by(me))
            (newest_rig.scratch / "away").rename(path)
    image = first / "gpustasis-sealed-2.img"
    content = image.read_bytes()
    spoil_chunks(image)
    assert image.name in refused(newest_rig.restore(third, config=opened_by(me)))
    require_dead(job)
    job.reap()
    image.write_bytes(content)


def test_an_envelope_of_another_checkpoint_opens_none(
    newest_rig: Rig, chain: Chain, me: Pair
) -> None:
    job, (first, second, third) = chain
    envelope = (third / ENVELOPE).read_bytes()
    for other in (first, second):
        (third / ENVELOPE).write_bytes((other / ENVELOPE).read_bytes())
        said = "the key is that of another sealed checkpoint"
        require_refused(newest_rig, third, job, said, **opened_by(me))
    (third / ENVELOPE).write_bytes(envelope)


def test_the_key_of_the_last_opens_the_chain(
    newest_rig: Rig, chain: Chain, me: Pair, tmp_path: Path
) -> None:
    """The envelopes of the others are not needed for it; and it can be given to others."""
    rig, (job, made) = newest_rig, chain
    other = make_recipient(tmp_path, "other", "SECP384R1")
    for images in made[:2]:
        (images / ENVELOPE).unlink()
    words = ["rewrap", made[2], "--key", me.key, "--to", other.certificate, "--to", me.certificate]
    done = gpustasis(rig, *words)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    done = gpustasis(rig, "unseal", made[2], "--key", other.key, "-o", out)
    assert done.returncode == 0, done.stderr
    for images in made:
        images.rename(images.with_name(f"{images.name}.away"))
    try:  # what was unsealed needs no other
        done = gpustasis(rig, "verify", out)
        assert done.returncode == 0, done.stderr
        assert not (out / PARENT_LINK).is_symlink()
        restored = rig.restore(out)
        assert restored.status == 0, restored.errors
        job.run_on()
        job.end()
    finally:
        for images in made:
            images.with_name(f"{images.name}.away").rename(images)


WRONG = {
    "no key": ({"private_key": ""}, "private_key"),
    "a key that is not there": ({"private_key": "/nowhere.key"}, "/nowhere.key"),
    "no checkpoint": ({"parent": "/"}, "is no checkpoint of this plugin"),
}


@pytest.mark.parametrize(("keys", "said"), WRONG.values(), ids=WRONG.keys())
def test_a_parent_that_cannot_be_opened_fails_the_dump_and_not_the_job(
    newest_rig: Rig, me: Pair, keys: dict[str, Scalar], said: str
) -> None:
    with newest_rig.job(mib=4) as job:
        first = dump(newest_rig, job, sealed_for(me))
        config = {key: value for key, value in (on_top_of(first, me) | keys).items() if value != ""}
        log = refused(newest_rig.dump(job, newest_rig.images(), config=config))
        assert said in log
        assert "locked pid" not in log
        job.run_on()


def test_a_chain_has_one_lineage(newest_rig: Rig, me: Pair, tmp_path: Path) -> None:
    """All of it is sealed, or nothing, and the key opens all of it; else the job runs on."""
    rig, other = newest_rig, make_recipient(tmp_path, "other")
    with rig.job(mib=4) as job:
        clear = dump(rig, job, {})
        mine = dump(rig, job, sealed_for(me))
        foreign = dump(rig, job, sealed_for(other))

        def failed(config: dict[str, Scalar]) -> str:
            dumped = rig.dump(job, rig.images(), "--leave-running", config=config)
            job.run_on()
            return refused(dumped)

        assert "a sealed checkpoint is built on sealed ones alone" in failed(on_top_of(clear, me))
        assert "is sealed, and the dump is not" in failed({"parent": str(mine)})
        assert "for another key" in failed(on_top_of(foreign, me))
        (mine / ENVELOPE).write_bytes((foreign / ENVELOPE).read_bytes())
        assert "of another sealed checkpoint" in failed(on_top_of(mine, other))


def test_a_rotten_chunk_of_a_sealed_parent_is_stored_anew(newest_rig: Rig, me: Pair) -> None:
    rig = newest_rig
    with rig.job(mib=8) as job:
        first = dump(rig, job, sealed_for(me))
        spoil_chunks(first / "gpustasis-sealed-2.img")
        config = on_top_of(first, me, parent_check="data")
        second = rig.images()
        dumped = rig.dump(job, second, config=config)
        assert dumped.status == 0, dumped.errors
        assert "the parent is damaged" in dumped.log
        job.wait()
        rig.settle(second)
        found = json.loads((second / "gpustasis-dump.json").read_text())["tasks"][0]
        assert found["damaged_in_parent"] > 0
        restores(rig, second, job, me)


@pytest.mark.parametrize("kept", [GUARDIAN_COMM, WORKER_COMM, ""])
def test_what_was_referred_to_comes_back_after_a_broken_dump(
    newest_rig: Rig, me: Pair, kept: str
) -> None:
    """By the guardians, by the worker, or by `recover`: they have the keys of the chain as well."""
    rig = newest_rig
    with rig.job(mib=16) as job:
        first = dump(rig, job, sealed_for(me))
        second = dump(rig, job, on_top_of(first, me))
        images = rig.images()
        sealing = with_config(rig, on_top_of(second, me))
        break_off(sealing, job, images, *([kept] if kept else []))
        rig.settle(images)
        assert {source.depth for source in info(images, me, job.pid).sources} == {1, 2}
        if kept != WORKER_COMM:
            recover(rig, job.pid, "-D", images, "--key", me.key)
        job.run_on()


def test_a_dump_that_fails_on_top_of_a_sealed_parent(rig: Rig, me: Pair) -> None:
    with rig.job(mib=16) as job:
        first = dump(rig, job, sealed_for(me))
        script = rig.scratch / "fail-after-the-dump"
        script.write_text("#!/bin/sh\n[ $CRTOOLS_SCRIPT_ACTION != post-dump ]\n")
        script.chmod(0o700)
        images = rig.images()
        extra = ("--action-script", str(script))
        failed = rig.dump(job, images, *extra, config=on_top_of(first, me, **OURS))
        assert failed.status != 0
        rig.settle(images)
        job.run_on()


def test_by_the_commands(newest_rig: Rig, me: Pair, tmp_path: Path) -> None:
    rig = newest_rig
    with rig.job(mib=8) as job:
        first, second = tmp_path / "first", tmp_path / "second"
        criu = ("--criu", rig.criu.root or rig.criu.program)
        words = ("checkpoint", *criu, job.pid, "--to", me.certificate)
        done = gpustasis(rig, *words, "-D", first, "--leave-running")
        assert done.returncode == 0, done.stderr
        done = gpustasis(rig, *words, "-D", second, "--parent", first)
        assert done.returncode == 12 and "private_key" in done.stderr
        shutil.rmtree(second)
        done = gpustasis(rig, *words, "-D", second, "--parent", first, "--key", me.key)
        assert done.returncode == 0, done.stderr
        assert "full checkpoint" not in done.stdout
        job.wait()
        assert key_of(second, me).ancestor_count == 1
        done = gpustasis(rig, "restore", *criu, "-D", second, "--key", me.key)
        assert done.returncode == 0, done.stderr
        job.run_on()


def test_a_container_whose_image_directories_the_engine_deletes(newest_rig: Rig, me: Pair) -> None:
    """By its annotations; recipients and key are the host's."""
    rig = newest_rig
    config = sealed_for(me, **opened_by(me))
    with container() as made, contained(rig, made, mib=8) as job:
        ask(made, job, incremental="true")
        for number in range(2):
            images = dump(rig, job, config)
            assert key_of(images, me).ancestor_count == number
            shutil.rmtree(images)
        last = dump(rig, job, config, last=True)
        assert {source.depth for source in info(last, me, job.pid).sources} == {1, 2}
        moved = rig.images() / "a" / "b"  # the link leads nowhere: it is found by its id
        moved.parent.mkdir()
        shutil.move(last, moved)
        hidden = made.store.parent.parent / f"{made.store.name}-hidden"
        made.store.rename(hidden)
        try:
            require_refused(rig, moved, job, "is not in", **opened_by(me))
        finally:
            hidden.rename(made.store)
        restores(rig, moved, job, me)
