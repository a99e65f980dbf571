# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of which CRIU has all, as of a tree without CUDA whose own memory is left to CRIU
(`cpu_memory`): they have no manifest, so that `prune` takes none of them for a checkpoint. Only
what was to go into memory first can be one: all others are packed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from gpustasis.criu.images import STATISTICS_NAME, dump_figures
from gpustasis.draining.syncing import make_durable
from gpustasis.errors import CheckpointError
from gpustasis.files import open_regular, sync_directory
from gpustasis.image.arena import Tier
from gpustasis.image.directory import try_exclude
from gpustasis.image.store import read_store, trash_name
from gpustasis.image.verification import is_of_criu_alone

log = logging.getLogger(__name__)

_FIGURES_LIMIT = 1 << 16  # bytes; they take some hundred


def why_not_whole(place: Path) -> str:
    """Why what is in `place` is no such checkpoint whose dump has come to its end, or not one on
    the disk, where this brings it; "": it is."""
    try:
        if not is_of_criu_alone(place) or not _has_ended(place):
            return "there is no whole checkpoint"
        bring_to_disk(place)
    except (CheckpointError, OSError) as exc:
        return f"whether there is a whole checkpoint cannot be told: {exc}"
    return ""


def bring_to_disk(place: Path) -> None:
    """Sync it. If that fails, it counts for none from then on, whatever a later sync says. Raises
    OSError."""
    try:
        make_durable(place)
    except OSError:
        with suppress(OSError):
            (place / STATISTICS_NAME).unlink()
            sync_directory(place)
        raise


def choose(
    directory: Path, keep_last: int, not_over: Collection[Path] = ()
) -> tuple[list[Path], int]:
    """Those in `directory` that are older than its last checkpoints of either kind, and how many of
    the other kind prune may keep. By name, which begins with the time. What cannot be read is not
    among them, and counts for none. not_over: where dumps are at work. Raises CheckpointError."""
    entries = [one for one in read_store(directory).values() if one.directory not in not_over]
    ours = {one.name for one in entries if not one.incomplete and one.tier is Tier.DURABLE}
    alone, ended = [], []
    for one in entries:
        if not one.incomplete or one.target is not None or one.name.startswith("."):
            continue
        try:
            if is_of_criu_alone(one.directory):
                # One that was broken off behind its inventory must not be one for which others go.
                if _has_ended(one.directory):
                    ended.append(one.name)
                alone.append(one.directory)
        except (CheckpointError, OSError) as exc:
            log.warning("%s stays: it cannot be told what it is: %s", one.directory, exc)
    last = sorted([*ours, *ended])[-keep_last:]
    old = [one for one in alone if one.name < last[0]] if len(last) == keep_last else []
    # What is drained meanwhile counts for prune.
    return old, max(1, keep_last - len(set(last) - ours))


def put_old_aside(
    directory: Path, keep_last: int, not_over: Collection[Path], users: Callable[[Path], object]
) -> int:
    """Have prune delete those of choose(), but for what is in use, or cannot be told; how many
    prune may keep. users: who has something in one open; false: nobody. Raises CheckpointError."""
    old, keep = choose(directory, keep_last, not_over)
    for place in old:
        try:
            if not users(place):
                put_aside(place)
        except (CheckpointError, OSError) as exc:
            log.warning("%s stays: %s", place, exc)
    return keep


def put_aside(place: Path) -> None:
    """Have prune delete it, by its new name, so that it is whole or gone. Nothing is done if
    somebody holds a lock. Raises ImageError, OSError."""
    lock = try_exclude(place)
    if lock is not None:
        with lock:
            os.rename(place, place.with_name(trash_name()))
            sync_directory(place.parent)


def _has_ended(place: Path) -> bool:
    """CRIU writes its figures last; they are nothing, or zeros, where they had not come to the disk
    when power was lost. Raises OSError."""
    try:
        with open_regular(place / STATISTICS_NAME) as file:
            return bool(dump_figures(file.read(_FIGURES_LIMIT)))
    except FileNotFoundError:
        return False
