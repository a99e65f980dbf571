# SPDX-License-Identifier: Apache-2.0
"""The configuration of both ends: one TOML file, which only root can change. docs/operating.md, "A
copy on a neighbour", has the table."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from gpustasis.errors import PeerError
from gpustasis.files import read_trusted

DEFAULT_FILE = Path("/etc/gpustasis/peer.toml")
CONFIG_VARIABLE = "GPUSTASIS_PEER_CONFIG"
_MAX_BYTES = 1 << 20
_ADDRESS = re.compile(
    r"(?P<host>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9][A-Za-z0-9.-]*):(?P<port>[0-9]{1,5})"
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.:-]{0,252}")
_BOUNDS = {
    "limit": (0, 1 << 52),
    "reserve": (0, 1 << 52),
    "keep": (1, 1000),
    "timeout_s": (1, 86400),
}


@dataclass(frozen=True, slots=True)
class Address:
    """host: a name, or an address without brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Of "host:port" or "[address]:port". Raises ValueError."""
    found = _ADDRESS.fullmatch(text)
    if found is None or not 0 < int(found["port"]) < 1 << 16:
        raise ValueError(f"{text!r} is no host:port")
    return Address(found["host"].strip("[]"), int(found["port"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """certificate, key: of this node, for both ends of a connection; authority: certificates of who
    certifies the nodes, in PEM. peer: where copies of this node's checkpoints go. listen: where
    this node takes copies of others; allow: names in their certificates, empty: of any that is
    certified. directory: where those are; limit: bytes of all of them, 0: half of the host's
    memory; reserve: bytes of memory that stay free beside them; keep: how many of each store of
    each node. timeout_s: how long one message or record may take."""

    certificate: Path
    key: Path
    authority: Path
    peer: Address | None = None
    listen: Address | None = None
    allow: frozenset[str] = frozenset()
    directory: Path = Path("/run/gpustasis/peers")
    limit: int = 0
    reserve: int = 1 << 30
    keep: int = 1
    timeout_s: int = 60


def load(path: Path | None) -> Config:
    """Of the file; None: of what GPUSTASIS_PEER_CONFIG names, else DEFAULT_FILE. Raises PeerError
    that names the file and the key."""
    named = os.environ.get(CONFIG_VARIABLE)
    place = path or (Path(named) if named else DEFAULT_FILE)
    try:
        return parse(tomllib.loads(read_trusted(place, _MAX_BYTES)))
    except OSError as exc:
        raise PeerError(f"cannot read {place}, which names the neighbour: {exc.strerror}") from exc
    except ValueError as exc:  # not UTF-8, not TOML, or not as it should be
        raise PeerError(f"{place}: {exc}") from exc


def parse(raw: Mapping[str, Any]) -> Config:
    """Raises ValueError that names the key."""
    unknown = sorted(set(raw) - {one.name for one in fields(Config)})
    if unknown:
        raise ValueError(f"there is no key {unknown[0]!r}")
    for key in ("certificate", "key", "authority"):
        if key not in raw:
            raise ValueError(f"the key {key!r} is missing")
    return Config(**{key: _value(key, value) for key, value in raw.items()})


def _value(key: str, value: Any) -> Any:
    if key in _BOUNDS:
        least, most = _BOUNDS[key]
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"{key!r} is no number from {least} to {most}: {value!r}")
        return value
    if key == "allow":
        if not isinstance(value, list) or not all(
            isinstance(name, str) and _NAME.fullmatch(name) for name in value
        ):
            raise ValueError(f"'allow' is no list of names of nodes: {value!r}")
        return frozenset(value)
    if key in ("peer", "listen"):
        try:
            return parse_address(str(value))
        except ValueError as exc:
            raise ValueError(f"{key!r}: {exc}") from exc
    if not isinstance(value, str) or not value.startswith("/"):
        raise ValueError(f"{key!r} is no absolute path: {value!r}")
    return Path(value)
