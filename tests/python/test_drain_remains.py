# SPDX-License-Identifier: Apache-2.0
"""What a drain makes of what is left: by a loss of power, by a drain that was killed, by a disk
that could not be written to, by who has renamed a checkpoint."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from gpustasis._core import ARENA_MARKER, ARENA_OWNER, MANIFEST_NAME, PARENT_LINK
from gpustasis.draining.drain import drain, sync_files
from gpustasis.draining.recycle import SYNCING, UNSYNCED, recycle
from gpustasis.draining.room import contents_of, discard
from gpustasis.draining.waiting import wait_for
from gpustasis.errors import ImageError, LocalError
from gpustasis.image.arena import Tier, stored_directory, tier_of
from gpustasis.image.verification import verify_directory
from gpustasis.peers.copies import is_sent
from support.arena_by_hand import once
from support.local_checkpoints import make_local

TAKEN = 1_800_000_000


@pytest.fixture
def local(tmp_path: Path, arena: Path) -> tuple[Path, Path]:
    """A checkpoint that is complete in memory: its image directory, and that in the arena."""
    images = tmp_path / "one"
    stored = make_local(images, arena)
    (images / "pages-1.img").write_bytes(b"of CRIU, which syncs nothing")
    os.utime(stored / MANIFEST_NAME, (TAKEN, TAKEN))
    return images, stored


def test_a_marker_without_content_is_of_a_checkpoint_that_is_lost(local: tuple[Path, Path]) -> None:
    images, _ = local
    (images / ARENA_MARKER).write_bytes(b"")
    with pytest.raises(ImageError, match=f"{images} was never drained, and it is lost with the"):
        drain(images)


def test_a_store_that_was_mounted_anew_has_another_device_number(
    local: tuple[Path, Path], tmp_path: Path
) -> None:
    images, stored = local
    owner = (stored / ARENA_OWNER).read_text()
    device = images.stat().st_dev
    (stored / ARENA_OWNER).write_text(owner.replace(f"device {device}\n", f"device {device + 1}\n"))
    copy = tmp_path / "copy"
    shutil.copytree(images, copy)
    with pytest.raises(ImageError, match=f"{copy} is a copy of {images}"):
        drain(copy)
    assert drain(images).images == 1
    assert not stored.exists() and not verify_directory(images).problems


def test_a_marker_without_content_is_removed_where_all_is_on_the_disk(
    local: tuple[Path, Path],
) -> None:
    images, _ = local
    done = drain(images)
    (images / ARENA_MARKER).touch()
    assert drain(images).checkpoint_id == done.checkpoint_id
    assert not (images / ARENA_MARKER).exists()


def fail_to_sync(patch: pytest.MonkeyPatch, name: str) -> list[str]:
    """Have the next fsync of such a file fail, and no later one: as of the kernel. Returns its path
    once it has."""
    really, failed = os.fsync, list[str]()

    def sync(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if Path(path).name == name and not failed:
            failed.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        really(descriptor)

    patch.setattr(os, "fsync", sync)
    return failed


def test_a_file_of_criu_that_could_not_be_synced_is_never_called_durable(
    local: tuple[Path, Path], arena: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, stored = local
    failed = fail_to_sync(monkeypatch, "pages-1.img")
    words = f"^{images / 'pages-1.img'} could not be synced.* take another"
    for _ in range(2):
        with pytest.raises(ImageError, match=words):
            drain(images)
    assert failed == [str(images / "pages-1.img")]
    assert tier_of(images) == Tier.LOCAL
    with pytest.raises(ImageError, match=words):
        wait_for(images, Tier.DURABLE, None)
    assert not is_sent(UNSYNCED)
    assert recycle(arena) == []
    discard(images)
    assert not stored.exists()
    assert list(arena.iterdir()) == [arena / "pool"]
    assert not [one for one in (arena / "pool").iterdir() if UNSYNCED in one.name]


def test_nothing_is_synced_if_that_could_not_be_noted(
    local: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel would have told of it, and the next drain would not know."""
    images, stored = local
    really = os.open

    def opened(path: Any, flags: int, *more: Any, **keys: Any) -> int:
        if Path(path).name in (SYNCING, UNSYNCED) and flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return really(path, flags, *more, **keys)

    failed = fail_to_sync(monkeypatch, "pages-1.img")
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", opened)
        for _ in range(2):
            with pytest.raises(LocalError, match=f"No space left on device: .*/{SYNCING}"):
                drain(images)
    assert not failed and tier_of(images) == Tier.LOCAL
    with pytest.raises(ImageError, match="could not be synced"):
        drain(images)
    assert failed and (stored / UNSYNCED).exists()


@pytest.fixture
def killed_as_it_synced(local: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been told of an error before."""
    images, stored = local

    def killed(_: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            sync_files(images, stored)
    assert (stored / SYNCING).exists()


@pytest.mark.usefixtures("killed_as_it_synced")
def test_a_drain_that_was_killed_as_it_synced_costs_no_checkpoint(local: tuple[Path, Path]) -> None:
    images, stored = local
    assert wait_for(images, Tier.LOCAL, None) == Tier.LOCAL
    drain(images)
    assert tier_of(images) == Tier.DURABLE
    assert not stored.exists()


@pytest.mark.usefixtures("killed_as_it_synced")
def test_what_its_file_system_has_lost_since_is_never_called_durable(
    local: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    images, stored = local

    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr("gpustasis.draining.syncing._sync_file_system", fail)
        with pytest.raises(ImageError, match=f"^{images} could not be synced"):
            drain(images)
    with pytest.raises(ImageError, match=f"^{images} could not be synced"):
        drain(images)
    assert tier_of(images) == Tier.LOCAL
    assert not (stored / SYNCING).exists()


def test_that_is_known_without_room_for_its_name(
    local: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    images, stored = local
    (stored / UNSYNCED).touch()
    with pytest.raises(ImageError, match=f"^{images} could not be synced"):
        drain(images)


def test_what_is_built_on_it_is_not_drained_either(
    local: tuple[Path, Path], tmp_path: Path, arena: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, stored = local
    child = tmp_path / "child"
    make_local(child, arena, ("A", "C"), parent=stored)
    fail_to_sync(monkeypatch, "pages-1.img")
    for _ in range(2):
        with pytest.raises(ImageError, match="could not be synced"):
            drain(child)
    assert [tier_of(one) for one in (images, child)] == [Tier.LOCAL] * 2


def test_what_a_drain_has_written_itself_the_next_one_writes_again(
    local: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    images, _ = local
    failed = fail_to_sync(monkeypatch, "gpustasis-7.img")
    with pytest.raises(LocalError, match="Input/output error"):
        drain(images)
    assert failed
    assert tier_of(images) == Tier.LOCAL
    drain(images)
    assert tier_of(images) == Tier.DURABLE
    assert not verify_directory(images).problems


def test_what_is_no_part_of_the_checkpoint_is_not_synced_with_it(
    local: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a seal: it leaves what a drain has left."""
    images, stored = local
    left = ".gpustasis-7.img.part"
    (images / left).write_bytes(b"a part")
    os.mkfifo(images / "a-fifo")
    failed = fail_to_sync(monkeypatch, left)
    sync_files(images, stored, but={left})
    assert not failed and not (stored / UNSYNCED).exists()
    with pytest.raises(ImageError, match="could not be synced"):
        sync_files(images, stored)
    assert failed and (stored / UNSYNCED).exists()


def test_a_file_that_becomes_a_fifo_does_not_hold_the_drain(
    local: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    images, stored = local
    really = os.open

    def opened(path: Any, flags: int, *more: Any, **keys: Any) -> int:
        if Path(path).name == "pages-1.img" and Path(path).is_file():
            Path(path).unlink()
            os.mkfifo(path)
        return really(path, flags, *more, **keys)

    monkeypatch.setattr(os, "open", opened)
    with pytest.raises(ImageError, match="could not be synced"):
        sync_files(images, stored)


def test_a_manifest_has_its_time_as_soon_as_it_is_there(local: tuple[Path, Path]) -> None:
    """Rules of prune go by it."""
    images, _ = local

    def killed() -> None:
        raise KeyboardInterrupt

    with (
        once("gpustasis.draining.drain", "write_manifest", killed, after=True),
        pytest.raises(KeyboardInterrupt),
    ):
        drain(images)
    assert (images / ARENA_MARKER).exists()
    assert (images / MANIFEST_NAME).stat().st_mtime == TAKEN
    drain(images)
    assert (images / MANIFEST_NAME).stat().st_mtime == TAKEN
    assert not (images / ARENA_MARKER).exists()


def test_no_time_is_taken_from_where_a_marker_leads_that_somebody_else_has_written(
    local: tuple[Path, Path], tmp_path: Path
) -> None:
    images, stored = local
    marker = (images / ARENA_MARKER).read_text()
    drain(images)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (elsewhere / MANIFEST_NAME).touch()
    (images / ARENA_MARKER).write_text(marker.replace(str(stored), str(elsewhere)))
    drain(images)
    assert not (images / ARENA_MARKER).exists()
    assert (images / MANIFEST_NAME).stat().st_mtime == TAKEN


class StoppedError(Exception):
    pass


def test_a_drain_is_stopped_while_what_it_is_built_on_is_drained(
    local: tuple[Path, Path], tmp_path: Path, arena: Path
) -> None:
    images, stored = local
    child = tmp_path / "child"
    make_local(child, arena, ("A", "C"), parent=stored)

    def stop(*_: int) -> None:
        raise StoppedError

    with pytest.raises(StoppedError):
        drain(child, on_progress=stop)
    assert [tier_of(one) for one in (images, child)] == [Tier.LOCAL] * 2
    told: list[tuple[int, int]] = []
    drain(child, on_progress=lambda *words: told.append(words))
    assert [tier_of(one) for one in (images, child)] == [Tier.DURABLE] * 2
    (total,) = {words[1] for words in told} - {0}
    assert told[0] == (0, 0) and told[-1] == (total, total)


def test_a_drain_that_was_killed_before_a_boot(local: tuple[Path, Path], arena: Path) -> None:
    """Its marker is still there, and the arena is not."""
    images, _ = local
    marker = (images / ARENA_MARKER).read_bytes()
    drain(images)
    (images / ARENA_MARKER).write_bytes(marker)
    drain(images)
    assert not (images / ARENA_MARKER).exists()
    assert (images / MANIFEST_NAME).stat().st_mtime == TAKEN


def test_what_is_built_on_one_that_was_drained_and_renamed_is_drained(
    local: tuple[Path, Path], tmp_path: Path, arena: Path
) -> None:
    images, stored = local
    child = tmp_path / "child"
    make_local(child, arena, ("A", "C"), parent=stored)
    drain(images)
    new = images.rename(tmp_path / "renamed")
    images.mkdir()
    drain(child)
    assert tier_of(child) == Tier.DURABLE
    assert (child / PARENT_LINK).resolve() == new
    assert not verify_directory(child).problems
    assert contents_of(arena).kept == ()


def test_one_that_was_drained_and_is_elsewhere_is_asked_for(
    local: tuple[Path, Path], tmp_path: Path, arena: Path
) -> None:
    images, stored = local
    child = tmp_path / "child"
    make_local(child, arena, ("A", "C"), parent=stored)
    drain(images)
    (tmp_path / "elsewhere").mkdir()
    new = images.rename(tmp_path / "elsewhere" / "renamed")
    assert drain(new).images == 0  # which changes nothing
    with pytest.raises(ImageError, match=f"^{images} is not there.* give it its old name back"):
        drain(child)
    assert stored_directory(child) != child
    new.rename(images)
    drain(child)
    assert tier_of(child) == Tier.DURABLE
