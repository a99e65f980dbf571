# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of which CRIU has all, as of a tree without CUDA whose own memory is left to CRIU
(`cpu_memory`): they have no manifest, so that `prune` takes none of them for a checkpoint. Only
what was to go into memory first can be one: all others are packed."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from gpustasis.criu.images import STATISTICS_NAME
from gpustasis.draining.syncing import make_durable
from gpustasis.errors import CheckpointError
from gpustasis.files import sync_directory
from gpustasis.image.arena import Tier
from gpustasis.image.directory import is_there, try_exclude
from gpustasis.image.store import read_store, trash_name
from gpustasis.image.verification import is_of_criu_alone


def why_not_whole(place: Path) -> str:
    """Why what is in `place` is no such checkpoint whose dump has come to its end, or not one on
    the disk, where this brings it; "": it is."""
    try:
        if not is_of_criu_alone(place) or not _has_ended(place):
            return "there is no whole checkpoint"
        make_durable(place)
    except (CheckpointError, OSError) as exc:
        return f"whether there is a whole checkpoint cannot be told: {exc}"
    return ""


def choose(
    directory: Path, keep_last: int, not_over: Collection[Path] = ()
) -> tuple[list[Path], int]:
    """Those in `directory` that are older than its last checkpoints of either kind, and how many of
    the other kind prune may keep. By name, which begins with the time. not_over: where dumps are at
    work. Raises CheckpointError."""
    entries = [one for one in read_store(directory).values() if one.directory not in not_over]
    ours = {one.name for one in entries if not one.incomplete and one.tier is Tier.DURABLE}
    alone = [
        one.directory
        for one in entries
        if one.incomplete
        and one.target is None
        and not one.name.startswith(".")
        and is_of_criu_alone(one.directory)
    ]
    # One that was broken off behind its inventory must not be one for which others go.
    last = sorted([*ours, *(one.name for one in alone if _has_ended(one))])[-keep_last:]
    old = [one for one in alone if one.name < last[0]] if len(last) == keep_last else []
    # What is drained meanwhile counts for prune.
    return old, max(1, keep_last - len(set(last) - ours))


def put_aside(place: Path) -> None:
    """Have prune delete it, by its new name, so that it is whole or gone. Nothing is done if
    somebody holds a lock. Raises ImageError, OSError."""
    lock = try_exclude(place)
    if lock is not None:
        with lock:
            os.rename(place, place.with_name(trash_name()))
            sync_directory(place.parent)


def _has_ended(place: Path) -> bool:
    """CRIU writes its figures last. Raises ImageError."""
    return is_there(place / STATISTICS_NAME)
