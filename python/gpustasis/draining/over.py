# SPDX-License-Identifier: Apache-2.0
"""Whether a checkpoint in an arena is of use no more: by a note there, or by what is in its image
directory."""

from __future__ import annotations

from pathlib import Path

from gpustasis._core import MANIFEST_NAME, ArenaOwner, read_manifest
from gpustasis.criu.images import INVENTORY_NAME
from gpustasis.image.arena import OVER, images_of, is_inventory_of, own_marker
from gpustasis.image.directory import is_there


def is_over(directory: Path, owner: ArenaOwner) -> bool:
    """Whether the image directory does without it: it has all, or it was given up, or its dump was
    broken off. If the image directory is not there, it may be on a disk that is not mounted.

    All is looked at in the directory that was found to be the owner's: a marker is missing in any
    other that somebody puts in its place meanwhile."""
    if is_there(directory / OVER):
        return True
    try:
        with images_of(owner) as images:
            if images is None:
                return False
            with own_marker(images, owner.checkpoint_id) as marker:
                if marker is None:
                    # Another disk that is mounted in its place has none either, and may have the
                    # same numbers: what is complete here is over if something there is of it.
                    is_complete = is_there(directory / MANIFEST_NAME)
                    return not is_complete or _is_of(images, directory, owner)
                # With a manifest, a drain is at its last step, or has to be.
                if is_there(images / MANIFEST_NAME) or _is_finished(directory, images):
                    return False
                marker.unlink()
    except BlockingIOError:
        return False
    return True


def _is_of(images: Path, directory: Path, owner: ArenaOwner) -> bool:
    """Whether it has that checkpoint's manifest, or the inventory, as one that was given up."""
    if is_there(images / MANIFEST_NAME):
        return read_manifest(images).checkpoint_id == owner.checkpoint_id
    return _is_finished(directory, images)


def _is_finished(directory: Path, images: Path) -> bool:
    """Whether criu has come to its end. The inventory, which it writes last, may be that of an
    earlier dump into the same directory, or empty: criu was killed before it has written to it."""
    inventory = images / INVENTORY_NAME
    if not is_there(directory / MANIFEST_NAME) or not is_there(inventory):
        return False
    manifest = read_manifest(directory)
    return inventory.lstat().st_size != 0 and is_inventory_of(images, manifest)
