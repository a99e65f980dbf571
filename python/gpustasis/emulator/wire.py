"""The one request that Python makes of the daemon: administration, text in and JSON out."""

from __future__ import annotations

import json
import socket
import struct
from pathlib import Path
from typing import Any

from gpustasis.errors import EmulatorError

# As in src/driver_emulator/wire.hpp.
_MAGIC = 0x656D7502
_ADMIN = 3
_MAX_TEXT = 64 * 1024
_PATIENCE_S = 10.0


def is_running(path: Path) -> bool:
    """Say whether something accepts connections at `path`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        try:
            connection.connect(str(path))
        except OSError:
            return False
        return True


def administer(path: Path, text: str) -> dict[str, Any]:
    """Send one administrative request and return the daemon's answer.

    Raises EmulatorError if no daemon answers at `path`, or if it refuses the request.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(_PATIENCE_S)
        try:
            connection.connect(str(path))
            connection.sendall(struct.pack("=II", _MAGIC, _ADMIN) + text.encode())
            reply = connection.recv(4 * _MAX_TEXT)
        except OSError as exc:
            raise EmulatorError(
                f"no emulator answers at {path} ({exc.strerror or exc}): "
                "start one with `gpustasis emulator start`"
            ) from exc
    if not reply:
        raise EmulatorError(f"what listens at {path} is not this version's emulator")
    answer: dict[str, Any] = json.loads(reply)
    if not answer["ok"]:
        raise EmulatorError(str(answer["error"]))
    return answer
