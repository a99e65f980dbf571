# SPDX-License-Identifier: Apache-2.0
"""What is in the place of an image directory says nothing of a checkpoint in memory, unless it is
of that: arenas made by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gpustasis._core import ARENA_MARKER, ARENA_OWNER, MANIFEST_NAME, write_manifest
from gpustasis.criu.images import INVENTORY_NAME
from gpustasis.draining.recycle import recycle
from gpustasis.image.arena import Tier, tier_of
from support.arena_by_hand import make_local, manifest_of, write_marker, write_owner
from support.inventory import write_inventory

OTHER = b"\xee" * 16


@pytest.fixture
def arena(arena: Path) -> Path:
    arena.mkdir(mode=0o700, parents=True)
    return arena


def nothing(images: Path) -> None:
    pass


def durable(images: Path) -> None:
    write_manifest(images, manifest_of(OTHER))
    write_inventory(images, f"checkpoint-{OTHER.hex()}")


def local_too(images: Path) -> None:
    write_marker(images, OTHER, images)


@pytest.mark.parametrize("device", ["another device", "the same device"])
@pytest.mark.parametrize("there", [nothing, durable, local_too])
def test_another_disk_that_is_mounted_in_its_place_does_not_make_it_over(
    arena: Path, tmp_path: Path, there: Callable[[Path], None], device: str
) -> None:
    """The roots of two disks have one inode, and a second disk may get the number of the first."""
    local = make_local(arena, tmp_path / "mounted", 1)
    owner = (local.stored / ARENA_OWNER).read_bytes()
    local.images.rename(tmp_path / "unmounted")
    local.images.mkdir(mode=0o700)
    there(local.images)
    write_owner(local.stored, local.checkpoint_id, local.images)
    if device == "another device":
        number = local.images.stat().st_dev
        text = (local.stored / ARENA_OWNER).read_text()
        text = text.replace(f"device {number}\n", f"device {number + 1}\n")
        (local.stored / ARENA_OWNER).write_text(text)
    assert recycle(arena) == []
    assert (local.stored / "gpustasis-7.img").exists()
    local.images.rename(tmp_path / "other")
    (tmp_path / "unmounted").rename(local.images)
    (local.stored / ARENA_OWNER).write_bytes(owner)
    assert tier_of(local.images) == Tier.LOCAL
    local.drain()
    assert recycle(arena) == [local.stored]


def test_what_has_neither_marker_nor_manifest_was_broken_off(arena: Path, tmp_path: Path) -> None:
    local = make_local(arena, tmp_path / "images", 1)
    for path in (local.images / INVENTORY_NAME, local.images / ARENA_MARKER):
        path.unlink()
    assert recycle(arena) == []
    (local.stored / MANIFEST_NAME).unlink()
    assert recycle(arena) == [local.stored]
