# SPDX-License-Identifier: Apache-2.0
"""How much room copies take, and who looks whether it is there: by pages and inodes, not only by
the lengths of files."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpustasis.errors import PeerError
from gpustasis.peers import copying, room, wire
from gpustasis.peers.config import Config
from gpustasis.peers.copies import Copies, is_key
from gpustasis.peers.copying import copy, fetch
from gpustasis.peers.room import PAGE, Charges, OnDisk, Room, charge, charge_of
from gpustasis.streaming.records import STREAM_MAGIC, Encoder, Header, Kind
from support.local_checkpoints import make_local
from support.peers import KEY, ORDER, Nodes, serving

MIB = 1 << 20


def send_small_files(nodes: Nodes, count: int, large: int = 0) -> str:
    """Files of a byte each, to the keeper, and before them one with so many MiB; why it does not
    keep them."""
    assert nodes.sender.peer is not None
    encoder = Encoder(STREAM_MAGIC, Header(stream_id=bytes(16), left_running=True))
    with wire.connect(nodes.sender.peer, nodes.sender) as connection:
        connection.say({**ORDER, "bytes": 4096 + large * MIB})
        assert connection.hear() == {"ready": True}
        connection.write(encoder.header)
        with suppress(PeerError):  # it may have heard enough
            if large:
                entry = struct.pack("<IIQ", 0o600, 0, large * MIB) + b"large"
                connection.write(encoder.record(Kind.FILE, entry))
            for _ in range(large):
                connection.write(encoder.record(Kind.DATA, bytes(MIB)))
            for number in range(count):
                entry = struct.pack("<IIQ", 0o600, 0, 1) + f"f{number}".encode()
                connection.write(encoder.record(Kind.FILE, entry))
                connection.write(encoder.record(Kind.DATA, b"x"))
            connection.write(encoder.end(count + bool(large), count + large * MIB))
            connection.write(encoder.record(Kind.LEFT_RUNNING))
        with pytest.raises(PeerError) as refused:
            connection.hear()
    return str(refused.value)


@pytest.fixture
def fills(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Config]:
    """fills(bytes): the keeper's configuration, with so much memory beside `reserve`; what comes
    lessens it, as a tmpfs does."""

    def config(size: int) -> Config:
        found = replace(nodes.keeper, reserve=1 << 30)

        def memory() -> dict[str, int]:
            taken = sum(map(charge_of, found.directory.glob(".*.part")))
            return {"MemTotal": 1 << 40, "MemAvailable": (1 << 30) + size - taken}

        monkeypatch.setattr(room, "_meminfo", memory)
        return found

    return config


@pytest.mark.parametrize(("key", "fit", "too_many"), [("limit", 127, 128), ("reserve", 126, 128)])
def test_small_files_are_charged_what_they_take(
    nodes: Nodes, fills: Callable[[int], Config], key: str, fit: int, too_many: int
) -> None:
    """The order speaks of 4096 bytes, and fewer come: in files that take 250 times that."""
    config = replace(nodes.keeper, limit=MIB) if key == "limit" else fills(MIB)
    with serving(config) as server:
        assert "there is room for 1.0 MiB more" in send_small_files(nodes, too_many)
        assert "no checkpoint" in send_small_files(nodes, fit)  # they have room
        assert os.listdir(server.copies.directory) == []


def test_small_files_after_a_large_one_have_the_room_that_is_left(
    nodes: Nodes, fills: Callable[[int], Config]
) -> None:
    """Most of what was promised is there, and lessens the free memory: it does not count twice."""
    with serving(fills(10 * MIB)):
        assert "no checkpoint" in send_small_files(nodes, 200, large=8)
        assert "there is room for 10.0 MiB more" in send_small_files(nodes, 300, large=8)


def test_the_files_of_a_checkpoint_are_counted_at_both_ends(
    nodes: Nodes,
    keeper: Copies,
    tmp_path: Path,
    arena: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert room.MAX_FILES >= 1000 * 20  # what a tree of 1000 processes has, and more
    monkeypatch.setattr(wire, "MAX_FILES", 8)
    assert "sends more than 8 files" in send_small_files(nodes, 9)
    assert "no checkpoint" in send_small_files(nodes, 8)
    monkeypatch.undo()
    make_local(tmp_path / "1", arena)
    monkeypatch.setattr(copying, "MAX_FILES", 1)
    with pytest.raises(PeerError, match="has more than 1 files"):
        copy(tmp_path / "1", nodes.sender)
    monkeypatch.undo()
    done = copy(tmp_path / "1", nodes.sender)
    assert nodes.sender.peer is not None
    monkeypatch.setattr(wire, "MAX_FILES", 1)
    with pytest.raises(PeerError, match="sends more than 1 files"):
        fetch(nodes.sender.peer, nodes.sender, done.key, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_whole_copies_count_by_their_pages(tmp_path: Path) -> None:
    place = tmp_path / KEY
    charges = Charges(tmp_path, is_key)

    def fill(count: int) -> None:
        place.mkdir()
        for number in range(count):
            (place / str(number)).write_bytes(b"x")

    fill(10)
    (tmp_path / "notes").write_bytes(bytes(MIB))  # no copy
    assert charges.total() == PAGE + 10 * 2 * PAGE
    shutil.rmtree(place)
    fill(20)  # another of the same name
    assert charges.total() == PAGE + 20 * 2 * PAGE
    shutil.rmtree(place)
    assert charges.total() == 0


@pytest.mark.parametrize(
    ("size", "pages"), [(0, 1), (1, 2), (PAGE, 2), (PAGE + 1, 3), (1 << 40, (1 << 28) + 1)]
)
def test_what_a_file_takes(size: int, pages: int) -> None:
    assert charge(size) == pages * PAGE


def test_the_next_copy_has_only_what_is_left(nodes: Nodes, tmp_path: Path, arena: Path) -> None:
    """Also for a server that has found the first one there."""
    make_local(tmp_path / "1", arena)
    with serving(nodes.keeper):
        first = Path(copy(tmp_path / "1", nodes.sender).peer_directory)
    plain = sum(path.stat().st_size for path in first.iterdir())
    make_local(tmp_path / "2", arena, ("C", "D"))
    # By the lengths of files there would be room.
    with (
        serving(replace(nodes.keeper, limit=plain + charge_of(first))) as server,
        pytest.raises(PeerError, match="there is room"),
    ):
        copy(tmp_path / "2", nodes.sender)
    assert [one.name for one in server.copies.all()] == ["1"]
    with serving(replace(nodes.keeper, limit=3 * charge_of(first))):
        copy(tmp_path / "2", nodes.sender)


Free = Callable[[int], None]


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Free:
    """free(bytes): so much memory is free from now on."""
    memory = {"MemTotal": 1 << 40}
    monkeypatch.setattr(room, "_meminfo", lambda: memory)

    def set_free(size: int) -> None:
        memory["MemAvailable"] = size

    return set_free


def keeping(nodes: Nodes, directory: Path) -> Config:
    return replace(nodes.keeper, directory=directory, reserve=0)


def test_what_is_there_is_not_counted_twice(nodes: Nodes, tmp_path: Path, free: Free) -> None:
    """What came lessens the free memory: a copy whose last files come has room for them."""
    of_copies = Room(keeping(nodes, tmp_path), lambda: 0)
    free(10 * MIB)
    with of_copies.promised(8 * MIB) as promise:
        for number in range(8):
            promise.file(MIB)
            promise.came(MIB)
            free(10 * MIB - (number + 1) * charge(MIB))
        with pytest.raises(PeerError, match="there is room"), of_copies.promised(3 * MIB):
            pass
        with of_copies.promised(MIB // 2):
            pass
    free(10 * MIB)
    with (
        of_copies.promised(6 * MIB),  # nothing of it is there yet
        pytest.raises(PeerError, match="there is room"),
        of_copies.promised(4 * MIB),
    ):
        pass
    with of_copies.promised(9 * MIB):  # what was promised is given back
        pass


def test_copies_that_come_at_once_have_no_room_twice(
    nodes: Nodes, tmp_path: Path, free: Free
) -> None:
    of_copies = Room(replace(keeping(nodes, tmp_path), limit=8 * MIB), lambda: 2 * MIB)
    free(1 << 40)
    with (
        of_copies.promised(4 * MIB),
        pytest.raises(PeerError, match=r"there is room for 1\.0 MiB"),
        of_copies.promised(2 * MIB),
    ):
        pass


def test_inodes_are_left_for_others(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(f_files=1600, f_favail=101, f_bavail=1 << 40, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: found)
    counts = OnDisk(tmp_path, tmp_path / "back")
    with Room(keeping(nodes, tmp_path), lambda: 0).promised(10) as promise:
        promise.file(1)
        counts.file(1)
        found.f_favail = 100
        for one in (promise, counts):
            with pytest.raises(PeerError, match="no room for more files"):
                one.file(1)
        found.f_files = found.f_favail = 0  # of a file system that does not count them
        promise.file(1)
        counts.file(1)


def test_a_fetch_stops_when_the_disk_has_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(f_files=0, f_favail=0, f_bavail=2, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: found)
    counts = OnDisk(tmp_path, tmp_path / "back")
    counts.file(1)
    with pytest.raises(PeerError, match=r"there is no room for .*/back"):
        counts.file(PAGE + 1)


def test_each_file_of_a_fetch_needs_room(
    nodes: Nodes,
    keeper: Copies,
    tmp_path: Path,
    arena: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the neighbour has said of all of them may be too little."""
    make_local(tmp_path / "1", arena)
    done = copy(tmp_path / "1", nodes.sender)
    charged: list[int] = []

    def refuse(directory: Path, size: int, place: Path) -> None:
        charged.append(size)
        if len(charged) == 3:
            raise PeerError(f"there is no room for {place}")

    monkeypatch.setattr(room, "require_free_bytes", refuse)
    assert nodes.sender.peer is not None
    with pytest.raises(PeerError, match=r"there is no room for .*/back"):
        fetch(nodes.sender.peer, nodes.sender, done.key, tmp_path / "back")
    sizes = {charge(path.stat().st_size) for path in Path(done.peer_directory).iterdir()}
    assert set(charged) <= sizes
    assert not (tmp_path / "back").exists()
