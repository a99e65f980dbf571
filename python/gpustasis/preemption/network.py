# SPDX-License-Identifier: Apache-2.0
"""What criu leaves in the kernel's packet filter: a table of the connections that it dumped.

criu holds their packets back from the dump on, so that no kernel answers for a process that is
gone, and removes its table at the restore. A checkpoint that is never restored leaves it: an older
checkpoint of the same job has the same connections, and would wait for them for ever.

Source: linux/netfilter/nfnetlink.h, linux/netfilter/nf_tables.h.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from gpustasis.errors import CheckpointError
from gpustasis.files import open_regular

_TABLE = re.compile(rb"\[[a-z]+ [a-z]+ inet (CRIU-[0-9a-f-]{1,40})[ \]]")
_LINE_LIMIT = 1 << 16  # bytes
_NETLINK_NETFILTER = 12
_BATCH_BEGIN, _BATCH_END, _DELETE_TABLE = 0x10, 0x11, 10 << 8 | 2  # 10: NFNL_SUBSYS_NFTABLES
_REQUEST, _ACK = 1, 4
_ERROR = 2  # NLMSG_ERROR
_TABLE_NAME = 1  # NFTA_TABLE_NAME
_INET = 1  # NFPROTO_INET
_TIMEOUT_S = 10.0


def unlock(images: Path) -> list[str]:
    """Remove the tables that the dump into `images` made, as its log says; those that there were.

    Raises CheckpointError if the kernel does not let us.
    """
    return [name for name in sorted(set(_tables(images / "dump.log"))) if _delete(name)]


def _tables(log: Path) -> Iterator[str]:
    try:
        with open_regular(log, os.O_NOFOLLOW) as file:
            while line := file.readline(_LINE_LIMIT):
                if found := _TABLE.search(line):
                    yield found[1].decode()
    except OSError:
        return  # no dump has come so far


def _delete(name: str) -> bool:
    """Whether it was there."""
    attribute = struct.pack("=HH", 4 + len(name) + 1, _TABLE_NAME) + name.encode() + b"\0"
    attribute += bytes(-len(attribute) % 4)
    request = _message(_BATCH_BEGIN, _REQUEST, 0, 10, b"")
    request += _message(_DELETE_TABLE, _REQUEST | _ACK, _INET, 0, attribute)
    request += _message(_BATCH_END, _REQUEST, 0, 10, b"")
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER) as link:
            link.settimeout(_TIMEOUT_S)
            link.send(request)
            answer = link.recv(1 << 16)
    except OSError as exc:
        raise CheckpointError(f"cannot remove criu's table {name}: {exc}") from exc
    kind, code = struct.unpack_from("=4xH10xi", answer)
    if kind != _ERROR or code not in (0, -errno.ENOENT):
        text = os.strerror(-code) if kind == _ERROR else f"the kernel answers with {kind}"
        raise CheckpointError(f"cannot remove criu's table {name}: {text}")
    return bool(code == 0)


def _message(kind: int, flags: int, family: int, resource: int, body: bytes) -> bytes:
    head = struct.pack("=IHHII", 20 + len(body), kind, flags, 0, 0)
    return head + struct.pack("=BB", family, 0) + struct.pack("!H", resource) + body
