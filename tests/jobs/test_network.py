# SPDX-License-Identifier: Apache-2.0
"""What a rank has of TCP is found, and locked, with the kernel and nft."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from gpustasis.criu.find import Criu
from gpustasis.jobs.checkpointing import Checkpointing
from gpustasis.jobs.local import Local
from gpustasis.jobs.network import Connection, look
from gpustasis.jobs.place import place_of
from gpustasis.jobs.rank import Context, Options
from gpustasis.jobs.records import Keys
from gpustasis.jobs.work import Order
from support.packet_filters import put_nft

CRIU = Criu(program=Path("/none"), root=None, version=(4, 2), origin="test")
ADDRESSES = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}


@pytest.mark.parametrize("families", [(socket.AF_INET,), (socket.AF_INET6,), tuple(ADDRESSES)])
def test_sockets_of_each_family_are_found(families: tuple[socket.AddressFamily, ...]) -> None:
    opened: list[socket.socket] = []
    ports, pairs = set(), set()
    try:
        for family in families:
            address = ADDRESSES[family]
            opened.append(socket.create_server((address, 0), family=family))
            port = opened[-1].getsockname()[1]
            opened.append(socket.create_connection((address, port)))  # nobody has accepted it
            own = opened[-1].getsockname()[1]
            ports.add(port)
            pairs |= {
                Connection(address, own, address, port),
                Connection(address, port, address, own),
            }
        found = look([os.getpid()])
        assert ports <= found.ports
        assert pairs <= found.connections
    finally:
        for one in opened:
            one.close()
    found = look([os.getpid()])
    assert not ports & found.ports
    assert not pairs & found.connections


def test_what_comes_between_the_look_and_the_lock_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_nft(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    place = place_of("job", 0, tmp_path / "kept", tmp_path / "run")
    place.make()
    context = Context(place, 1, Local(tmp_path / "store"), Keys("job"), Options(criu=CRIU))
    context.note(pid=os.getpid())
    part = Checkpointing(context, Order(1, leave_running=True, restores=0))
    with socket.create_server(("127.0.0.1", 0)) as first:
        part._seen = look([os.getpid()])
        with socket.create_server(("127.0.0.1", 0)) as later:
            try:
                part.lock_network()
                assert context.state.network
                ports = {one.getsockname()[1] for one in (first, later)}
                assert ports <= part._network.ports
                for one in (first, later):  # what is sent to connect is dropped
                    with socket.socket() as client:
                        client.settimeout(0.3)
                        with pytest.raises(TimeoutError):
                            client.connect(one.getsockname())
            finally:
                context.unlock_network()
            for one in (first, later):
                socket.create_connection(one.getsockname()).close()
