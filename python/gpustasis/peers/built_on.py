# SPDX-License-Identifier: Apache-2.0
"""What copies are built on."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from gpustasis._core import PARENT_LINK

_BESIDE = re.compile(r"\.\./([^/.][^/]*)")


def linked_parent(directory: Path) -> str:
    """The key of what the copy in `directory` is built on, by its link, which every copy has that
    is built on one; empty: it is built on none. Raises OSError or ValueError."""
    try:
        found = _BESIDE.fullmatch(os.readlink(directory / PARENT_LINK))
    except FileNotFoundError:
        return ""
    if found is None:
        raise ValueError(f"{directory / PARENT_LINK} leads to no copy")
    return found[1]


def with_parents(keys: set[str], parents: Mapping[str, str]) -> set[str]:
    """These, and all that they are built on. parents: by key, the key of that, or empty."""
    found = set()
    for key in keys:
        at: str | None = key
        while at and at not in found:
            found.add(at)
            at = parents.get(at)
    return found
