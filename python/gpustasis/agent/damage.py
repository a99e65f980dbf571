# SPDX-License-Identifier: Apache-2.0
"""Whether what a check has found wrong with a checkpoint is damage, and not that it could not be
read just then: a damaged one is removed, and it may be the only copy, in memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from gpustasis._core import Manifest, ManifestTask, Region
from gpustasis.errors import ImageError, SealError, UnsupportedError
from gpustasis.image.arena import stored_directory
from gpustasis.image.checkpoint import find_manifest, image_errors, open_image, require_not_sealed
from gpustasis.image.directory import shared
from gpustasis.image.pack import verify_pack
from gpustasis.image.verification import Stored, require_all_in

Found = TypeVar("Found")


def find_damage(images: Path) -> str:
    """What is damaged for certain in an image directory, in a sentence; "": nothing is, as far as
    it can be read now. All is read again: what could not be read may be right. Raises ImageError,
    UnsupportedError if it cannot be told where the images are, or they are locked."""
    require_not_sealed(images)
    place = stored_directory(images)
    with shared(() if place == images else (place,)):
        manifest, damage = _try(lambda: find_manifest(place))
        if manifest is None:
            return damage
        stored: Stored = []
        for task in manifest.tasks:
            regions, damage = _try(partial(_check_image, place, manifest, task))
            if damage:
                return damage
            if regions is not None:
                stored.append((task, regions))
        if damage := _try(lambda: verify_pack(images, manifest))[1]:
            return damage
        if len(stored) < len(manifest.tasks):
            return ""  # what the inventory is compared with is not known
        return _try(lambda: require_all_in(images, stored))[1]


def _check_image(place: Path, manifest: Manifest, task: ManifestTask) -> list[Region]:
    if not task.externalized:
        return []
    image = open_image(place, manifest, task)
    with image_errors():
        image.attach_sources()
        image.verify()
    return image.info.regions


def _try(check: Callable[[], Found]) -> tuple[Found | None, str]:
    """What it has found; None: nothing. And what is damaged for certain."""
    try:
        return check(), ""
    except ImageError as exc:
        return None, str(exc) if _is_damage(exc) else ""
    except UnsupportedError:  # of a later version
        return None, ""


def _is_damage(error: ImageError) -> bool:
    """Whether it is about what was read, and does not come from a refusal of the system: a disk or
    a server that does not answer now, or this process being out of something."""
    if isinstance(error, SealError):
        return False
    cause = error.__cause__
    while cause is not None:
        if isinstance(cause, OSError):
            return False
        cause = cause.__cause__
    return True
