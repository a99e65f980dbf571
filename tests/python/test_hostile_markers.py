# SPDX-License-Identifier: Apache-2.0
"""Markers that anybody can have written, and directories that anybody can exchange, when root
drains or gives up what is there: nothing of others goes. Arenas made by hand."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpustasis._core import ARENA_MARKER, ARENA_OWNER, MANIFEST_NAME, write_manifest
from gpustasis.draining import room
from gpustasis.draining.drain import drain
from gpustasis.draining.recycle import recycle
from gpustasis.draining.room import discard
from gpustasis.errors import CheckpointError, ImageError
from gpustasis.image.arena import Tier, own_marker, tier_of
from support.arena_by_hand import (
    exchange,
    make_drainable,
    make_local,
    manifest_of,
    names,
    write_marker,
)

LONG_AGO = (1, 1)
FOREIGN = "0123456789abcdef" * 2
FILES = (
    *("gpustasis-7.img", "gpustasis-memory-7.img", MANIFEST_NAME, "gpustasis-parent", "reserved"),
    *(".owner.part", f".{MANIFEST_NAME}.part", "..gpustasis-7.img.part.part", ".unsynced"),
)


@pytest.fixture
def arena(arena: Path) -> Path:
    arena.mkdir(mode=0o700, parents=True)
    return arena


@pytest.fixture
def foreign(arena: Path) -> Path:
    """Another program's directory in memory, which belongs to root, and has mode 0700."""
    place = arena.with_name(f"{arena.name}.foreign")
    (place / FOREIGN).mkdir(mode=0o700, parents=True)
    place.chmod(0o700)
    (place / FOREIGN / "reserved").write_text("of another program")
    (place / FOREIGN / "session").write_text("of another program")
    (place / FOREIGN[::-1]).mkdir(mode=0o700)
    for one in place.iterdir():
        os.utime(one, LONG_AGO)
    return place


def contents(place: Path) -> list[str]:
    return sorted(str(one.relative_to(place)) for one in place.rglob("*"))


def test_a_marker_leads_root_to_another_programs_directory(
    arena: Path, foreign: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = contents(foreign)
    drained = make_local(arena, tmp_path / "drained", 1)
    drained.drain()
    write_marker(drained.images, drained.checkpoint_id, foreign / FOREIGN)
    drain(drained.images)
    assert not (drained.images / ARENA_MARKER).exists()
    local = make_local(arena, tmp_path / "local", 2)
    write_marker(local.images, local.checkpoint_id, foreign / FOREIGN)
    assert discard(local.images) == foreign / FOREIGN
    assert contents(foreign) == before
    assert caplog.text.count(f"a checkpoint in {foreign / FOREIGN} was not given back") == 2


def test_a_marker_names_the_directory_of_another_checkpoint(arena: Path, tmp_path: Path) -> None:
    """It has an owner, and others in the arena could be recycled; but who has written the marker
    knows nothing of it."""
    mine, other, done = (make_local(arena, tmp_path / str(at), at) for at in (1, 2, 3))
    done.drain()
    write_marker(mine.images, mine.checkpoint_id, other.stored)
    discard(mine.images)
    assert done.stored.exists()
    assert recycle(arena) == [mine.stored, done.stored]


def test_what_no_dump_makes_is_left_alone(
    arena: Path, foreign: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = contents(foreign)
    assert recycle(foreign) == [foreign / FOREIGN[::-1]]  # is empty
    assert contents(foreign) == [one for one in before if FOREIGN[::-1] not in one]  # no pool
    words = f"no {ARENA_OWNER}, and holds 'session', which no dump makes"
    assert f"memory of {foreign / FOREIGN} was not given back: it has {words}" in caplog.text


@pytest.mark.parametrize(
    "name", ["Gpustasis-7.img", "gpustasis-7.img.part", "..", ".owner", "pool"]
)
def test_names_that_no_dump_makes(arena: Path, name: str) -> None:
    place = arena / FOREIGN
    place.mkdir(mode=0o700)
    (place / f"{name}x" if name == ".." else place / name).touch()
    os.utime(place, LONG_AGO)
    assert recycle(arena) == []
    assert len(list(place.iterdir())) == 1


def test_names_that_a_dump_makes(arena: Path) -> None:
    place = arena / FOREIGN
    place.mkdir(mode=0o700)
    for name in FILES:
        (place / name).touch()
    os.utime(place, LONG_AGO)
    assert recycle(arena) == [place]


def test_another_directory_in_its_place_loses_no_marker(
    arena: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write beside both would have the other checkpoint given up."""
    mine, other = (make_local(arena, tmp_path / str(number), number) for number in (1, 2))

    @contextmanager
    def exchanged(images: Path, checkpoint_id: bytes) -> Iterator[Path | None]:
        with own_marker(images, checkpoint_id) as marker:
            exchange(mine.images, other.images)
            yield marker

    monkeypatch.setattr(room, "own_marker", exchanged)
    assert discard(mine.images) == mine.stored
    exchange(mine.images, other.images)
    assert not (mine.images / ARENA_MARKER).exists()
    assert (other.images / ARENA_MARKER).exists()
    assert names(arena) == [other.stored.name]  # the other's memory stays
    assert recycle(arena) == []


@pytest.mark.parametrize(
    "error", [ValueError("it is cut short"), NotImplementedError("version 2"), OSError(5, "EIO")]
)
def test_memory_that_stays_is_told_whatever_its_owner_says(
    arena: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    images, copy = tmp_path / "images", tmp_path / "copy"
    stored = make_drainable(arena, images)
    shutil.copytree(images, copy)

    def fail(_: Path) -> None:
        raise error

    monkeypatch.setattr(room, "read_arena_owner", fail)
    assert discard(copy) == stored
    assert f"memory in {stored} stays: {error}" in caplog.text


def test_a_copy_that_is_given_up_is_not_the_checkpoint(
    arena: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`cp -a` takes the marker along."""
    images, copy = tmp_path / "images", tmp_path / "copy"
    stored = make_drainable(arena, images)
    before = contents(stored)
    shutil.copytree(images, copy)
    assert discard(copy) == stored
    assert f"memory in {stored} stays: it is that of the checkpoint in {images}" in caplog.text
    assert not (copy / ARENA_MARKER).exists()
    assert recycle(arena) == [] and contents(stored) == before
    drain(images)
    assert tier_of(images) is Tier.DURABLE and names(arena) == []


def test_a_foreign_directory_that_looks_drained_is_not_the_checkpoint(
    arena: Path, tmp_path: Path
) -> None:
    """A marker that was read elsewhere, and a manifest made for it."""
    images, foreign = tmp_path / "images", tmp_path / "foreign"
    stored = make_drainable(arena, images)
    before, checkpoint_id = contents(stored), bytes.fromhex(stored.name)
    foreign.mkdir()
    write_marker(foreign, checkpoint_id, stored)
    write_manifest(foreign, manifest_of(checkpoint_id))
    drain(foreign)
    assert not (foreign / ARENA_MARKER).exists()
    assert recycle(arena) == [] and contents(stored) == before
    drain(images)
    assert tier_of(images) is Tier.DURABLE and names(arena) == []


def test_a_renamed_one_that_is_given_up_is_the_checkpoint(arena: Path, tmp_path: Path) -> None:
    local = make_local(arena, tmp_path / "images", 1)
    local.images.rename(tmp_path / "renamed")
    assert discard(tmp_path / "renamed") == local.stored
    assert names(arena) == []


def test_errors_of_discard_name_the_directory_that_was_given(arena: Path, tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=f"cannot open {tmp_path / 'none'}: No such file"):
        discard(tmp_path / "none")
    with pytest.raises(ImageError, match=f"^{tmp_path} holds no checkpoint"):
        discard(tmp_path)
    images = tmp_path / "images"
    make_drainable(arena, images)
    with (
        own_marker(images, bytes.fromhex(names(arena)[0])),
        pytest.raises(CheckpointError, match=f"^{images / ARENA_MARKER} is locked"),
    ):
        discard(images)
