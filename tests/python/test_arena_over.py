# SPDX-License-Identifier: Apache-2.0
"""Memory of a checkpoint that is over, but was held or needed when its drain or `discard` ended."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from gpustasis._core import ARENA_MARKER, MANIFEST_NAME
from gpustasis.draining.drain import drain
from gpustasis.draining.over import OVER
from gpustasis.draining.recycle import recycle
from gpustasis.draining.room import contents_of, discard
from gpustasis.image.directory import shared
from support.arena_by_hand import locked
from support.inventory import write_inventory
from support.local_checkpoints import make_local

END = {"drained": drain, "discarded": discard}


def dump_over(images: Path) -> None:
    """Another checkpoint is in the same directory by now."""
    for path in images.iterdir():
        path.unlink()
    write_inventory(images, f"checkpoint-{'ee' * 16}")


@pytest.mark.parametrize("how", END)
def test_what_was_read_goes_later_whatever_its_directory_holds(
    tmp_path: Path, arena: Path, how: str
) -> None:
    images = tmp_path / "one"
    stored = make_local(images, arena)
    with shared((stored,)):
        END[how](images)
        assert (stored / OVER).exists()
        dump_over(images)
        assert recycle(arena) == []
    assert recycle(arena) == [stored]
    assert contents_of(arena).kept == () and not list((arena / "pool").glob(OVER))


@pytest.mark.parametrize("how", END)
def test_what_another_needed_goes_with_that(tmp_path: Path, arena: Path, how: str) -> None:
    images, child = tmp_path / "one", tmp_path / "two"
    stored = make_local(images, arena)
    make_local(child, arena, ("A", "C"), parent=stored)
    END[how](images)
    dump_over(images)
    assert recycle(arena) == []
    discard(child)
    assert contents_of(arena).kept == ()


@pytest.mark.parametrize("how", END)
def test_where_somebody_empties_the_directory_nothing_is_noted(
    tmp_path: Path, arena: Path, how: str
) -> None:
    """It could not be removed with a file that was not there when it was emptied."""
    images = tmp_path / "one"
    stored = make_local(images, arena)
    if how == "drained":  # but for the last step, which reads nothing in memory
        (images / MANIFEST_NAME).write_bytes((stored / MANIFEST_NAME).read_bytes())
    with locked(stored, fcntl.LOCK_EX):
        END[how](images)
        assert not (stored / OVER).exists()
    assert not (images / ARENA_MARKER).exists()
    assert recycle(arena) == [stored]
