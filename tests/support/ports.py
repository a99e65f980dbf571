# SPDX-License-Identifier: Apache-2.0
"""A port that is this test's until it has no more use for it."""

from __future__ import annotations

import socket


def hold_port(host: str = "127.0.0.1") -> socket.socket:
    """The system gives its port to nobody else while this is open, neither to who listens at any
    port nor to who connects. Who names it can listen there with SO_REUSEADDR, as Python's
    create_server and Go do, and while nobody does, connections are refused."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))
    return held


def port_of(held: socket.socket) -> int:
    port: int = held.getsockname()[1]
    return port
