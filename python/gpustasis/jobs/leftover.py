# SPDX-License-Identifier: Apache-2.0
"""Connections that nobody has any more, and the kernel still remembers.

A process that is killed leaves its connections to the kernel, which takes leave of the peers for
some minutes. A connection that is to be restored must not be there: connect(2) fails on it. The
kernel's SOCK_DESTROY (sock_diag(7)), which `ss --kill` uses, ends them.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
from collections.abc import Collection

from gpustasis.errors import JobError
from gpustasis.jobs.network import Connection, owned, remembered

_SOCK_DIAG, _DESTROY = 4, 21  # linux/netlink.h, linux/sock_diag.h
_REQUEST, _ACK = 0x1, 0x4
_ERROR = 2
_HEADER = struct.Struct("=IHHII")
_ALL_STATES = 0xFFFFFFFF
_NO_COOKIE = 0xFFFFFFFF
_TIMEOUT_S = 5.0


def require_unused(connections: Collection[Connection]) -> None:
    """No process of this network namespace has any of them. Raises JobError."""
    if used := owned(connections):
        raise JobError(f"the connection of {min(used)} is in use here: it cannot be restored")


def end(connections: Collection[Connection]) -> None:
    """Those that the kernel remembers of processes that have ended. Raises JobError if it cannot
    forget one."""
    require_unused(connections)
    for connection in sorted(remembered(connections)):
        code = _destroy(connection)
        if code not in {0, errno.ENOENT}:
            raise JobError(
                f"the kernel still has the connection of {connection}, of a process that has ended "
                f"({os.strerror(code)}): try again when it has forgotten it, within minutes"
            )


def _destroy(connection: Connection) -> int:
    """0, or an errno."""
    local, remote = (ipaddress.ip_address(one) for one in (connection.local, connection.remote))
    family = socket.AF_INET if local.version == 4 else socket.AF_INET6
    request = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, _ALL_STATES)
    request += struct.pack("!HH", connection.local_port, connection.remote_port)
    request += local.packed.ljust(16, b"\0") + remote.packed.ljust(16, b"\0")
    request += struct.pack("=III", 0, _NO_COOKIE, _NO_COOKIE)
    size = _HEADER.size + len(request)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as asking:
            asking.settimeout(_TIMEOUT_S)
            asking.send(_HEADER.pack(size, _DESTROY, _REQUEST | _ACK, 1, 0) + request)
            answer = asking.recv(1 << 14)
    except OSError as exc:
        return exc.errno or errno.EIO
    kind = _HEADER.unpack_from(answer)[1]
    if kind != _ERROR:
        return errno.EPROTO
    return -int(struct.unpack_from("=i", answer, _HEADER.size)[0])
