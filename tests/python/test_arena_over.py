# SPDX-License-Identifier: Apache-2.0
"""Memory of a checkpoint that is over, but was held or needed when its drain or `discard` ended."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from gpustasis._core import ARENA_MARKER, MANIFEST_NAME
from gpustasis.draining.drain import drain
from gpustasis.draining.recycle import recycle
from gpustasis.draining.room import contents_of, discard
from gpustasis.image.arena import OVER
from gpustasis.image.directory import shared
from gpustasis.image.prune import Rules, Verdict, prune
from support.arena_by_hand import locked, once
from support.chains import make_link, memory_of
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


def test_what_another_needed_goes_with_that(tmp_path: Path, arena: Path) -> None:
    images, child = tmp_path / "one", tmp_path / "two"
    stored = make_local(images, arena)
    make_local(child, arena, ("A", "C"), parent=stored)
    drain(images)
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


def test_what_is_being_drained_is_not_pruned(tmp_path: Path, arena: Path) -> None:
    """From its manifest on it is durable; without its directory nobody would know whose the memory
    is."""
    store = tmp_path / "store"
    store.mkdir()
    images = store / "one"
    stored = make_local(images, arena)
    os.utime(stored / MANIFEST_NAME, (1, 1))
    make_link(store / "newer", {7: memory_of(["A"])})
    said: list[Verdict] = []
    unlink = Path.unlink

    def pruned(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok)
        if path.name == ARENA_MARKER:
            said.extend(prune(store, Rules(last=1)).verdicts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "unlink", pruned)
        drain(images)
    assert {one.entry.name: one.reasons for one in said}["one"] == ("in use",)
    prune(store, Rules(last=1))
    assert not images.exists() and contents_of(arena).kept == ()


def test_one_that_is_pruned_after_its_drain_was_killed_leaves_no_memory(
    tmp_path: Path, arena: Path
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    images = store / "one"
    stored = make_local(images, arena)
    os.utime(stored / MANIFEST_NAME, (1, 1))
    make_link(store / "newer", {7: memory_of(["A"])})

    def killed() -> None:
        raise KeyboardInterrupt

    with (
        once("gpustasis.draining.drain", "write_manifest", killed, after=True),
        pytest.raises(KeyboardInterrupt),
    ):
        drain(images)
    assert (images / ARENA_MARKER).exists() and not (stored / OVER).exists()
    with shared((stored,)):  # as who puts memory back from it
        prune(store, Rules(last=1))
        assert not images.exists()
        assert recycle(arena) == []
    assert recycle(arena) == [stored]


def test_one_that_is_drained_is_known_to_be_over_while_its_marker_is_there(
    tmp_path: Path, arena: Path
) -> None:
    """Killed right after the marker is gone, nobody would know."""
    images = tmp_path / "one"
    stored = make_local(images, arena)
    found: list[bool] = []
    unlink = Path.unlink

    def look(path: Path, missing_ok: bool = False) -> None:
        if path.name == ARENA_MARKER:
            found.append((stored / OVER).exists())
        unlink(path, missing_ok)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "unlink", look)
        drain(images)
    assert found == [True]
