# SPDX-License-Identifier: Apache-2.0
"""What dumps of the agent have in an arena: lost, broken off, or given up before their directories
are removed. Without an image directory nobody knows any more whose memory it was, and it would stay
for as long as the node runs."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from uuid import UUID

from gpustasis._core import (
    ARENA_MARKER,
    MANIFEST_NAME,
    SEALED_NAME,
    ArenaMarker,
    is_arena_lost,
    read_arena_owner,
)
from gpustasis.criu.images import INVENTORY_NAME
from gpustasis.criu.plugin import run_settings
from gpustasis.draining.recycle import arena_of, give_up, look_into, recycle
from gpustasis.draining.room import ARENA
from gpustasis.dump_records import why_needed
from gpustasis.errors import CheckpointError
from gpustasis.image.arena import find_marker, is_images_of
from gpustasis.image.directory import is_there
from gpustasis.image.store import Entry
from gpustasis.image.verification import is_of_criu_alone
from gpustasis.task import boot_id

log = logging.getLogger(__name__)


def is_lost(directory: Path) -> bool:
    """Whether what the marker there leads to is, for certain. An arena that is not there may be one
    that is only not seen from here."""
    try:
        return is_arena_lost(directory)
    except (OSError, ValueError, NotImplementedError):
        return False


def _is_of_earlier_boot(marker: ArenaMarker) -> bool:
    return marker.boot_id != str(UUID(bytes=boot_id()))


def is_broken_off(entry: Entry) -> bool:
    """Whether it is certain that there is no checkpoint. What cannot be read, as of a later
    version, may be one; and so may what is in memory, but for what recycle() takes back."""
    place = entry.directory
    if not entry.incomplete or entry.unread or entry.target or place.name.startswith("."):
        return False
    try:
        named = any(is_there(place / name) for name in (MANIFEST_NAME, SEALED_NAME))
        if named and is_there(place / INVENTORY_NAME):
            return False
        if is_of_criu_alone(place):
            return False
        marker = find_marker(place)
        if marker is None or _is_of_earlier_boot(marker):
            return True
        arena = arena_of(marker)
        if arena is None:
            return False
        recycle(arena)
        return not is_there(place / ARENA_MARKER)
    except CheckpointError as exc:
        log.warning("%s stays: it cannot be told whether it was broken off: %s", place, exc)
        return False


def why_not_given_up(directory: Path) -> str:
    """Give up what the dump into `directory` has in memory; why that cannot be done now: all is as
    it was then. "": nothing of it is there, and no process lacks what is in `directory`."""
    try:
        if why_not := why_needed(directory):
            return why_not
        marker = find_marker(directory)
        if marker is None:
            return _why_unmarked(directory)
        if is_lost(directory):
            return ""
        kept = Path(marker.directory)
        arena = arena_of(marker)
        if arena is None or not is_images_of(directory, read_arena_owner(kept)):
            return f"it cannot be told whether what is in {kept} is its memory"
        give_up(kept)
        recycle(arena)  # what it was built on
    except (CheckpointError, OSError, ValueError, NotImplementedError) as exc:
        return str(exc) or repr(exc)  # nothing said would mean that all is given up
    return ""


def _why_unmarked(directory: Path) -> str:
    """A dump writes the marker after it has made its directory in the arena: one that was killed in
    between has left that alone. Raises OSError, CheckpointError."""
    arena = Path(str(run_settings(os.environ).get("arena") or ARENA))
    if not is_there(arena):
        return ""
    for one in look_into(arena).kept:
        # A complete one had its marker: it is of another directory, whose number this one has now.
        if is_images_of(directory, one.owner) and not is_there(one.directory / MANIFEST_NAME):
            recycle(arena)
            if is_there(one.directory):
                return f"its memory is in {one.directory}, and may be needed"
    return ""
