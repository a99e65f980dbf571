# SPDX-License-Identifier: Apache-2.0
"""Two nodes on this host: one that keeps copies of checkpoints in memory, and who sends them."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from gpustasis.peers.config import Address, Config
from gpustasis.peers.serving import Server
from support.certificates import Authority
from support.ports import hold_port, port_of

HOST = "127.0.0.1"
HELD_PORTS = 64  # more than a test has
_held: deque[socket.socket] = deque()

# What a sender says of a copy that is to come.
KEY = f"{'a' * 32}-{'b' * 16}"
ORDER: dict[str, object] = {
    "version": 1,
    "ask": "keep",
    "key": KEY,
    "parent": "",
    "store": "/s",
    "name": "n",
    "taken": 1.0,
    "bytes": 4096,
    "last": True,
}


@dataclass(frozen=True, slots=True)
class Nodes:
    """authority: who certifies them. keeper: the configuration of the node that takes copies;
    sender: of one whose neighbour that is. certificates: the directory of their files."""

    authority: Authority
    keeper: Config
    sender: Config

    def another(self, name: str, authority: Authority | None = None) -> Config:
        """Of one more node that sends to the same neighbour."""
        pair = (authority or self.authority).server(names=[name])
        return replace(self.sender, certificate=pair.certificate, key=pair.key)


def free_port() -> int:
    """At which nobody listens before the test does."""
    _held.append(hold_port(HOST))
    if len(_held) > HELD_PORTS:
        _held.popleft().close()
    return port_of(_held[-1])


def make_nodes(certificates: Path, memory: Path) -> Nodes:
    """memory: a directory on a tmpfs, which the keeper makes."""
    certificates.mkdir()
    authority = Authority(certificates)
    keeper = authority.server(HOST, names=["keeper"])
    sender = authority.server("127.0.0.9", names=["sender"])
    address = Address(HOST, free_port())
    return Nodes(
        authority,
        Config(
            certificate=keeper.certificate,
            key=keeper.key,
            authority=authority.certificate,
            listen=address,
            directory=memory,
            reserve=0,
            timeout_s=10,
        ),
        Config(
            certificate=sender.certificate,
            key=sender.key,
            authority=authority.certificate,
            peer=address,
            timeout_s=10,
        ),
    )


def write_config(path: Path, config: Config) -> Path:
    """As a file that both ends read."""
    lines = [
        f'certificate = "{config.certificate}"',
        f'key = "{config.key}"',
        f'authority = "{config.authority}"',
        f'directory = "{config.directory}"',
        f"reserve = {config.reserve}",
        f"limit = {config.limit}",
        f"keep = {config.keep}",
        f"timeout_s = {config.timeout_s}",
    ]
    lines += [f'peer = "{config.peer}"'] if config.peer else []
    lines += [f'listen = "{config.listen}"'] if config.listen else []
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o600)
    return path


@contextmanager
def serving(config: Config) -> Iterator[Server]:
    """In the block the node takes copies."""
    server = Server(config)
    server.start()
    try:
        yield server
    finally:
        server.close()
