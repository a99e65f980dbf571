# SPDX-License-Identifier: Apache-2.0
"""What a service tells systemd: sd_notify(3), its protocol."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress


def notify(text: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Say "READY=1" or the like; whether anybody wanted to know."""
    place = environ.get("NOTIFY_SOCKET", "")
    if not place.startswith(("/", "@")):
        return False
    address = f"\0{place[1:]}" if place.startswith("@") else place
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.sendto(text.encode(), address)
        return True
    return False


def watchdog_s(environ: Mapping[str, str] = os.environ) -> float | None:
    """How often the watchdog wants to hear of this process; None: never."""
    microseconds = environ.get("WATCHDOG_USEC", "")
    pid = environ.get("WATCHDOG_PID", str(os.getpid()))
    if not microseconds.isdecimal() or int(microseconds) == 0 or pid != str(os.getpid()):
        return None
    return int(microseconds) / 1e6 / 2
