# SPDX-License-Identifier: Apache-2.0
"""What the other end says of a copy: hostile, at either end, until it was looked at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from gpustasis.errors import PeerError
from gpustasis.peers.copies import MAX_TIME, Copy, is_key

_MAX_STORE = 4096  # characters, with the name
_MAX_NODE = 1024  # characters
_MAX_BYTES = 1 << 52
_NAMES = frozenset(one.name for one in fields(Copy))


def order_of(said: Mapping[str, Any], node: str) -> Copy:
    """What a sender says of a copy that is to come. Raises PeerError."""
    found = _copy_of({**said, "node": node, "received": 0.0})
    if found is None:
        raise PeerError("what is to be kept is not said as it should be")
    return found


def copy_in(answer: Mapping[str, Any], place: str) -> Copy:
    """What a keeper says of a copy that it has. Raises PeerError."""
    said = answer.get("copy")
    known = isinstance(said, dict) and said.keys() == _NAMES
    found = _copy_of(said) if isinstance(said, dict) and known else None
    if found is None:
        raise PeerError(f"{place} says what is no copy")
    return found


def _copy_of(said: Mapping[str, Any]) -> Copy | None:
    """The same bounds for both: what one end may say, the other must be able to hear."""
    key, parent, size = said.get("key"), said.get("parent"), said.get("bytes")
    node, store, name = said.get("node"), said.get("store"), said.get("name")
    taken, received = _time(said.get("taken")), _time(said.get("received"))
    if not isinstance(node, str) or not isinstance(store, str) or not isinstance(name, str):
        return None
    if len(node) > _MAX_NODE or len(store) + len(name) > _MAX_STORE:
        return None
    if not is_key(key) or not (parent == "" or is_key(parent)):
        return None
    if type(size) is not int or not 0 < size < _MAX_BYTES or taken is None or received is None:
        return None
    return Copy(
        key=str(key),
        node=node,
        store=store,
        name=name,
        parent=str(parent),
        taken=taken,
        received=received,
        bytes=size,
    )


def _time(value: object) -> float | None:
    """None: it is no number, or none that a time can be."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value < MAX_TIME else None
