# SPDX-License-Identifier: Apache-2.0
"""A dump that is lost is fetched from the neighbour; one that is not, or that cannot be fetched,
stays where it is."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpustasis._core import ARENA_MARKER, MANIFEST_NAME, read_manifest, write_manifest
from gpustasis.draining.drain import drain
from gpustasis.errors import ImageError, JobError
from gpustasis.image.checkpoint import open_image
from gpustasis.image.directory import try_exclude
from gpustasis.jobs.dumps import DumpRecord, content_of, identity_of
from gpustasis.jobs.neighbour import bring_back, give_up, is_lost
from gpustasis.jobs.network import Network
from gpustasis.peers.copies import FETCHED
from gpustasis.peers.copying import copy
from gpustasis.recovery import WORKER_COMM
from gpustasis.streaming.tree import Tree
from support.local_checkpoints import make_local
from support.peers import Nodes, make_nodes, serving, write_config

HOLDER = """
import os, sys, time
open("/proc/self/comm", "w").write(sys.argv[1])
held = os.open(sys.argv[2], os.O_RDONLY)
print("holds it", flush=True)
time.sleep(60)
"""


@pytest.fixture
def nodes(tmp_path: Path, arena: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    arena.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = make_nodes(tmp_path / "certificates", arena.parent / "peers")
    place = write_config(tmp_path / "peer.toml", made.sender)
    monkeypatch.setenv("GPUSTASIS_PEER_CONFIG", str(place))
    return made


@pytest.fixture
def images(tmp_path: Path) -> Path:
    place = tmp_path / "kept" / "epoch-00000001"
    place.parent.mkdir()
    return place


def record_of(images: Path, peer: str, key: str) -> DumpRecord:
    size, digest = content_of(images)
    identity, parent = identity_of(images)
    return DumpRecord(
        id=identity,
        parent=parent,
        directory=str(images),
        host=socket.gethostname(),
        bytes=size,
        digest=digest,
        pid=1,
        dump_ms=1,
        addresses=(),
        network=Network(),
        peer=peer,
        key=key,
    )


def of_another_boot(images: Path) -> None:
    lines = (images / ARENA_MARKER).read_text().splitlines()
    (images / ARENA_MARKER).write_text("\n".join([*lines[:2], f"boot {'0' * 32}", lines[3], ""]))


def test_what_is_lost_is_fetched_and_what_is_left_gets_another_name(
    nodes: Nodes, images: Path, arena: Path
) -> None:
    make_local(images, arena)
    with serving(nodes.keeper):
        done = copy(images, nodes.sender)
        record = record_of(images, done.peer, done.key)
        assert not bring_back(record)
        of_another_boot(images)
        assert "was started anew" in is_lost(images)
        assert bring_back(record)
    assert content_of(images) == (record.bytes, record.digest)
    assert (images.with_name("epoch-00000001.lost-1") / ARENA_MARKER).exists()
    assert not images.with_name("epoch-00000001.fetching").exists()


@pytest.fixture
def copied(nodes: Nodes, images: Path, arena: Path) -> Iterator[Callable[..., DumpRecord]]:
    """copied(*wrong, right=True) -> the record of a dump that is lost by now. Its neighbour has the
    copy, unless right is false, and later ones of the same id with these pages instead, each built
    on another copy. None has the name that is in the record, as after a drain."""

    def make(*wrong: str, right: bool = True) -> DumpRecord:
        stored = make_local(images, arena)
        record = record_of(images, str(nodes.sender.peer), "")
        if right:
            copy(images, nodes.sender, replaces=False)
        for page in wrong:
            shutil.rmtree(stored)
            other = images.parent.parent / f"of {page}" / images.name
            other.mkdir(parents=True)
            below = make_local(other.with_name(f"below {page}"), arena, ("A",))
            make_local(other, arena, ("A", page), parent=below)
            copy(other, nodes.another(f"node-{page}"), replaces=False)
        shutil.rmtree(arena)
        shutil.rmtree(images)
        return replace(record, key=f"{record.id}-{16 * '0'}")

    with serving(nodes.keeper):
        yield make


def _copies_of(nodes: Nodes, record: DumpRecord) -> list[Path]:
    return list(nodes.keeper.directory.glob(f"{record.id}-*"))


def test_a_copy_that_is_not_what_was_committed_is_not_taken(
    images: Path, copied: Callable[..., DumpRecord], caplog: pytest.LogCaptureFixture
) -> None:
    """Else the next start would find a dump there, and never ask for the right copy."""
    record = copied("x", "y")
    assert bring_back(record)
    assert content_of(images) == (record.bytes, record.digest)
    assert os.listdir(images.parent) == [images.name]  # nor is what the others are built on there
    said = [one for one in caplog.messages if "it is not what was committed" in one]
    assert len(said) == 2


def test_the_copy_that_the_record_names_is_tried_first(
    nodes: Nodes, images: Path, copied: Callable[..., DumpRecord], caplog: pytest.LogCaptureFixture
) -> None:
    record = copied("x")
    oldest = min(_copies_of(nodes, record), key=lambda one: one.stat().st_ctime_ns)
    assert bring_back(replace(record, key=oldest.name))
    assert "not what was committed" not in caplog.text


def test_where_no_copy_is_right_none_is_taken(
    images: Path, copied: Callable[..., DumpRecord]
) -> None:
    record = copied("x", right=False)
    for _ in range(2):
        with pytest.raises(JobError, match=r"not fetched: the copy .* not what was committed"):
            bring_back(record)
        assert is_lost(images)
        assert os.listdir(images.parent) == []


def test_a_copy_that_is_damaged_is_in_no_others_way(
    nodes: Nodes, images: Path, copied: Callable[..., DumpRecord]
) -> None:
    record = copied("x")
    newest = max(_copies_of(nodes, record), key=lambda one: one.stat().st_ctime_ns)
    (newest / "gpustasis-7.img").write_bytes(b"no image")
    assert bring_back(record)
    assert content_of(images) == (record.bytes, record.digest)


def test_the_names_of_what_is_fetched_are_on_the_disk(
    images: Path, copied: Callable[..., DumpRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, bool]] = []
    fsync = os.fsync

    def spy(descriptor: int) -> None:
        fsync(descriptor)
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), images.exists()))

    record = copied()
    monkeypatch.setattr(os, "fsync", spy)
    assert bring_back(record)
    assert (str(images.parent), True) in synced


@pytest.fixture
def fetched(
    nodes: Nodes, images: Path, arena: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[DumpRecord, Path]:
    """Of a dump that is lost and whole under another name: a keeper has fetched it, and was killed.
    The neighbour is gone meanwhile."""

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    make_local(images, arena)
    with serving(nodes.keeper), monkeypatch.context() as patch:
        done = copy(images, nodes.sender)
        record = record_of(images, done.peer, done.key)
        of_another_boot(images)
        patch.setattr("gpustasis.jobs.neighbour._put", killed)
        with pytest.raises(KeyboardInterrupt):
            bring_back(record)
    assert is_lost(images)
    return record, images.with_name("epoch-00000001.fetching")


def test_what_a_killed_keeper_has_fetched_is_taken_without_its_neighbour(
    images: Path, fetched: tuple[DumpRecord, Path]
) -> None:
    record, _ = fetched
    assert bring_back(record)
    assert content_of(images) == (record.bytes, record.digest)
    assert sorted(os.listdir(images.parent)) == ["epoch-00000001", "epoch-00000001.lost-1"]


@pytest.mark.parametrize("name", ["gpustasis-7.img", FETCHED])
def test_nothing_else_that_it_has_left_is_taken(
    nodes: Nodes, images: Path, fetched: tuple[DumpRecord, Path], name: str
) -> None:
    record, part = fetched
    (part / name).unlink()
    with pytest.raises(JobError, match="cannot reach"):
        bring_back(record)
    assert is_lost(images)


@pytest.mark.parametrize("serves", [False, True])
def test_what_cannot_be_fetched_is_left_as_it_is(
    nodes: Nodes, images: Path, arena: Path, serves: bool
) -> None:
    make_local(images, arena)
    with serving(nodes.keeper) as server:
        done = copy(images, nodes.sender)
        record = record_of(images, done.peer, done.key)
        of_another_boot(images)
        before = sorted(os.listdir(images))
        if serves:  # what comes is damaged
            path = server.copies.directory / done.key / "gpustasis-7.img"
            raw = bytearray(path.read_bytes())
            raw[len(raw) // 2] ^= 1
            path.write_bytes(raw)
            with pytest.raises(JobError, match="damaged"):
                bring_back(record)
    if not serves:
        with pytest.raises(JobError, match="cannot reach"):
            bring_back(record)
    assert sorted(os.listdir(images)) == before
    assert os.listdir(images.parent) == [images.name]


def test_what_cannot_be_looked_at_is_not_lost(nodes: Nodes, images: Path, arena: Path) -> None:
    """Nor is it put away for a copy."""
    stored = make_local(images, arena)
    with serving(nodes.keeper):
        done = copy(images, nodes.sender)
        record = record_of(images, done.peer, done.key)
        stored.chmod(0o755)  # an arena has 0700
        assert is_lost(images) == ""
        assert not bring_back(record)
        stored.chmod(0o700)
        stored.rename(stored.with_name("0" * 32))
        assert "lost" in is_lost(images)


def test_a_packed_checkpoint_is_no_dump_that_was_copied(
    images: Path, arena: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CRIU's files would come out of the pack, and those beside it are what is compared."""
    make_local(images, arena)
    drain(images)
    real = read_manifest(images)
    facts = {name: getattr(real, name) for name in ("checkpoint_id", "parent_id", "tasks")}
    for pack, refused in ((None, False), (bytes(16), True)):
        found = SimpleNamespace(**facts, pack=pack)
        monkeypatch.setattr("gpustasis.jobs.dumps.find_manifest", lambda _, found=found: found)
        monkeypatch.setattr(
            "gpustasis.jobs.dumps.open_image", lambda d, _, one: open_image(d, real, one)
        )
        if refused:
            with pytest.raises(ImageError, match="is packed"):
                content_of(images)
        else:
            assert content_of(images)


@contextmanager
def held_by_a_worker(directory: Path) -> Iterator[None]:
    words = [sys.executable, "-c", HOLDER, WORKER_COMM, str(directory)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"holds it\n"
        try:
            yield
        finally:
            process.kill()


def test_memory_is_being_put_back_while_a_worker_holds_the_directory_in_the_arena(
    images: Path, arena: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds that one alone: the image directory is CRIU's."""
    monkeypatch.setattr("gpustasis.streaming.tree.SETTLE_S", 0.2)
    stored = make_local(images, arena)
    tree = Tree(os.getpid())
    with held_by_a_worker(stored):
        assert "is still being put back" in tree.why_not_running(images)
    assert tree.why_not_running(images) == ""
    tree.close()


def test_what_a_worker_holds_in_the_arena_is_waited_for(images: Path, arena: Path) -> None:
    """It has put memory back, and is about to end. Nothing would find its directory later."""
    stored = make_local(images, arena)
    lock = os.open(stored, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_SH)
    ending = threading.Timer(0.5, os.close, (lock,))
    ending.start()
    give_up(images)
    ending.join()
    assert not stored.exists()
    assert not (images / ARENA_MARKER).exists()


def test_a_drain_that_was_killed_in_its_last_steps_is_ended(images: Path, arena: Path) -> None:
    """By a prune, which holds the directory alone."""
    stored = make_local(images, arena)
    write_manifest(images, read_manifest(stored))
    lock = try_exclude(images)
    assert lock is not None
    with lock:
        give_up(images)
    assert not stored.exists() and not (images / ARENA_MARKER).exists()
    assert (images / MANIFEST_NAME).exists()


def test_what_stays_held_is_named(
    images: Path, arena: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gpustasis.jobs.neighbour.PATIENCE_S", 0.2)
    stored = make_local(images, arena)
    lock = os.open(stored, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_SH)
    give_up(images)
    assert f"`gpustasis arena discard {stored}`" in caplog.text
    os.close(lock)


@pytest.fixture
def drained_but_for_its_last_step(
    images: Path, arena: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], Path]:
    def make() -> Path:
        stored = make_local(images, arena)
        marker = (images / ARENA_MARKER).read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr("gpustasis.draining.drain.recycle", lambda arena: [])
            drain(images)
        (images / ARENA_MARKER).write_bytes(marker)
        (images / ARENA_MARKER).chmod(0o600)
        assert stored.exists()
        return stored

    return make


def test_a_dump_whose_drain_was_killed_in_its_last_step_leaves_no_memory(
    images: Path, drained_but_for_its_last_step: Callable[[], Path]
) -> None:
    stored = drained_but_for_its_last_step()
    give_up(images)
    assert not stored.exists()
