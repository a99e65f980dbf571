# SPDX-License-Identifier: Apache-2.0
"""Who is at the other end of a socket, by what the kernel says, and what that user may ask for.

docs/agent.md, "Who may do what".
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass

from gpustasis.agent.config import Config
from gpustasis.agent.operations import Operation
from gpustasis.errors import AgentError
from gpustasis.task import PROC

_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid: unix(7), SO_PEERCRED
_SO_PEERGROUPS = 59  # asm-generic/socket.h
_MAX_GROUPS = 256  # Python's getsockopt takes no more


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """As it was when it connected. groups: with its first one; of one that is in more than
    _MAX_GROUPS, only that."""

    pid: int
    uid: int
    groups: frozenset[int]

    @property
    def is_root(self) -> bool:
        return self.uid == 0


def peer_of(sock: socket.socket) -> Peer:
    """Raises OSError."""
    pid, uid, gid = _CREDENTIALS.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    raw = b""
    with suppress(OSError):  # they are more
        raw = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MAX_GROUPS)
    groups = struct.unpack(f"{len(raw) // 4}I", raw)
    return Peer(pid=pid, uid=uid, groups=frozenset((gid, *groups)))


def may_connect(peer: Peer, config: Config) -> bool:
    """Root, and who is named in the configuration."""
    return peer.is_root or peer.uid in config.users or bool(peer.groups & config.groups)


def require_same_pids(peer: Peer) -> None:
    """Raise AgentError unless a pid means the same process to the peer as to the agent."""
    try:
        theirs = os.readlink(PROC / str(peer.pid) / "ns/pid")
    except OSError as exc:
        raise AgentError("the client has ended, or is in a pid namespace out of sight") from exc
    if theirs != os.readlink(PROC / "self/ns/pid"):
        raise AgentError(
            "the client is in another pid namespace than the agent, where pids mean other "
            "processes: ask from the host, or name the container"
        )


def may_see(peer: Peer, operation: Operation) -> bool:
    """And cancel it: root all of them, others their own."""
    return peer.is_root or peer.uid == operation.uid
