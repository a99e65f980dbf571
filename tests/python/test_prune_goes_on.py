# SPDX-License-Identifier: Apache-2.0
"""`gpustasis prune` beside dumps into memory, and where something cannot be removed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpustasis._core import MANIFEST_NAME
from gpustasis.draining.drain import drain
from gpustasis.errors import CheckpointError
from gpustasis.image.prune import Rules, prune
from support.chains import is_whole, make_link, memory_of
from support.local_checkpoints import make_local, under_way

FIRST = 1_800_000_000.0
LAST_ONE = Rules(last=1)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    place = tmp_path / "store"
    place.mkdir()
    return place


def names(store: Path) -> list[str]:
    return sorted(path.name for path in store.iterdir())


def test_what_a_dump_into_memory_is_built_on_stays_when_it_is_drained(
    store: Path, arena: Path
) -> None:
    """The dump has no manifest yet, and its link leads into the arena."""
    parent = make_local(store / "parent", arena)
    make_link(store / "older", {7: memory_of(["o"])}, taken=FIRST)
    child = make_local(store / "child", arena, ("A", "C"), parent=parent)
    manifest = (child / MANIFEST_NAME).read_bytes()
    with under_way(store / "child", child):
        (child / MANIFEST_NAME).unlink()
        drain(store / "parent")
        make_link(store / "newest", {7: memory_of(["n"])}, taken=FIRST * 2)
        done = prune(store, LAST_ONE)
        (child / MANIFEST_NAME).write_bytes(manifest)
    assert names(store) == ["child", "newest", "parent"]
    found = {verdict.entry.name: verdict.reasons for verdict in done.verdicts}
    assert found["parent"] == ("needed by child",)
    assert is_whole(store / "parent")


@contextmanager
def cannot_be_renamed(*places: Path) -> Iterator[None]:
    for place in places:
        subprocess.run(["mount", "--bind", place, place], check=True)
    try:
        yield
    finally:
        for place in places:
            subprocess.run(["umount", place], check=True)


def test_what_cannot_be_removed_keeps_what_it_is_built_on_and_nothing_else(store: Path) -> None:
    """Two of five chains; each has a full one, one that is built on it, and one on that."""
    for chain in range(5):
        for number in range(3):
            below = store / f"{chain}-{number - 1}" if number else None
            taken = FIRST + 100 * chain + number
            words = ["A", "b", "0", str(number)]
            place = store / f"{chain}-{number}"
            make_link(place, {7: memory_of(words)}, parent=below, taken=taken)
    make_link(store / "newest", {7: memory_of(["n"])}, taken=FIRST * 2)
    with cannot_be_renamed(store / "1-2", store / "3-1"):
        with pytest.raises(CheckpointError) as caught:
            prune(store, LAST_ONE)
        assert names(store) == ["1-0", "1-1", "1-2", "3-0", "3-1", "newest"]
        assert all(is_whole(store / name) for name in names(store))
    said = str(caught.value)
    assert said.count("cannot remove") == 2
    assert all(f"cannot remove {store / name}: " in said for name in ("1-2", "3-1"))
    prune(store, LAST_ONE)
    assert names(store) == ["newest"]
