# SPDX-License-Identifier: Apache-2.0
"""Wait for what others make of a checkpoint: criu dumps it, `gpustasis drain` brings it to the
disk."""

from __future__ import annotations

import logging
import time
from functools import cache
from pathlib import Path

from gpustasis._core import ARENA_OWNER, MANIFEST_NAME, read_manifest
from gpustasis.criu.images import INVENTORY_NAME, inventory_plugins
from gpustasis.draining.drain import finished_manifest
from gpustasis.draining.room import dump_is_at_work
from gpustasis.draining.syncing import require_on_disk
from gpustasis.errors import ImageError
from gpustasis.image.arena import Tier, find_marker, is_inventory_of, stored_directory
from gpustasis.image.checkpoint import image_errors, is_sealed
from gpustasis.image.directory import is_there
from gpustasis.image.peer_record import PeerRecord, find_peer_record

log = logging.getLogger(__name__)

_POLL_S = 0.05
_PLUGIN_PREFIX = "checkpoint-"  # src/cuda_plugin/inventory_names.hpp


def wait_for(
    directory: Path, wanted: Tier, timeout_s: float | None, *, on_peer: bool = False
) -> Tier | None:
    """What the checkpoint in `directory` is as soon as it is `wanted` (durable counts as local), or
    after `timeout_s` seconds; None there: its dump into memory has not ended. on_peer: as soon as a
    neighbour has a copy will do too. timeout_s None: it is waited for without end. What is durable
    is synced first, however long that takes: of a dump that went to the disk nobody may have done
    that. Raises ImageError if there is none, its dump was broken off, it
    is lost, or a file cannot be synced."""
    end = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        found = _state(directory)
        late = end is not None and time.monotonic() >= end
        will_do = found == Tier.LOCAL and (
            wanted == Tier.LOCAL or (on_peer and peer_of(directory) is not None)
        )
        if found == Tier.DURABLE:
            require_on_disk(directory)
            return found
        if late or will_do:
            return found
        time.sleep(_POLL_S)


def peer_of(directory: Path) -> PeerRecord | None:
    """Of the local checkpoint in `directory`: where a neighbour has a copy. None: none has, or that
    cannot be read, or the checkpoint is not local any more."""
    marker = find_marker(directory)
    if marker is None:
        return None
    try:
        return find_peer_record(directory, marker.checkpoint_id)
    except ImageError as exc:
        _warn_once(str(exc))
        return None


@cache
def _warn_once(unread: str) -> None:
    log.warning("whether a neighbour has a copy cannot be told: %s", unread)


def _state(directory: Path) -> Tier | None:
    """None: its dump into memory is at work: manifest and images may be there, CRIU's are not."""
    arena = stored_directory(directory)
    if not is_there(arena / ARENA_OWNER):
        _require_whole(directory)
        return Tier.DURABLE
    if dump_is_at_work(directory, arena):
        return None
    try:
        finished_manifest(directory, arena)
    except ImageError:
        if stored_directory(directory) == arena:
            raise
        return _state(directory)  # it was drained, or given up, meanwhile
    return Tier.LOCAL


def _require_whole(directory: Path) -> None:
    """Raise ImageError unless a whole checkpoint is in `directory` itself: a tree without CUDA has
    no manifest, and one that was sealed none to be read; one that was given up has lost its own."""
    if not is_there(directory / INVENTORY_NAME):
        raise ImageError(
            f"{directory}: no {INVENTORY_NAME}: there is no checkpoint, or its dump has not ended"
        )
    if is_sealed(directory):
        return
    named = [one for one in inventory_plugins(directory) if one.startswith(_PLUGIN_PREFIX)]
    if not named:
        return
    if not is_there(directory / MANIFEST_NAME):
        raise ImageError(
            f"{directory}: no {MANIFEST_NAME}: the dump was broken off, or its images were in "
            "memory and were given up"
        )
    with image_errors():
        manifest = read_manifest(directory)
    if not is_inventory_of(directory, manifest):
        raise ImageError(
            f"{directory / INVENTORY_NAME} is not of the checkpoint of {MANIFEST_NAME} beside it"
        )
