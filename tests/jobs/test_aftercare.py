# SPDX-License-Identifier: Apache-2.0
"""Dumps of a rank that are in memory: what is in them, whatever they are stored as; how a keeper
drains them; and how they are pruned."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gpustasis._core import ARENA_MARKER, MANIFEST_NAME, PARENT_LINK
from gpustasis.draining.drain import Drained, drain
from gpustasis.draining.room import contents_of
from gpustasis.errors import ImageError, JobError
from gpustasis.image.verification import OnProgress
from gpustasis.jobs import epochs, kept
from gpustasis.jobs.aftercare import Aftercare, tended
from gpustasis.jobs.dumps import (
    DumpRecord,
    content_of,
    identity_of,
    problems_of,
    require_same,
    stamp_of,
)
from gpustasis.jobs.lead import digest_of
from gpustasis.jobs.messages import Phase
from gpustasis.jobs.neighbour import fetched_below, is_lost, remove_fetched
from gpustasis.jobs.network import Network
from gpustasis.jobs.place import Place, place_of
from gpustasis.jobs.rank import Context, Options
from gpustasis.jobs.records import Keys, Plan, phase_text
from gpustasis.jobs.store import Put, Store
from gpustasis.peers.copies import FETCHED, Copy
from gpustasis.peers.copying import copy
from support.criu_roots import newest_criu
from support.job_ranks import wait_for
from support.local_checkpoints import make_local
from support.peers import Nodes, make_nodes, serving, write_config
from support.priorities import priority


@pytest.fixture
def place(tmp_path: Path) -> Place:
    found = place_of("job", 0, tmp_path / "kept", tmp_path / "run")
    found.make()
    return found


@dataclass(slots=True)
class Seen:
    """What an Aftercare has said, and what it is told of an open epoch."""

    open: Path | None = None
    drained: list[tuple[Path, str, str]] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)

    def of(self, place: Place) -> Aftercare:
        return Aftercare(
            place,
            is_open=lambda images: images == self.open,
            drained=lambda *facts: self.drained.append(facts),
        )


def is_durable(images: Path) -> bool:
    return (images / MANIFEST_NAME).exists() and not (images / ARENA_MARKER).exists()


def test_what_is_in_a_dump_is_the_same_when_it_is_drained(place: Place, arena: Path) -> None:
    first = make_local(place.images(1), arena, ("A", "b", "0", "b", "c"))
    make_local(place.images(2), arena, ("A", "b", "D", "0", "0"), parent=first)
    before = [content_of(place.images(number)) for number in (1, 2)]
    assert before[0] != before[1]
    stamps = [stamp_of(place.images(number)) for number in (1, 2)]
    drain(place.images(2))
    assert [is_durable(place.images(number)) for number in (1, 2)] == [True, True]
    assert [content_of(place.images(number)) for number in (1, 2)] == before
    assert stamps != [stamp_of(place.images(number)) for number in (1, 2)]


@pytest.mark.parametrize("durable", [False, True])
def test_another_byte_or_file_is_another_content(place: Place, arena: Path, durable: bool) -> None:
    images = place.images(1)
    images.parent.mkdir(exist_ok=True)
    make_local(images, arena)
    (images / "pages-1.img").write_bytes(b"pages")
    record = record_for(images)
    if durable:
        drain(images)
    for name in ("dump.log", "stats-dump", "gpustasis-dump.json", "gpustasis-peer", FETCHED):
        (images / name).write_bytes(b"written later")
    require_same(record)
    (images / "pages-1.img").write_bytes(b"Pages")
    with pytest.raises(JobError, match="is not what was committed"):
        require_same(record)
    (images / "pages-1.img").write_bytes(b"pages")
    (images / "pages-2.img").write_bytes(b"")
    with pytest.raises(JobError, match="is not what was committed"):
        require_same(record)
    (images / "pages-2.img").unlink()
    assert problems_of(record) == []


def test_what_is_in_other_memory_is_another_content(place: Place, arena: Path) -> None:
    contents = set()
    for number, words in enumerate((("A", "b"), ("b", "A"), ("A", "b", "0"), ("A", "B")), 1):
        make_local(place.images(number), arena, words)
        contents.add(content_of(place.images(number))[1])
    assert len(contents) == 4


def record_for(images: Path, peer: str = "127.0.0.1:1", key: str = "") -> DumpRecord:
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
        key=key or f"{identity}-{16 * '0'}",
    )


def test_what_an_earlier_keeper_has_left_is_drained(place: Place, arena: Path) -> None:
    seen = Seen(open=place.images(3))
    first = make_local(place.images(1), arena)
    make_local(place.images(2), arena, ("A", "C"), parent=first)
    make_local(place.images(3), arena, ("D",))  # of the epoch under way
    stamps = [stamp_of(place.images(number)) for number in (1, 2)]
    with tended(seen.of(place), seen.warned.append):
        pass
    assert [is_durable(place.images(number)) for number in (1, 2, 3)] == [True, True, False]
    assert [(one[0], one[1]) for one in seen.drained] == [
        (place.images(number), stamp) for number, stamp in zip((1, 2), stamps, strict=True)
    ]
    assert [one[2] for one in seen.drained] == [stamp_of(place.images(n)) for n in (1, 2)]
    assert seen.warned == []


def test_a_drain_that_fails_is_tried_again_and_told(
    place: Place, arena: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpustasis.jobs.aftercare._AGAIN_S", 0.1)
    seen, images = Seen(), place.images(1)
    make_local(images, arena)
    (images / "gpustasis-7.img").mkdir()  # it cannot be written
    with tended(seen.of(place), seen.warned.append):
        pass
    (warned,) = seen.warned
    assert f"{images} is in memory only, here and at the neighbour" in warned
    aftercare = seen.of(place)
    aftercare.wake()
    assert not is_durable(images)
    (images / "gpustasis-7.img").rmdir()
    wait_for(lambda: is_durable(images), "the drain")
    assert aftercare.wait() == {}
    aftercare.close()


def test_what_is_lost_is_tried_once(
    place: Place, arena: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen, images = Seen(), place.images(1)
    stored = make_local(images, arena)
    stored.rename(stored.with_name("0" * 32))
    assert "lost" in is_lost(images)
    aftercare = seen.of(place)
    for _ in range(3):
        aftercare.wake()
        assert aftercare.wait() == {}
    aftercare.close()
    assert caplog.text.count("is not drained") == 1
    with pytest.raises(ImageError):
        stamp_of(images)


def test_a_keeper_that_ends_stops_a_drain_and_the_checkpoint_is_whole(
    place: Place, arena: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = partial(drain, rate=1 << 20, compress=False)  # bytes in a second: it takes 64 s
    monkeypatch.setattr("gpustasis.jobs.aftercare.drain", slow)
    images = place.images(1)
    make_local(images, arena, ("A", "b", "c", "D") * 4000)
    before = content_of(images)
    aftercare = Seen().of(place)
    aftercare.wake()
    wait_for(lambda: aftercare.is_at(images), "the drain")
    begin = time.monotonic()
    aftercare.close()
    assert time.monotonic() - begin < 32
    assert not is_durable(images)
    assert content_of(images) == before
    drain(images)
    assert is_durable(images)
    assert content_of(images) == before


def test_a_keepers_drain_is_in_no_jobs_way(
    place: Place, arena: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, before = [], priority()

    def look(images: Path, **options: Any) -> Drained:
        found.append(priority())
        return drain(images, **options)

    monkeypatch.setattr("gpustasis.jobs.aftercare.drain", look)
    make_local(place.images(1), arena)
    with tended(Seen().of(place), pytest.fail):
        pass
    assert found == ["nice 19, disk 2/7"]
    assert priority() == before  # the keeper's own, and the rank's


def test_the_name_of_what_is_drained_is_on_the_disk_before_memory_is_given_up(
    place: Place, arena: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, fsync = place.images(1), os.fsync
    synced: list[tuple[str, bool]] = []

    def spy(descriptor: int) -> None:
        fsync(descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        synced.append((path, (images / ARENA_MARKER).exists()))

    make_local(images, arena)
    monkeypatch.setattr(os, "fsync", spy)
    with tended(Seen().of(place), pytest.fail):
        pass
    assert is_durable(images)
    assert (str(place.directory), True) in synced


def test_without_anything_in_memory_there_is_nothing_to_do(place: Place) -> None:
    aftercare = Seen().of(place)
    begin = time.monotonic()
    aftercare.wake()
    assert aftercare.wait() == {}
    assert time.monotonic() - begin < 5
    aftercare.close()


def test_the_stamp_of_a_drained_dump_is_the_one_that_is_noted(
    new_store: Callable[[], Store], place: Place, arena: Path
) -> None:
    keys = Keys("job", top=f"/gpustasis/test-{place.directory.parent.parent.name}")
    context = Context(place, 1, new_store(), keys, Options(criu=newest_criu()))
    images = place.images(5)
    make_local(images, arena)
    context.note(pid=os.getpid())
    context.note(last=(5, f"digest {stamp_of(images)}"))
    context.aftercare.wake()
    assert context.aftercare.wait() == {}
    context.aftercare.close()
    assert context.state.stamp == f"digest {stamp_of(images)}"
    assert place.load().stamp == context.state.stamp  # the next keeper builds on it, too
    # Nor is it noted of another checkpoint.
    make_local(place.images(6), arena, ("X",))
    context.note(last=(5, "digest another"))
    again = Context(place, 1, new_store(), keys, Options(criu=newest_criu()))
    again.aftercare.wake()
    again.aftercare.wait()
    again.aftercare.close()
    assert again.state.stamp == "digest another"


def test_fetched_copies_go_when_nothing_is_built_on_them(place: Place) -> None:
    keys = [f"{digit * 32}-{16 * '0'}" for digit in "abc"]
    for name, parent in zip([place.images(1).name, *keys], [*keys, ""], strict=True):
        (place.directory / name).mkdir()
        if parent:
            (place.directory / name / PARENT_LINK).symlink_to(f"../{parent}")
    below = fetched_below(place.images(1))
    assert [one.name for one in below] == keys
    assert remove_fetched(below, set()) == []  # the dump is still there
    (place.images(1) / PARENT_LINK).unlink()
    assert [one.name for one in remove_fetched(below, {"c" * 32})] == keys[:2]
    assert [one.name for one in remove_fetched(below[2:], set())] == keys[2:]
    assert fetched_below(place.images(1)) == []


@pytest.fixture
def nodes(tmp_path: Path, arena: Path) -> Nodes:
    arena.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return make_nodes(tmp_path / "certificates", arena.parent / "peers")


@pytest.mark.parametrize("durable", [False, True])
def test_a_dump_that_is_pruned_is_given_up_in_memory_and_at_the_neighbour(
    new_store: Callable[[], Store],
    place: Place,
    arena: Path,
    nodes: Nodes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    durable: bool,
) -> None:
    monkeypatch.setenv(
        "GPUSTASIS_PEER_CONFIG", str(write_config(tmp_path / "peer.toml", nodes.sender))
    )
    store, keys = new_store(), Keys("job", top=f"/gpustasis/test-{tmp_path.name}")
    plan = Plan(world=1, leave_running=True)
    with serving(nodes.keeper) as server:
        for number, word in ((1, "A"), (2, "B"), (3, "C")):
            assert epochs.begin(store, keys, plan) == number
            images = place.images(number)
            make_local(images, arena, (word,))
            done = copy(images, nodes.sender, replaces=False)
            text = record_for(images, done.peer, done.key).to_text()
            committed = phase_text(plan, Phase.COMMITTED, digest_of({0: text}))
            store.write([], [Put(keys.record(number, 0), text), Put(keys.phase(number), committed)])
            if durable:
                drain(images)
        assert len(server.copies.all()) == 3
        if not durable:  # as long as all may be in memory alone, none counts for one that is kept
            assert kept.prune(store, keys, 1) == []
            drain(place.images(3))
        pruned = kept.prune(store, keys, 1)
        gone, stays = [place.images(1), place.images(2)], place.images(3)
        assert sorted(name for one in pruned for name in one.directories) == list(map(str, gone))
        assert [one.name for one in server.copies.all()] == [stays.name]
    assert not any(one.exists() for one in gone)
    assert not contents_of(arena).kept
    assert [one.problems for one in kept.verify(epochs.standing(store, keys, 3))] == [[]]


@pytest.mark.parametrize("fetched", [False, True])
def test_a_dump_that_was_fetched_goes_on_the_host_that_has_fetched_it(
    place: Place, arena: Path, fetched: bool
) -> None:
    images = place.images(1)
    make_local(images, arena)
    record = replace(record_for(images), host="another")
    drain(images)
    if fetched:
        (images / FETCHED).touch()
    assert kept._remove(record, 1, "job", set()) == ([str(images)] if fetched else [])
    assert images.exists() != fetched


def test_a_dump_that_others_are_built_on_is_copied_once_more_when_it_is_drained(
    place: Place, arena: Path, nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "GPUSTASIS_PEER_CONFIG", str(write_config(tmp_path / "peer.toml", nodes.sender))
    )
    # As of a dump, the bytes of a drain are others: here those in memory are compressed.
    monkeypatch.setattr("gpustasis.jobs.aftercare.drain", partial(drain, compress=False))
    images, aftercare = place.images(1), Seen().of(place)
    make_local(images, arena, ("a", "b", "c", "d"))
    begun, goes_on = threading.Event(), threading.Event()
    with serving(nodes.keeper) as server:
        first = copy(images, nodes.sender, replaces=False)
        keep = server.copies.keep

        def held(
            one: Copy, take: Callable[[Path], int], on_progress: OnProgress, *, last: bool
        ) -> Copy:
            begun.set()
            assert goes_on.wait(60)
            return keep(one, take, on_progress, last=last)

        monkeypatch.setattr(server.copies, "keep", held)
        aftercare.committed(images, first.peer, first.key, is_base=True)
        aftercare.wake()
        assert begun.wait(60)
        assert is_durable(images)
        # Two copies of one dump at the same time would be refused: whoever makes another waits.
        with (
            pytest.raises(JobError, match="is still being copied"),
            aftercare.no_copy(lambda: False),
        ):
            pass
        goes_on.set()
        with aftercare.no_copy(lambda: True):
            found = server.copies.all()
        assert [one.checkpoint for one in found] == [first.key[:32]] * 2
        contents = {content_of(server.copies.directory / one.key) for one in found}
        assert contents == {content_of(images)}
        assert aftercare.wait() == {}
        aftercare.close()
