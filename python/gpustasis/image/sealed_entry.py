# SPDX-License-Identifier: Apache-2.0
"""What a sealed checkpoint shows in a store without its key: docs/format.md, "Sealed checkpoints".

None of it is known to be true before somebody opens it; neither is a manifest in the clear.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpustasis._core import (
    ENVELOPE_NAME,
    MAX_ENVELOPE_SIZE,
    PARENT_LINK,
    SEALED_NAME,
    ancestors_of,
)
from gpustasis.errors import ImageError, UnsupportedError
from gpustasis.files import open_regular
from gpustasis.image.checkpoint import image_errors, is_sealed
from gpustasis.image.directory import is_there

_HEADER_SIZE = 128  # docs/format.md, "Sealed file"


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedEntry:
    """header: of its first sealed file, which differs for each sealing. ancestors: how many
    checkpoints it is built on; None: its envelope does not say. problem: why nobody can open it;
    "": it has an envelope."""

    header: bytes
    ancestors: int | None
    problem: str


def find_sealed(directory: Path) -> SealedEntry | None:
    """None: what is there is not sealed. Raises ImageError."""
    if not is_sealed(directory):
        return None
    header = _read(directory / SEALED_NAME, _HEADER_SIZE)
    path = directory / ENVELOPE_NAME
    if not is_there(path):
        problem = f"{ENVELOPE_NAME} is missing: its key is in no other file of it"
        return SealedEntry(header=header, ancestors=None, problem=problem)
    envelope = _read(path, MAX_ENVELOPE_SIZE + 1)
    try:
        with image_errors():
            ancestors = ancestors_of(envelope)
    except (ImageError, UnsupportedError) as exc:
        return SealedEntry(header=header, ancestors=None, problem=f"{path}: {exc}")
    return SealedEntry(header=header, ancestors=ancestors, problem="")


def why_unknown(directory: Path, sealed: SealedEntry, parents: Sequence[Path]) -> str:
    """Why it cannot be told without a key what it is built on; "": on nothing, or on the checkpoint
    that its link leads to. parents: where links of it lead. Raises ImageError."""
    if sealed.ancestors == 0:
        return ""
    found = None
    for place in parents:
        found = find_sealed(place)
        if found is not None and _fits(found, sealed):
            return ""
    link = directory / PARENT_LINK
    count = "an unknown number of" if sealed.ancestors is None else sealed.ancestors
    where = "leads to none that fits" if parents else "leads nowhere"
    return (
        f"it is sealed, on {count} earlier checkpoints, and {link} {where}; with its key it can "
        "be told (`gpustasis prune --key`)"
    )


def _fits(parent: SealedEntry, child: SealedEntry) -> bool:
    """An envelope that is missing or damaged is not needed for the child."""
    if parent.ancestors is None or child.ancestors is None:
        return True
    return parent.ancestors == child.ancestors - 1


def _read(path: Path, limit: int) -> bytes:
    """At most so many bytes. Raises ImageError."""
    try:
        with open_regular(path, os.O_NOFOLLOW) as file:
            return file.read(limit)
    except OSError as exc:
        raise ImageError(f"cannot read {path}: {exc.strerror}") from exc
