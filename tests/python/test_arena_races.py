# SPDX-License-Identifier: Apache-2.0
"""What others do to an arena, and to the image directories of what lies in it, while it is looked
at: arenas made by hand."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gpustasis._core import ARENA_MARKER, ARENA_OWNER, MANIFEST_NAME
from gpustasis.criu.images import INVENTORY_NAME
from gpustasis.draining.drain import drain
from gpustasis.draining.recycle import Found, look_into, recycle
from gpustasis.draining.room import create, discard
from gpustasis.errors import CheckpointError, ImageError
from gpustasis.image.arena import Tier, by_descriptor, tier_of
from gpustasis.image.directory import try_exclude
from gpustasis.image.verification import verify_directory
from support.arena_by_hand import exchange, locked, make_drainable, make_local, names, once


@pytest.fixture
def arena(arena: Path) -> Path:
    arena.mkdir(mode=0o700, parents=True)
    return arena


def test_another_directory_in_its_place_does_not_make_it_over(arena: Path, tmp_path: Path) -> None:
    """A marker is missing there too, as in that of a checkpoint that has been drained."""
    local = make_local(arena, tmp_path / "1", 1)
    other = tmp_path / "other"
    other.mkdir()
    with once("gpustasis.image.arena", "find_marker", lambda: exchange(local.images, other)):
        assert recycle(arena) == []
    assert (local.stored / "gpustasis-7.img").exists()
    exchange(local.images, other)
    assert tier_of(local.images) == Tier.LOCAL


def test_another_directory_in_its_place_keeps_no_marker(arena: Path, tmp_path: Path) -> None:
    local = make_local(arena, tmp_path / "1", 1)
    other = tmp_path / "other"
    other.mkdir()
    with once("gpustasis.image.arena", "find_marker", lambda: exchange(local.images, other)):
        discard(local.stored)
    assert names(arena) == []
    assert (other / INVENTORY_NAME).exists()  # it is the one of the dump
    assert not (other / ARENA_MARKER).exists()


def test_a_manifest_of_another_directory_is_not_taken_for_a_drain(
    arena: Path, tmp_path: Path
) -> None:
    """Whoever puts it there for a moment would have the marker removed of what is not drained."""
    images, other = tmp_path / "images", tmp_path / "other"
    stored = make_drainable(arena, images)
    other.mkdir(mode=0o700)
    shutil.copy(stored / MANIFEST_NAME, other)
    where = "gpustasis.draining.drain"
    with (
        once(where, "find_marker", lambda: exchange(images, other), after=True),
        once(where, "read_manifest", lambda: exchange(images, other), after=True),
    ):
        assert drain(images).images == 1
    assert tier_of(images) == Tier.DURABLE
    assert not verify_directory(images).problems
    assert names(arena) == []


def remove_owner(directory: Path) -> None:
    (directory / ARENA_OWNER).unlink()


@pytest.mark.parametrize("remove", [remove_owner, shutil.rmtree])
def test_what_is_being_removed_is_not_unreadable(
    arena: Path, tmp_path: Path, remove: Callable[[Path], None]
) -> None:
    local = make_local(arena, tmp_path / "1", 1)
    where = "gpustasis.draining.recycle"
    with once(where, "read_arena_owner", lambda: remove(local.stored)):
        assert look_into(arena) == Found([], [])


def test_what_has_no_owner_is_unreadable_when_no_dump_will_write_one(
    arena: Path, tmp_path: Path
) -> None:
    young, old = (make_local(arena, tmp_path / str(number), number) for number in (1, 2))
    for one in (young, old):
        (one.stored / ARENA_OWNER).unlink()
    os.utime(old.stored, (1, 1))
    found = look_into(arena)
    assert found.kept == []
    assert [one.directory for one in found.unread] == [old.stored]


def test_an_error_names_no_descriptor(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(FileNotFoundError) as caught, by_descriptor(tmp_path) as inside:
        (inside / missing.name).unlink()
    assert caught.value.filename == str(missing)


def test_nobody_builds_on_what_is_being_given_up(arena: Path, tmp_path: Path) -> None:
    """A dump has the arena's lock while it links to what it builds on."""
    local = make_local(arena, tmp_path / "1", 1)
    locks: list[str] = []
    unlink = Path.unlink

    def look(path: Path, missing_ok: bool = False) -> None:
        if path.name == ARENA_MARKER:
            lock = try_exclude(arena)
            locks.append("free" if lock else "held")
        unlink(path, missing_ok)

    with locked(arena, fcntl.LOCK_EX), pytest.raises(CheckpointError, match="has been locked for"):
        discard(local.images)
    assert tier_of(local.images) == Tier.LOCAL
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "unlink", look)
        discard(local.images)
    assert locks == ["held"]
    assert names(arena) == []


def test_children_that_cannot_be_looked_for_keep_it(
    arena: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = make_local(arena, tmp_path / "1", 1)

    def fails(*_: object, **__: object) -> None:
        raise ImageError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr("gpustasis.draining.recycle._children", fails)
        with pytest.raises(CheckpointError, match="cannot be told: no memory"):
            discard(local.images)
    assert tier_of(local.images) == Tier.LOCAL
    discard(local.images)


def test_nothing_is_mounted_over_an_arena_while_a_dump_looks_for_room(arena: Path) -> None:
    """What it writes then would be hidden."""
    with (
        locked(arena, fcntl.LOCK_EX),
        pytest.raises(CheckpointError, match=f"^{arena} has been locked for"),
    ):
        create(arena, 1 << 20)
    assert not os.path.ismount(arena)
