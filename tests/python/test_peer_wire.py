# SPDX-License-Identifier: Apache-2.0
"""What nodes may say to each other, and must not: with a right certificate, and without one; and
the file that names them."""

from __future__ import annotations

import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpustasis.errors import PeerError
from gpustasis.image.peer_record import PEER_RECORD
from gpustasis.image.store import trash_name
from gpustasis.image.verification import verify_directory
from gpustasis.peers import copies, wire
from gpustasis.peers.config import Address, load, parse, parse_address
from gpustasis.peers.copies import Copies
from gpustasis.peers.copying import copy, fetch, require_peer
from gpustasis.streaming.records import STREAM_MAGIC, Encoder, Header, Kind
from support.certificates import Authority
from support.local_checkpoints import make_local
from support.peers import KEY, ORDER, Nodes, free_port, serving, write_config


@pytest.fixture
def speak(nodes: Nodes, keeper: Copies) -> Iterator[wire.Connection]:
    assert nodes.sender.peer is not None
    with wire.connect(nodes.sender.peer, nodes.sender) as connection:
        yield connection


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ({"version": 2, "ask": "list"}, "version 2 is not spoken"),
        ({"version": 1, "ask": "burn"}, "nothing is known of 'burn'"),
        ({"version": 1, "ask": ["list"]}, "nothing is known"),
        ({"version": 1, "ask": "have", "keys": "../../etc"}, "no names of copies"),
        ({"version": 1, "ask": "have", "keys": ["../.."]}, "no names of copies"),
        ({"version": 1, "ask": "have", "keys": [KEY] * 201}, "no names of copies"),
        ({"version": 1, "ask": "fetch", "key": "../../etc"}, "there is no copy"),
        ({"version": 1, "ask": "fetch", "key": 1}, "no name of a copy"),
        ({"version": 1, "ask": "discard", "key": "."}, "there is no copy"),
        ({**ORDER, "key": "../x"}, "not said as it should be"),
        ({**ORDER, "key": KEY + "\n"}, "not said as it should be"),
        ({**ORDER, "parent": "/etc"}, "not said as it should be"),
        ({**ORDER, "parent": KEY}, "there is no copy"),
        ({**ORDER, "bytes": True}, "not said as it should be"),
        ({**ORDER, "bytes": -1}, "not said as it should be"),
        ({**ORDER, "bytes": 1 << 60}, "not said as it should be"),
        ({**ORDER, "taken": "x"}, "not said as it should be"),
        ({**ORDER, "store": "s" * 5000}, "not said as it should be"),
        ({**ORDER, "name": 7}, "not said as it should be"),
    ],
)
def test_requests_that_are_refused(
    speak: wire.Connection, keeper: Copies, said: dict[str, object], answer: str
) -> None:
    speak.say(said)
    with pytest.raises(PeerError, match=answer):
        speak.hear()
    assert os.listdir(keeper.directory) == []


def test_a_message_that_is_too_long(speak: wire.Connection) -> None:
    speak.write(struct.pack("<I", 1 << 30))
    with pytest.raises(PeerError, match="what is no message"):
        speak.hear()


@pytest.mark.parametrize("raw", [b"[]", b"{", b"\xff\xff", b"[" * 5000, b"7"])
def test_a_message_that_is_none(speak: wire.Connection, raw: bytes) -> None:
    speak.write(struct.pack("<I", len(raw)) + raw)
    with pytest.raises(PeerError, match="what is no message"):
        speak.hear()


def stream(connection: wire.Connection, *files: tuple[str, bytes], cut: bool = False) -> None:
    """Send these; a name may be none."""
    encoder = Encoder(STREAM_MAGIC, Header(stream_id=bytes(16), left_running=True))
    connection.write(encoder.header)
    for name, content in files:
        entry = struct.pack("<IIQ", 0o600, 0, len(content)) + name.encode()
        connection.write(encoder.record(Kind.FILE, entry))
        connection.write(encoder.record(Kind.DATA, content))
    if not cut:
        connection.write(encoder.end(len(files), sum(len(content) for _, content in files)))
        connection.write(encoder.record(Kind.LEFT_RUNNING))


@pytest.mark.parametrize(
    ("files", "answer"),
    [
        ([("../x", b"x")], "no name that a file"),
        ([(".x", b"x")], "no name that a file"),
        ([("a/b", b"x")], "no name that a file"),
        ([("a", b"x" * 5000)], "more than the 4096 bytes"),
        ([("a", b"x" * 3000), ("b", b"x" * 3000)], "more than the 4096 bytes"),
        ([("a", b"x"), ("a", b"x")], "comes twice"),
        ([("a", b"x")], "no checkpoint"),
        ([("gpustasis-manifest.img", b"x" * 100)], "no checkpoint|damaged"),
        ([("gpustasis-arena", b"x")], "sends gpustasis-arena, which is of one node"),
        ([("gpustasis-peer-copy", b"x")], "sends gpustasis-peer-copy, which is of one node"),
    ],
)
def test_files_that_are_refused(
    speak: wire.Connection, keeper: Copies, files: list[tuple[str, bytes]], answer: str
) -> None:
    speak.say(ORDER)
    assert speak.hear() == {"ready": True}
    stream(speak, *files)
    with pytest.raises(PeerError, match=answer):
        speak.hear()
    assert os.listdir(keeper.directory) == []
    assert os.listdir(keeper.directory.parent) == [keeper.directory.name]


def test_a_sender_that_dies(nodes: Nodes, keeper: Copies, speak: wire.Connection) -> None:
    speak.say(ORDER)
    speak.hear()
    stream(speak, ("a", b"x"), cut=True)
    assert os.listdir(keeper.directory)
    speak.__exit__(None, None, None)
    end = time.monotonic() + 10
    while os.listdir(keeper.directory) and time.monotonic() < end:
        time.sleep(0.02)
    assert os.listdir(keeper.directory) == []


def test_a_sender_that_stalls_is_told_so(nodes: Nodes) -> None:
    with serving(replace(nodes.keeper, timeout_s=4)) as server:
        assert nodes.sender.peer is not None
        with wire.connect(nodes.sender.peer, nodes.sender) as connection:
            connection.say(ORDER)
            connection.hear()
            with pytest.raises(PeerError, match="stalls"):
                connection.hear()
        assert os.listdir(server.copies.directory) == []


def test_a_keeper_that_stalls(nodes: Nodes, tmp_path: Path, arena: Path) -> None:
    """It has accepted, and says nothing more."""
    make_local(tmp_path / "1", arena)
    context = wire.server_context(nodes.keeper)
    assert nodes.sender.peer is not None
    with socket.create_server(("127.0.0.1", nodes.sender.peer.port)) as listening:
        held: list[ssl.SSLSocket] = []

        def hold() -> None:
            plain, _ = listening.accept()
            held.append(context.wrap_socket(plain, server_side=True))

        thread = threading.Thread(target=hold, daemon=True)
        thread.start()
        with pytest.raises(PeerError, match="stalls: nothing goes for 4 s"):
            copy(tmp_path / "1", replace(nodes.sender, timeout_s=4))
        thread.join(10)
        held[0].close()


def test_a_keeper_that_says_a_byte_now_and_then(nodes: Nodes, tmp_path: Path, arena: Path) -> None:
    """Each of them comes in time; the message does not."""
    make_local(tmp_path / "1", arena)
    context = wire.server_context(nodes.keeper)
    assert nodes.sender.peer is not None
    over = threading.Event()
    with socket.create_server(("127.0.0.1", nodes.sender.peer.port)) as listening:

        def drip() -> None:
            plain, _ = listening.accept()
            with context.wrap_socket(plain, server_side=True) as sock, suppress(OSError):
                sock.send(struct.pack("<I", 1000))
                while not over.wait(0.3):
                    sock.send(b" ")

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        begin = time.monotonic()
        with pytest.raises(PeerError, match="takes more than 4 s for one record"):
            copy(tmp_path / "1", replace(nodes.sender, timeout_s=4))
        assert time.monotonic() - begin < 15
        over.set()
        thread.join(10)


def test_somebody_who_only_connects_keeps_nobody_out(
    nodes: Nodes, keeper: Copies, tmp_path: Path, arena: Path
) -> None:
    make_local(tmp_path / "1", arena)
    assert nodes.sender.peer is not None
    idle = [socket.create_connection(("127.0.0.1", nodes.sender.peer.port)) for _ in range(8)]
    try:
        copy(tmp_path / "1", nodes.sender)
    finally:
        for one in idle:
            one.close()
    assert len(keeper.all()) == 1


# The configuration


@pytest.mark.parametrize(
    ("text", "found"),
    [("a:1", "a:1"), ("10.0.0.1:7411", "10.0.0.1:7411"), ("[::1]:65535", "[::1]:65535")],
)
def test_addresses(text: str, found: str) -> None:
    assert str(parse_address(text)) == found


@pytest.mark.parametrize(
    "text", ["a", "a:0", "a:65536", ":1", "a:b", "::1:5", "a b:1", "a:1\n", ""]
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match="is no host:port"):
        parse_address(text)


BASE = {"certificate": "/c", "key": "/k", "authority": "/a"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"certificate": "c"}, "'certificate' is no absolute path"),
        ({"peer": 5}, "'peer': '5' is no host:port"),
        ({"peer": "here"}, "'peer': 'here' is no host:port"),
        ({"allow": "node1"}, "'allow' is no list"),
        ({"allow": ["a b"]}, "'allow' is no list"),
        ({"keep": 0}, "'keep' is no number from 1"),
        ({"keep": True}, "'keep' is no number"),
        ({"limit": -1}, "'limit' is no number"),
        ({"pear": "a:1"}, "there is no key 'pear'"),
    ],
)
def test_keys_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse({**BASE, **change})


def test_keys_that_are_missing() -> None:
    with pytest.raises(ValueError, match="the key 'key' is missing"):
        parse({"certificate": "/c", "authority": "/a"})


def test_a_file_that_others_may_change_is_refused(tmp_path: Path, nodes: Nodes) -> None:
    path = write_config(tmp_path / "peer.toml", nodes.sender)
    assert load(path).peer == nodes.sender.peer
    path.chmod(0o666)
    with pytest.raises(PeerError, match="others than root could change it"):
        load(path)
    with pytest.raises(PeerError, match="which names the neighbour"):
        load(tmp_path / "none.toml")


def test_a_key_that_others_may_read_is_refused(nodes: Nodes) -> None:
    nodes.sender.key.chmod(0o644)
    with pytest.raises(PeerError, match="its mode must be 0600"):
        require_peer(nodes.sender)


def test_nobody_is_spoken_to_without_the_right_certificate(
    nodes: Nodes, keeper: Copies, tmp_path: Path, arena: Path
) -> None:
    make_local(tmp_path / "1", arena)
    (tmp_path / "false").mkdir()
    false = Authority(tmp_path / "false", "false")
    with pytest.raises(PeerError, match=r"the connection broke off|has closed"):
        copy(tmp_path / "1", nodes.another("sender", false))  # the keeper does not know it
    with pytest.raises(PeerError, match="is not who it should be"):
        copy(tmp_path / "1", replace(nodes.sender, authority=false.certificate))
    assert nodes.sender.peer is not None
    by_name = replace(nodes.sender, peer=Address("localhost", nodes.sender.peer.port))
    with pytest.raises(PeerError, match="is not who it should be"):
        copy(tmp_path / "1", by_name)  # its certificate has another name
    assert keeper.all() == []
    assert not (tmp_path / "1" / PEER_RECORD).exists()


def test_allow_names_nodes(nodes: Nodes, tmp_path: Path, arena: Path) -> None:
    make_local(tmp_path / "1", arena)
    with serving(replace(nodes.keeper, allow=frozenset({"sender"}))) as server:
        with pytest.raises(PeerError, match="is not one of those that the key `allow` names"):
            copy(tmp_path / "1", nodes.another("stranger"))
        assert server.copies.all() == []
        copy(tmp_path / "1", nodes.sender)
        assert len(server.copies.all()) == 1


def test_nobody_is_there(nodes: Nodes, tmp_path: Path, arena: Path) -> None:
    make_local(tmp_path / "1", arena)
    with pytest.raises(PeerError, match="cannot reach the neighbour"):
        copy(tmp_path / "1", replace(nodes.sender, peer=Address("127.0.0.1", free_port())))
    with pytest.raises(PeerError, match="has no `peer`"):
        require_peer(replace(nodes.sender, peer=None))


def test_what_a_killed_server_has_left_goes(nodes: Nodes) -> None:
    place = nodes.keeper.directory
    place.mkdir(mode=0o700)
    for name in (f".{KEY}.part", trash_name()):
        (place / name).mkdir()
        (place / name / "pages-1.img").write_bytes(b"x" * 100)
    (place / f".{KEY}.part.gpustasis").write_text("1\n")
    (place / "notes").write_text("another's\n")
    with serving(nodes.keeper):
        assert os.listdir(place) == ["notes"]


def test_what_takes_long_is_waited_for(
    nodes: Nodes,
    keeper: Copies,
    tmp_path: Path,
    arena: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Longer than a connection may stall: who checks says that it is at work."""

    def slowly(directory: Path, on_progress: Any) -> Any:
        for number in range(8):
            time.sleep(0.75)
            on_progress("gpustasis-7.img", number, 8)
        return verify_directory(directory)

    monkeypatch.setattr(copies, "verify_directory", slowly)
    make_local(tmp_path / "1", arena)
    done = copy(tmp_path / "1", replace(nodes.sender, timeout_s=5))
    assert [one.key for one in keeper.all()] == [done.key]
    assert nodes.sender.peer is not None
    fetch(nodes.sender.peer, nodes.sender, done.key, tmp_path / "back")
    assert (tmp_path / "back" / "inventory.img").exists()


def test_a_slow_rate_is_no_stall(nodes: Nodes, keeper: Copies, tmp_path: Path, arena: Path) -> None:
    make_local(tmp_path / "1", arena, tuple(f"P{number}" for number in range(64)))
    begin, rate = time.monotonic(), 43 << 10
    done = copy(tmp_path / "1", replace(nodes.sender, timeout_s=3), rate=rate)
    assert time.monotonic() - begin > done.bytes / rate * 0.7 > 3
    assert keeper.find(done.key) is not None
