# SPDX-License-Identifier: Apache-2.0
"""The file beside a checkpoint that says that a neighbour has a copy of it in memory.
docs/format.md, "Between nodes"."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from gpustasis.errors import ImageError
from gpustasis.files import open_regular, replace_file

PEER_RECORD = "gpustasis-peer"
_LIMIT = 16 << 10  # bytes
_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRecord:
    """checkpoint: its id, in hex. peer: host:port. node: the name in its certificate. key: what the
    copy is called there. directory: where it is there. time: seconds since 1970. bytes: of its
    files."""

    checkpoint: str
    peer: str
    node: str
    key: str
    directory: str
    time: float
    bytes: int


def write_peer_record(directory: Path, record: PeerRecord) -> None:
    """Raises OSError, also if nobody could read it again: it is too long."""
    raw = json.dumps({"version": _VERSION, **asdict(record)}).encode() + b"\n"
    if len(raw) > _LIMIT:
        raise OSError(f"it would have {len(raw)} bytes, and no more than {_LIMIT} are read")
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        replace_file(fd, PEER_RECORD, raw, 0o600)
    finally:
        os.close(fd)


def find_peer_record(directory: Path, checkpoint_id: bytes) -> PeerRecord | None:
    """Of that checkpoint, in its image directory; None: there is none, or it is another one's.
    Raises ImageError if it cannot be read."""
    path = directory / PEER_RECORD
    try:
        with open_regular(path, os.O_NOFOLLOW) as file:
            raw = file.read(_LIMIT + 1)
        found = json.loads(raw[:_LIMIT].decode("utf-8"))
        if not isinstance(found, dict) or found.pop("version", None) != _VERSION:
            raise ValueError("it is of another version")
        types = {"time": (int, float), "bytes": (int,)}
        if set(found) != {one.name for one in fields(PeerRecord)} or not all(
            type(value) in types.get(name, (str,)) for name, value in found.items()
        ):
            raise ValueError("it says something else than it should")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as exc:
        raise ImageError(f"{path} cannot be read: {exc}") from exc
    return PeerRecord(**found) if found["checkpoint"] == checkpoint_id.hex() else None
