# SPDX-License-Identifier: Apache-2.0
"""A neighbour that lies to who asks it, and whoever comes to the port of one that keeps copies."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from gpustasis.errors import PeerError
from gpustasis.peers import copying, wire
from gpustasis.peers import serving as at_work
from gpustasis.peers.copies import Copies
from gpustasis.peers.copying import copy, fetch, list_copies, require_peer
from gpustasis.peers.slots import Slots
from support.local_checkpoints import make_local
from support.peers import HOST, KEY, Nodes, serving

COPY: dict[str, object] = {
    "key": KEY,
    "node": "n",
    "store": "/s",
    "name": "n",
    "parent": "",
    "taken": 1.0,
    "received": 2.0,
    "bytes": 4096,
}


@contextmanager
def lying(nodes: Nodes, *answers: Mapping[str, object]) -> Iterator[None]:
    """In the block a node with the right certificate says this to the first who asks."""
    context = wire.server_context(nodes.keeper)
    assert nodes.sender.peer is not None
    with socket.create_server((HOST, nodes.sender.peer.port)) as listening:

        def answer() -> None:
            plain, _ = listening.accept()
            with suppress(PeerError), wire.accept(plain, context, nodes.keeper) as connection:
                connection.hear()
                for one in answers:
                    connection.say(dict(one))
                connection.hear()  # until the other end is gone

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield
        thread.join(10)


def listed(nodes: Nodes) -> list[str]:
    assert nodes.sender.peer is not None
    return [one.key for one in list_copies(nodes.sender.peer, nodes.sender)]


def test_what_a_neighbour_may_say(nodes: Nodes) -> None:
    with lying(nodes, {"copy": COPY}, {"copy": {**COPY, "taken": 7}}, {"end": True}):
        assert listed(nodes) == [KEY, KEY]


@pytest.mark.parametrize(
    "change",
    [
        {"key": "../x"},
        {"parent": "/etc"},
        {"node": 7},
        {"node": "n" * 1025},
        {"store": "s" * 4096},
        {"store": ["s"], "name": ["n"]},
        {"name": None},
        {"taken": True},
        {"taken": float("nan")},
        {"received": "x"},
        {"received": -1},
        {"received": float("inf")},
        {"bytes": 0},
        {"bytes": True},
        {"bytes": 1 << 52},
        {"more": 1},
    ],
)
def test_what_is_no_copy(nodes: Nodes, change: dict[str, object]) -> None:
    with (
        lying(nodes, {"copy": {**COPY, **change}}, {"end": True}),
        pytest.raises(PeerError, match="says what is no copy"),
    ):
        listed(nodes)


def test_a_list_that_is_too_long(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_MAX_LISTING", 20_000)
    long = {"copy": {**COPY, "store": "s" * 4000}}
    with lying(nodes, *[long] * 4, {"end": True}):
        assert len(listed(nodes)) == 4
    with (
        lying(nodes, *[long] * 5, {"end": True}),
        pytest.raises(PeerError, match=r"says more than 0\.0 MiB of its copies"),
    ):
        listed(nodes)


def test_a_copy_that_the_disk_has_no_room_for(nodes: Nodes, tmp_path: Path) -> None:
    """Before anything of it comes, and with what it is built on."""
    parent = f"{'c' * 32}-{'d' * 16}"
    large = 1 << 51
    answers: list[dict[str, object]] = [
        {"copy": {**COPY, "parent": parent}},
        {"copy": {**COPY, "key": parent, "bytes": large}},
        {"end": True},
    ]
    assert nodes.sender.peer is not None
    out = tmp_path / "back"
    with (
        lying(nodes, *answers),
        pytest.raises(PeerError, match=rf"no room for {out}: .* it needs 2147483648\.0 MiB"),
    ):
        fetch(nodes.sender.peer, nodes.sender, KEY, out)
    assert not out.exists()


# Whoever comes to the port


@contextmanager
def silent(nodes: Nodes, host: str, count: int) -> Iterator[list[socket.socket]]:
    """In the block so many connections from `host` are there, and say nothing."""
    assert nodes.sender.peer is not None
    place = (HOST, nodes.sender.peer.port)
    with ExitStack() as held:
        yield [
            held.enter_context(socket.create_connection(place, source_address=(host, 0)))
            for _ in range(count)
        ]


def test_who_says_nothing_keeps_no_node_out(
    nodes: Nodes, keeper: Copies, tmp_path: Path, arena: Path
) -> None:
    make_local(tmp_path / "1", arena)
    with silent(nodes, "127.0.0.2", 2 * at_work.MAX_CONNECTIONS):
        copy(tmp_path / "1", nodes.sender)
    assert len(keeper.all()) == 1


def test_many_hosts_that_say_nothing_keep_no_node_out(nodes: Nodes, keeper: Copies) -> None:
    with ExitStack() as held:
        for number in range(2, 12):
            held.enter_context(silent(nodes, f"127.0.0.{number}", 10))
        require_peer(nodes.sender)


def test_a_handshake_does_not_last(
    nodes: Nodes, keeper: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that goes on, a byte now and then; and its slot is free again."""
    monkeypatch.setattr(wire, "_ACCEPT_S", 0.5)
    for _ in range(2):
        with silent(nodes, HOST, at_work.MAX_OF_HOST) as socks:
            begin = time.monotonic()
            socks[0].settimeout(10)
            with suppress(OSError):
                socks[0].sendall(b"\x16\x03\x01\x02\x00")
                for _ in range(200):
                    time.sleep(0.1)
                    socks[0].sendall(b"\x01")
            assert time.monotonic() - begin < 10
            for one in socks[1:]:
                one.settimeout(10)
                with suppress(ConnectionError):
                    assert one.recv(1) == b""
    end = time.monotonic() + 10
    while True:
        with suppress(PeerError):
            require_peer(nodes.sender)
            return
        assert time.monotonic() < end
        time.sleep(0.05)


def test_who_finds_no_slot_can_ask_again(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arena: Path
) -> None:
    """Nothing was refused for good: who owes a neighbour a word tries it later."""
    monkeypatch.setattr(at_work, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(wire, "_LINGER_S", 60.0)  # who is refused stays for as long as it likes
    assert nodes.sender.peer is not None
    stranger = nodes.another("stranger")
    with serving(replace(nodes.keeper, allow=frozenset({"sender"}))):
        with wire.connect(nodes.sender.peer, nodes.sender) as first:
            first.say({"version": 1, "ask": "fetch", "key": KEY})
            with pytest.raises(PeerError, match="no copy"):
                first.hear()  # it is refused, and still connected
            with pytest.raises(PeerError) as failed:
                require_peer(nodes.sender)
            assert not isinstance(failed.value, wire.RefusedError)
        # One who may not ask takes none.
        with wire.connect(nodes.sender.peer, stranger) as other:
            with pytest.raises(wire.RefusedError, match="the key `allow`"):
                other.hear()
            end = time.monotonic() + 10
            while True:
                with suppress(PeerError):
                    require_peer(nodes.sender)
                    break
                assert time.monotonic() < end
                time.sleep(0.05)


def test_who_is_known_has_no_place_among_those_who_are_not(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(at_work, "MAX_OF_HOST", 1)
    assert nodes.sender.peer is not None
    order = {"version": 1, "ask": "keep", "last": True, **COPY}
    with serving(nodes.keeper), wire.connect(nodes.sender.peer, nodes.sender) as first:
        first.say(order)
        assert first.hear() == {"ready": True}  # and stays
        require_peer(nodes.sender)


def test_slots() -> None:
    slots = Slots(5, 2)
    assert [slots.take("10.0.0.1") for _ in range(3)] == [True, True, False]
    # One host has a /64 of IPv6.
    addresses = ("2001:db8::1", "2001:db8::2:3", "2001:db8::4", "2001:db8:0:1::1")
    assert [slots.take(host) for host in addresses] == [True, True, False, True]
    assert not slots.take("10.0.0.2")  # there are no more
    slots.give("2001:db8::2:3")
    assert slots.take("2001:db8::9")
    slots.give("10.0.0.1")
    assert slots.take("::ffff:10.0.0.2")


# Names


@pytest.mark.parametrize("name", ["*.example", "*"])
def test_a_certificate_of_many_nodes_names_none(nodes: Nodes, keeper: Copies, name: str) -> None:
    with pytest.raises(wire.RefusedError, match=r"names no one node, but \*"):
        require_peer(nodes.another(name))
    require_peer(nodes.sender)
    with pytest.raises(PeerError, match="names no one node"):
        wire.name_of({"subject": ((("commonName", name),),)})
    found = wire.name_of({"subjectAltName": (("DNS", "gpu1"), ("DNS", "*.example"))})
    assert found == "gpu1"
