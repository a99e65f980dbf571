# SPDX-License-Identifier: Apache-2.0
"""What is taken back of an arena, and what is left: arenas made by hand, in the tmpfs that every
Linux has. With real dumps: tests/integration/test_ram_tier_failures.py."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpustasis._core import ARENA_MARKER, ARENA_OWNER, MANIFEST_NAME, list_drop_records
from gpustasis.criu.images import INVENTORY_NAME
from gpustasis.draining.drain import drain
from gpustasis.draining.recycle import look_into, recycle
from gpustasis.draining.room import discard
from gpustasis.errors import CheckpointError, ImageError
from gpustasis.image.arena import Tier, tier_of
from support.arena_by_hand import (
    Local,
    before_it_is,
    dropped,
    locked,
    make_drainable,
    make_local,
    meanwhile,
    names,
    write_marker,
    write_owner,
)
from support.inventory import write_inventory

OTHER = b"\xee" * 16


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Path]:
    # Another run on this machine may have the same test's.
    path = Path("/dev/shm") / f"gpustasis-{os.getpid()}-{tmp_path.parent.name}-{tmp_path.name}"
    path.mkdir(mode=0o700)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def process() -> Iterator[int]:
    """The pid of one that lives."""
    with subprocess.Popen(["sleep", "100"]) as sleep:
        yield sleep.pid
        sleep.kill()


def test_what_is_durable_is_taken_back_and_nothing_else(arena: Path, tmp_path: Path) -> None:
    local = make_local(arena, tmp_path / "local", 1)
    done = make_local(arena, tmp_path / "done", 2)
    done.drain()
    assert recycle(arena) == [done.stored]
    assert names(arena) == [local.stored.name]
    assert (local.stored / "gpustasis-7.img").exists()
    assert [path.name for path in (arena / "pool").iterdir()] == [f"{done.stored.name}-7.img"]


def test_a_chain_is_taken_back_from_its_end(arena: Path, tmp_path: Path) -> None:
    first = make_local(arena, tmp_path / "1", 1)
    second = make_local(arena, tmp_path / "2", 2, parent=first)
    first.drain()
    assert recycle(arena) == []
    second.drain()
    assert recycle(arena) == [second.stored, first.stored]


@pytest.mark.parametrize("call", ["open", "flock"])
def test_a_new_dump_replaces_a_marker_that_is_about_to_be_removed(
    arena: Path, tmp_path: Path, call: str
) -> None:
    old = make_local(arena, tmp_path / "images", 1)
    old.break_off()
    (old.stored / MANIFEST_NAME).unlink()  # else no dump replaces its marker
    with before_it_is(call, lambda: write_marker(old.images, OTHER, arena / OTHER.hex())):
        freed = recycle(arena)
    assert OTHER.hex() in (old.images / ARENA_MARKER).read_text()
    assert freed + recycle(arena) == [old.stored]
    assert OTHER.hex() in (old.images / ARENA_MARKER).read_text()


@pytest.mark.parametrize("call", ["open", "flock"])
def test_a_new_dump_is_not_discarded_in_place_of_the_old(
    arena: Path, tmp_path: Path, call: str
) -> None:
    old = make_local(arena, tmp_path / "images", 1)
    with (
        before_it_is(call, lambda: write_marker(old.images, OTHER, arena / OTHER.hex())),
        pytest.raises(CheckpointError, match="a dump is at work"),
    ):
        discard(old.images)
    assert OTHER.hex() in (old.images / ARENA_MARKER).read_text()
    assert old.stored.exists()


def test_a_child_is_made_while_others_are_emptied(arena: Path, tmp_path: Path) -> None:
    first = make_local(arena, tmp_path / "1", 1)
    first.drain()
    parent = make_local(arena, tmp_path / "2", 2)

    def dump_and_drain() -> None:
        make_local(arena, tmp_path / "3", 3, parent=parent)
        parent.drain()

    with meanwhile(dump_and_drain):
        assert recycle(arena) == [first.stored]
    assert (parent.stored / "gpustasis-7.img").exists()


def test_a_dump_loses_all_its_processes_while_others_are_emptied(
    arena: Path, tmp_path: Path, process: int
) -> None:
    first = make_local(arena, tmp_path / "1", 1)
    first.drain()
    broken = make_local(arena, tmp_path / "2", 2)
    broken.break_off()
    record = dropped(process, broken, broken.stored)
    try:
        with meanwhile(record.__enter__):
            assert recycle(arena) == [first.stored]
        assert process in [one.pid for one in list_drop_records()]
        assert (broken.stored / "gpustasis-7.img").exists()
    finally:
        record.__exit__(None, None, None)
    assert recycle(arena) == [broken.stored]


@pytest.mark.parametrize("kind", ["dropped", "checkpointed"])
def test_a_record_counts_by_whatever_path_its_dump_has_seen_the_arena(
    arena: Path, tmp_path: Path, process: int, kind: str
) -> None:
    """Also of GPU memory that was handed over to the dump: that is nowhere else."""
    broken = make_local(arena, tmp_path / "1", 1)
    broken.break_off()
    with dropped(process, broken, Path("/mnt/elsewhere") / broken.stored.name, kind):
        assert recycle(arena) == []
        with pytest.raises(CheckpointError, match=f"memory of process {process}"):
            discard(broken.stored)
    assert recycle(arena) == [broken.stored]


@pytest.mark.parametrize("owner", ["of a later version", "damaged", "missing"])
def test_a_child_whose_owner_cannot_be_read_counts(arena: Path, tmp_path: Path, owner: str) -> None:
    parent = make_local(arena, tmp_path / "1", 1)
    child = make_local(arena, tmp_path / "2", 2, parent=parent)
    if owner == "missing":
        (child.stored / ARENA_OWNER).unlink()
    elif owner == "damaged":
        (child.stored / ARENA_OWNER).write_text("rubbish")
    else:
        write_owner(child.stored, child.checkpoint_id, child.images, version=2)
    parent.drain()
    assert recycle(arena) == []
    assert (parent.stored / "gpustasis-7.img").exists()


def test_a_link_that_leads_nowhere_from_here_counts_by_its_name(
    arena: Path, tmp_path: Path
) -> None:
    parent = make_local(arena, tmp_path / "1", 1)
    child = make_local(arena, tmp_path / "2", 2)
    (child.stored / "gpustasis-parent").symlink_to(f"/mnt/elsewhere/{parent.stored.name}")
    parent.drain()
    assert recycle(arena) == []


def test_one_that_cannot_be_judged_keeps_no_other(
    arena: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rubbish = make_local(arena, tmp_path / "1", 1)
    (rubbish.images / ARENA_MARKER).write_text("rubbish")
    circle = make_local(arena, tmp_path / "2", 2)
    (circle.images / ARENA_MARKER).unlink()
    (circle.images / ARENA_MARKER).symlink_to(ARENA_MARKER)
    done = make_local(arena, tmp_path / "3", 3)
    done.drain()
    assert recycle(arena) == [done.stored]
    said = [record.message for record in caplog.records]
    assert len(said) == 2
    for one in (rubbish, circle):
        assert (one.stored / "gpustasis-7.img").exists()
        assert any(f"memory of {one.stored} was not given back" in line for line in said)


def test_the_image_directory_is_gone(arena: Path, tmp_path: Path) -> None:
    lost = [make_local(arena, tmp_path / str(number), number) for number in (1, 2)]
    for one in lost:
        shutil.rmtree(one.images)
    assert recycle(arena) == []  # it may be on a disk that is not mounted
    assert discard(lost[0].stored) == lost[0].stored
    assert names(arena) == [lost[1].stored.name]
    assert discard(Path(lost[1].stored.name), arena) == lost[1].stored
    assert names(arena) == []
    with pytest.raises(ImageError, match="is no directory of a checkpoint in an arena"):
        discard(Path(lost[1].stored.name), arena)


def test_what_is_given_up_in_the_arena_leaves_no_marker(arena: Path, tmp_path: Path) -> None:
    parent = make_local(arena, tmp_path / "1", 1)
    child = make_local(arena, tmp_path / "2", 2, parent=parent)
    with pytest.raises(CheckpointError, match=f"checkpoint {child.stored.name} is built on it"):
        discard(parent.stored)
    with locked(child.stored, fcntl.LOCK_SH), pytest.raises(CheckpointError, match="is locked"):
        discard(child.stored)
    with (
        locked(child.images / ARENA_MARKER, fcntl.LOCK_EX),
        pytest.raises(CheckpointError, match="a dump or a drain is at work"),
    ):
        discard(child.stored)
    assert tier_of(child.images) == Tier.LOCAL
    discard(child.stored)
    assert not (child.images / ARENA_MARKER).exists()
    assert names(arena) == [parent.stored.name]


@pytest.mark.parametrize("owner", ["is there", "is of a later version", "is damaged", "is gone"])
def test_what_another_is_built_on_is_not_given_up(
    arena: Path, tmp_path: Path, process: int, owner: str
) -> None:
    """Nor by its image directory: the other could never be drained. A record of a dump that was
    broken off does not count there: what is in memory stays for it."""
    parent = make_local(arena, tmp_path / "1", 1)
    child = make_local(arena, tmp_path / "2", 2, parent=parent)
    words = f"^{parent.stored} cannot be given up: checkpoint {child.stored.name} is built on it"
    if owner == "is damaged":
        (parent.stored / ARENA_OWNER).write_text("rubbish")
    elif owner == "is gone":
        (parent.stored / ARENA_OWNER).unlink()
    elif owner != "is there":
        write_owner(parent.stored, parent.checkpoint_id, parent.images, version=2)
        words = f"^whether another checkpoint is built on what is in {parent.stored} cannot be told"
    with pytest.raises(CheckpointError, match=words):
        discard(parent.images)
    assert (parent.images / ARENA_MARKER).exists()
    with dropped(process, child, child.stored):
        discard(child.images)
        assert (child.stored / "gpustasis-7.img").exists()
    if owner == "is there":
        discard(parent.images)  # though the child is not gone yet
        recycle(arena)
        assert names(arena) == []


def test_what_another_is_built_on_is_given_up_in_a_copy(arena: Path, tmp_path: Path) -> None:
    parent = make_local(arena, tmp_path / "1", 1)
    make_local(arena, tmp_path / "2", 2, parent=parent)
    shutil.copytree(parent.images, tmp_path / "copy")
    discard(tmp_path / "copy")
    assert not (tmp_path / "copy" / ARENA_MARKER).exists()
    assert tier_of(parent.images) == Tier.LOCAL


def of_an_earlier_dump(local: Local) -> None:
    write_inventory(local.images, f"checkpoint-{OTHER.hex()}")


def of_stock_criu(local: Local) -> None:
    write_inventory(local.images)


def empty(local: Local) -> None:
    (local.images / INVENTORY_NAME).write_bytes(b"")


def before_the_manifest(local: Local) -> None:
    (local.stored / MANIFEST_NAME).unlink()


@pytest.mark.parametrize("leave", [of_an_earlier_dump, of_stock_criu, empty, before_the_manifest])
def test_a_dump_was_broken_off_where_an_inventory_is(
    arena: Path, tmp_path: Path, leave: Callable[[Local], None]
) -> None:
    broken = make_local(arena, tmp_path / "1", 1)
    leave(broken)
    with locked(broken.stored, fcntl.LOCK_SH):  # its dump is at work still
        assert recycle(arena) == []
    assert recycle(arena) == [broken.stored]
    assert not (broken.images / ARENA_MARKER).exists()


def test_a_damaged_inventory_keeps_it(
    arena: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    local = make_local(arena, tmp_path / "1", 1)
    (local.images / INVENTORY_NAME).write_bytes(b"damaged")
    assert recycle(arena) == []
    assert f"given back: {local.images / INVENTORY_NAME} is not an inventory" in caplog.text
    assert (local.stored / "gpustasis-7.img").exists()


def test_directories_without_an_owner(arena: Path, tmp_path: Path) -> None:
    young, old, in_use, needed = (
        make_local(arena, tmp_path / str(number), number) for number in range(1, 5)
    )
    make_local(arena, tmp_path / "5", 5, parent=needed)
    long_ago = time.time() - 3600
    for one in (young, old, in_use, needed):
        (one.stored / ARENA_OWNER).unlink()
        if one is not young:
            os.utime(one.stored, (long_ago, long_ago))
    with locked(in_use.stored, fcntl.LOCK_SH):
        assert recycle(arena) == [old.stored]
    assert (young.stored / "gpustasis-7.img").exists()
    assert (needed.stored / "gpustasis-7.img").exists()
    assert list((arena / "pool").iterdir()) == []  # nothing says how much of it may be there


def test_what_a_killed_dump_has_reserved(arena: Path, tmp_path: Path, process: int) -> None:
    killed = make_local(arena, tmp_path / "1", 1)
    at_work = make_local(arena, tmp_path / "2", 2)
    for one in (killed, at_work):
        with (one.stored / "reserved").open("wb") as file:
            file.truncate(1 << 40)
        one.break_off()
    with locked(at_work.stored, fcntl.LOCK_SH), dropped(process, killed, killed.stored):
        assert recycle(arena) == []
        assert not (killed.stored / "reserved").exists()
        assert (killed.stored / "gpustasis-7.img").exists()
        assert (at_work.stored / "reserved").exists()


def test_a_renamed_image_directory_is_drained(arena: Path, tmp_path: Path) -> None:
    stored = make_drainable(arena, tmp_path / "old")
    images = (tmp_path / "old").rename(tmp_path / "new")
    (tmp_path / "old").mkdir()
    child = make_local(arena, tmp_path / "child", 1)
    (child.stored / "gpustasis-parent").symlink_to(Path("..") / stored.name)
    with pytest.raises(ImageError, match="drain it first, by its new name"):
        drain(child.images)
    assert drain(images).images == 1
    assert tier_of(images) == Tier.DURABLE
    found = {kept.directory: kept.images for kept in look_into(arena).kept}
    assert found == {stored: images, child.stored: child.images}
    discard(child.images)
    assert names(arena) == []


def test_a_copy_of_an_image_directory_is_not_drained(arena: Path, tmp_path: Path) -> None:
    stored = make_drainable(arena, tmp_path / "images")
    shutil.copytree(tmp_path / "images", tmp_path / "copy")
    words = f"^{tmp_path / 'copy'} is a copy of {tmp_path / 'images'}, "
    with pytest.raises(ImageError, match=words):
        drain(tmp_path / "copy")
    assert stored.exists()
    assert look_into(arena).kept[0].images == tmp_path / "images"


@pytest.mark.parametrize("who", ["others may look into it", "another user's", "no tmpfs", "a link"])
def test_nothing_is_touched_in_what_is_no_arena(
    arena: Path, tmp_path: Path, who: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A path out of an image directory, which anybody may have written, leads there."""
    place = arena
    if who == "no tmpfs":
        place = tmp_path / "disk"
        place.mkdir(mode=0o700)
    done = make_local(place, tmp_path / "1", 1)
    done.drain()
    if who == "others may look into it":
        place.chmod(0o755)
    elif who == "another user's":
        os.chown(place, 65534, 65534)
    elif who == "a link":
        place = tmp_path / "link"
        place.symlink_to(arena)
    assert recycle(place) == []
    assert (done.stored / "gpustasis-7.img").exists()
    assert f"in {place} was not given back" in caplog.text


def test_links_in_an_arena_are_not_followed(arena: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = make_local(elsewhere, tmp_path / "1", 1)
    done.drain()
    (arena / done.stored.name).symlink_to(done.stored)
    other = make_local(arena, tmp_path / "2", 2)
    other.drain()
    theirs = arena / "theirs"  # on the same file system: files could be renamed to it
    theirs.mkdir()
    (arena / "pool").symlink_to(theirs)
    assert [kept.directory for kept in look_into(arena).kept] == [other.stored]
    assert recycle(arena) == []
    assert (done.stored / "gpustasis-7.img").exists()
    assert list(theirs.iterdir()) == []
