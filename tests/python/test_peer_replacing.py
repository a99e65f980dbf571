# SPDX-License-Identifier: Apache-2.0
"""Copies that take the place of older ones only when they are said to: those of jobs."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpustasis._core import PARENT_LINK
from gpustasis.errors import ImageError, PeerError
from gpustasis.files import open_regular
from gpustasis.image.directory import try_exclude
from gpustasis.image.store import is_trash
from gpustasis.image.verification import verify_directory
from gpustasis.peers import copies
from gpustasis.peers.copies import NOTE, Copies
from gpustasis.peers.copying import copy, discard, drop_older, list_copies
from support.local_checkpoints import make_local
from support.peers import Nodes, make_nodes, serving


@pytest.fixture
def nodes(tmp_path: Path, arena: Path) -> Nodes:
    arena.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return make_nodes(tmp_path / "certificates", arena.parent / "peers")


@pytest.fixture
def keeper(nodes: Nodes) -> Iterator[Copies]:
    with serving(nodes.keeper) as server:
        yield server.copies


def names(keeper: Copies) -> list[str]:
    return [one.name for one in keeper.all()]


def make_three(nodes: Nodes, tmp_path: Path, arena: Path) -> list[str]:
    """The keys of three copies of one store, oldest first."""
    keys = []
    for number in range(3):
        stored = make_local(tmp_path / str(number), arena, (f"P{number}", "b"))
        os.utime(stored / "gpustasis-manifest.img", (1000 + number, 1000 + number))
        keys.append(copy(tmp_path / str(number), nodes.sender, replaces=False).key)
    return keys


def test_older_ones_stay_until_they_are_dropped(
    nodes: Nodes, keeper: Copies, tmp_path: Path, arena: Path
) -> None:
    keys = make_three(nodes, tmp_path, arena)
    assert names(keeper) == ["0", "1", "2"]
    assert nodes.sender.peer is not None
    other = nodes.another("other")
    with pytest.raises(PeerError, match="is of sender"):
        drop_older(nodes.sender.peer, other, keys[2])
    with pytest.raises(PeerError, match="no copy"):
        drop_older(nodes.sender.peer, nodes.sender, f"{32 * '0'}-{16 * '0'}")
    assert names(keeper) == ["0", "1", "2"]
    drop_older(nodes.sender.peer, nodes.sender, keys[1])
    assert names(keeper) == ["1", "2"]  # a newer one is none that it takes the place of
    drop_older(nodes.sender.peer, nodes.sender, keys[2])
    assert names(keeper) == ["2"]


def test_older_ones_are_dropped_whatever_the_clocks_say(
    nodes: Nodes, keeper: Copies, tmp_path: Path, arena: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender's and the neighbour's are set back between one copy and the next."""
    begin, keys = time.time(), []
    for number in range(3):
        stored = make_local(tmp_path / str(number), arena, (f"P{number}", "b"))
        os.utime(stored / "gpustasis-manifest.img", (1000 - number, 1000 - number))
        with monkeypatch.context() as patched:
            earlier = begin - 3600 * number
            patched.setattr(copies, "time", SimpleNamespace(time=lambda now=earlier: now))
            keys.append(copy(tmp_path / str(number), nodes.sender, replaces=False).key)
    found = keeper.all()
    assert [one.key for one in found] == keys
    assert found[0].received < found[1].received < found[2].received < begin + 1
    assert nodes.sender.peer is not None
    drop_older(nodes.sender.peer, nodes.sender, keys[1])
    assert names(keeper) == ["1", "2"]
    drop_older(nodes.sender.peer, nodes.sender, keys[2])
    assert names(keeper) == ["2"]


def test_what_the_newest_is_built_on_is_not_dropped(
    nodes: Nodes, keeper: Copies, tmp_path: Path, arena: Path
) -> None:
    first = make_local(tmp_path / "first", arena)
    make_local(tmp_path / "second", arena, ("A", "C"), parent=first)
    done = copy(tmp_path / "second", nodes.sender, replaces=False)
    assert nodes.sender.peer is not None
    drop_older(nodes.sender.peer, nodes.sender, done.key)
    assert names(keeper) == ["first", "second"]


def hold_checks(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """From now on the neighbour sets the first once it has all of a copy, and checks that when the
    second is set."""
    checks, goes_on = threading.Event(), threading.Event()
    right = copies.require_right

    def slow(*words: Any) -> None:
        checks.set()
        assert goes_on.wait(30)
        right(*words)

    monkeypatch.setattr(copies, "require_right", slow)
    return checks, goes_on


def test_what_is_discarded_while_it_is_sent_is_not_kept(
    nodes: Nodes,
    keeper: Copies,
    tmp_path: Path,
    arena: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its sender has given up the connection, and the neighbour does not know yet."""
    make_local(tmp_path / "one", arena)
    assert nodes.sender.peer is not None
    told: list[str] = []
    checks, goes_on = hold_checks(monkeypatch)
    failed: list[PeerError] = []

    def send() -> None:
        try:
            copy(tmp_path / "one", nodes.sender, on_key=lambda *where: told.extend(where))
        except PeerError as exc:
            failed.append(exc)

    sending = threading.Thread(target=send)
    sending.start()
    assert checks.wait(30)
    peer, key = told
    assert peer == str(nodes.sender.peer)
    with pytest.raises(PeerError, match="no copy"):
        discard(nodes.sender.peer, nodes.another("other"), key)
    discard(nodes.sender.peer, nodes.sender, key)
    goes_on.set()
    sending.join()
    assert "discarded while it was sent" in str(failed[0])
    assert names(keeper) == []
    assert os.listdir(keeper.directory) == []
    assert copy(tmp_path / "one", nodes.sender).key == key  # it is not refused for ever
    assert names(keeper) == ["one"]


def test_what_one_that_is_sent_is_built_on_stays_until_it_is_there(
    nodes: Nodes,
    keeper: Copies,
    tmp_path: Path,
    arena: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stored = make_local(tmp_path / "old", arena)
    newer = make_local(tmp_path / "new", arena, ("N", "b"))
    for taken, one in enumerate((stored, newer)):
        os.utime(one / "gpustasis-manifest.img", (1000 + taken, 1000 + taken))
    old, new = (copy(tmp_path / name, nodes.sender, replaces=False).key for name in ("old", "new"))
    make_local(tmp_path / "child", arena, ("A", "C"), parent=stored)
    assert nodes.sender.peer is not None
    checks, goes_on = hold_checks(monkeypatch)
    with ThreadPoolExecutor() as pool:
        sending = pool.submit(copy, tmp_path / "child", nodes.sender, replaces=False)
        try:
            assert checks.wait(30)
            with pytest.raises(PeerError, match=f"somebody is reading the copy {old}"):
                discard(nodes.sender.peer, nodes.sender, old)
            drop_older(nodes.sender.peer, nodes.sender, new)
            assert names(keeper) == ["old", "new"]
        finally:
            goes_on.set()
        child = sending.result()
    assert child.copies == 1
    assert not verify_directory(keeper.directory / child.key).problems
    with pytest.raises(PeerError, match=f"the copy {child.key} is built on {old}"):
        discard(nodes.sender.peer, nodes.sender, old)
    discard(nodes.sender.peer, nodes.sender, child.key)
    drop_older(nodes.sender.peer, nodes.sender, new)
    assert names(keeper) == ["new"]


@pytest.mark.parametrize("link", ["right", "elsewhere", "a file"])
@pytest.mark.parametrize("note", ["damaged", "of a later version", "a link", "refused"])
def test_what_one_that_cannot_be_read_is_built_on_stays(
    nodes: Nodes,
    keeper: Copies,
    tmp_path: Path,
    arena: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    note: str,
    link: str,
) -> None:
    """Its link says what that is: without it that may be any of the others, none of which goes."""
    stored = make_local(tmp_path / "old", arena)
    at = make_local(tmp_path / "child", arena, ("A", "C"), parent=stored)
    for taken, one in enumerate((stored, at)):  # before the others
        os.utime(one / "gpustasis-manifest.img", (500 + taken, 500 + taken))
    child = copy(tmp_path / "child", nodes.sender, replaces=False).key
    (old,) = [one.key for one in keeper.all() if one.name == "old"]
    (*two, new), place = make_three(nodes, tmp_path, arena), keeper.directory / child / NOTE
    before, whole = set(os.listdir(keeper.directory)), place.read_bytes()
    leads = place.parent / PARENT_LINK
    if link != "right":
        leads.unlink()
    if link == "elsewhere":
        leads.symlink_to("../..")
    elif link == "a file":
        leads.touch()
    assert nodes.sender.peer is not None
    with monkeypatch.context() as patched:
        if note == "refused":
            patched.setattr(copies, "open_regular", refusing(place))
        elif note == "a link":
            place.unlink()
            place.symlink_to("/dev/null")
        else:
            place.write_bytes(whole[:-3] if note == "damaged" else whole[:-2] + b', "x": 1}')
        words = "is built on" if link == "right" else f"cannot be told.* remove {place.parent}"
        with pytest.raises(PeerError, match=f"copy {child} {words}"):
            discard(nodes.sender.peer, nodes.sender, old)
        drop_older(nodes.sender.peer, nodes.sender, new)
        stays = f"the copy {child} cannot be told: {place} cannot be read"
        assert (stays if link == "right" else f"stay: {stays}") in caplog.text
        gone = {*two} if link == "right" else set()
        assert set(os.listdir(keeper.directory)) == before - gone
        assert child not in [one.key for one in keeper.all()]
        found = [one.key for one in list_copies(nodes.sender.peer, nodes.sender)]
        assert {*found} == before - gone - {child}
    place.unlink()
    place.write_bytes(whole)
    with pytest.raises(PeerError, match=f"the copy {child} is built on {old}"):
        discard(nodes.sender.peer, nodes.sender, old)
    place.unlink()  # what has no note is no copy
    discard(nodes.sender.peer, nodes.sender, old)
    assert old not in os.listdir(keeper.directory)


def test_one_that_cannot_be_read_and_is_built_on_nothing_keeps_no_other(
    nodes: Nodes, keeper: Copies, tmp_path: Path, arena: Path
) -> None:
    keys = make_three(nodes, tmp_path, arena)
    (keeper.directory / keys[0] / NOTE).write_text("{")
    assert nodes.sender.peer is not None
    drop_older(nodes.sender.peer, nodes.sender, keys[2])
    assert {*os.listdir(keeper.directory)} == {keys[0], keys[2]}


@pytest.mark.parametrize("field", ["taken", "received"])
@pytest.mark.parametrize("value", [math.inf, math.nan, -1.0, 1e12, "now", None], ids=str)
def test_a_time_that_cannot_be_orders_no_copies(
    nodes: Nodes, keeper: Copies, tmp_path: Path, arena: Path, field: str, value: object
) -> None:
    """With one that nothing is later than, no copy would be older than any."""
    keys = make_three(nodes, tmp_path, arena)
    note = keeper.directory / keys[0] / NOTE
    note.write_text(json.dumps({**json.loads(note.read_text()), field: value}))
    with pytest.raises(PeerError, match=f"the copy {keys[0]} cannot be told"):
        keeper.find(keys[0])
    assert nodes.sender.peer is not None
    drop_older(nodes.sender.peer, nodes.sender, keys[2])
    assert {*os.listdir(keeper.directory)} == {keys[0], keys[2]}


def refusing(refused: Path) -> Callable[..., Any]:
    def opened(path: Path, *more: int) -> Any:
        if path == refused:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return open_regular(path, *more)

    return opened


def test_one_that_cannot_be_removed_holds_up_no_other(
    nodes: Nodes, keeper: Copies, tmp_path: Path, arena: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what was renamed before it is deleted."""
    keys = make_three(nodes, tmp_path, arena)

    def sometimes(path: Path) -> Any:
        if path.name == keys[0]:
            raise ImageError(f"cannot lock {path}")
        return try_exclude(path)

    monkeypatch.setattr(copies, "try_exclude", sometimes)
    assert nodes.sender.peer is not None
    drop_older(nodes.sender.peer, nodes.sender, keys[2])
    assert sorted(os.listdir(keeper.directory)) == sorted([keys[0], keys[2]])
    monkeypatch.undo()
    drop_older(nodes.sender.peer, nodes.sender, keys[2])
    assert os.listdir(keeper.directory) == [keys[2]]


def test_what_fails_on_the_way_leaves_no_trash(
    nodes: Nodes, keeper: Copies, tmp_path: Path, arena: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = make_three(nodes, tmp_path, arena)

    def sometimes(path: Path) -> Any:
        if path.name == keys[0]:
            raise MemoryError
        return try_exclude(path)

    monkeypatch.setattr(copies, "try_exclude", sometimes)
    found = keeper.find(keys[2])
    assert found is not None
    with pytest.raises(MemoryError):
        keeper.drop_older(found.key, found.node)
    assert sorted(os.listdir(keeper.directory)) == sorted([keys[0], keys[2]])


def test_trash_that_could_not_be_deleted_is_tried_again(
    nodes: Nodes,
    keeper: Copies,
    tmp_path: Path,
    arena: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    keys = make_three(nodes, tmp_path, arena)
    assert nodes.sender.peer is not None

    def fails(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise PermissionError(f"not {path}")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", fails)
        drop_older(nodes.sender.peer, nodes.sender, keys[2])
    left = set(os.listdir(keeper.directory)) - {keys[2]}
    assert len(left) == 2
    assert all(is_trash(name) for name in left)
    said = [one.getMessage() for one in caplog.records if "is left" in one.getMessage()]
    assert len(said) == 2
    drop_older(nodes.sender.peer, nodes.sender, keys[2])
    assert os.listdir(keeper.directory) == [keys[2]]
