# SPDX-License-Identifier: Apache-2.0
"""Imported parents lie in the store only once every byte of them was checked."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gpustasis._core import MANIFEST_NAME, PARENT_LINK, MemoryKind, image_name, read_manifest
from gpustasis.errors import CheckpointError, ImageError
from gpustasis.image import checkpoint as chain
from gpustasis.image import directory
from gpustasis.image.directory import share, try_exclude
from gpustasis.image.flatten import flatten
from gpustasis.image.store import is_trash
from gpustasis.runtimes import parent_store
from support.archives import COMPRESSIONS, pack
from support.chains import is_whole, make_chain, make_link, memory_of


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "lib" / "gpustasis"
    root.parent.mkdir()
    monkeypatch.setattr(parent_store, "STORE_ROOT", root)
    monkeypatch.setattr(chain, "STORE_ROOT", root)
    return root


@pytest.fixture
def links(tmp_path: Path) -> list[Path]:
    (tmp_path / "links").mkdir()
    return make_chain(tmp_path / "links", 1)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_what_is_kept_is_whole(
    tmp_path: Path, store: Path, links: list[Path], compression: str
) -> None:
    """The later one first: what it has in the earlier one is not missed."""
    archives = [
        pack(link, tmp_path / f"{link.name}.tar", compression=compression) for link in links
    ]
    parent_store.keep_parents(archives[::-1])
    for link in links:
        kept = store / "checkpoints" / read_manifest(link).checkpoint_id.hex()
        assert {path.name: path.read_bytes() for path in kept.iterdir()} == {
            name: (link / name).read_bytes() for name in (MANIFEST_NAME, image_name(7))
        }
        assert kept.stat().st_mode & 0o777 == 0o700
    parent_store.keep_parents(archives)  # nothing to do


@pytest.mark.parametrize("place", ["chunk", "index"])
def test_a_damaged_one_is_not_kept(
    tmp_path: Path, store: Path, links: list[Path], place: str
) -> None:
    path = links[0] / image_name(7)
    raw = bytearray(path.read_bytes())
    raw[4096 if place == "chunk" else -140] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ImageError, match=r"gpustasis-7\.img: .*checksum"):
        parent_store.keep_parents([pack(links[0], tmp_path / "a.tar")])
    assert not store.exists() or list((store / "checkpoints").iterdir()) == []


def spoil_chunk(place: Path) -> None:
    raw = bytearray((place / image_name(7)).read_bytes())
    raw[4096] ^= 1
    (place / image_name(7)).write_bytes(raw)


def spoil_manifest(place: Path) -> None:
    (place / MANIFEST_NAME).write_bytes(b"?" * 400)


def spoil_presence(place: Path) -> None:
    (place / image_name(7)).unlink()


def keep_and_spoil(store: Path, link: Path, archive: Path) -> tuple[Path, Path]:
    """An archive of `link`, and what was kept of it, which is damaged since."""
    parent_store.keep_parents([pack(link, archive)])
    kept = store / "checkpoints" / read_manifest(link).checkpoint_id.hex()
    spoil_chunk(kept)
    return archive, kept


@pytest.mark.parametrize("spoil", [spoil_chunk, spoil_manifest, spoil_presence])
def test_a_damaged_one_that_is_there_is_replaced(
    tmp_path: Path, store: Path, links: list[Path], spoil: Callable[[Path], None]
) -> None:
    archive = pack(links[0], tmp_path / "a.tar")
    parent_store.keep_parents([archive])
    kept = store / "checkpoints" / read_manifest(links[0]).checkpoint_id.hex()
    spoil(kept)
    parent_store.keep_parents([archive])
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == {
        name: (links[0] / name).read_bytes() for name in (MANIFEST_NAME, image_name(7))
    }


def test_a_damaged_one_of_a_container_has_a_sound_one_beside_it(
    tmp_path: Path, store: Path, links: list[Path]
) -> None:
    """The sound one is found first from then on."""
    checkpoint_id = read_manifest(links[0]).checkpoint_id
    place = store / "containers" / "some" / checkpoint_id.hex()
    shutil.copytree(links[0], place)
    spoil_chunk(place)
    store.chmod(0o700)
    assert chain.find_checkpoint(checkpoint_id) == place
    parent_store.keep_parents([pack(links[0], tmp_path / "a.tar")])
    assert chain.find_checkpoint(checkpoint_id) == store / "checkpoints" / checkpoint_id.hex()


def test_a_damaged_one_that_cannot_be_replaced_is_named(
    tmp_path: Path, store: Path, links: list[Path]
) -> None:
    archive, kept = keep_and_spoil(store, links[0], tmp_path / "a.tar")
    with share(kept), pytest.raises(CheckpointError, match=r"damaged, .*in use"):
        parent_store.keep_parents([archive])
    (kept / "pages-1.img").write_bytes(b"precious")
    with pytest.raises(CheckpointError, match=r"damaged .*also holds pages-1\.img"):
        parent_store.keep_parents([archive])
    assert (kept / "pages-1.img").read_bytes() == b"precious"
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]


def test_a_replaced_one_keeps_its_link(tmp_path: Path, store: Path, links: list[Path]) -> None:
    """Without it a restore would find no parent that lies elsewhere."""
    archives = [pack(link, tmp_path / f"{link.name}.tar") for link in links]
    parent_store.keep_parents(archives[1:])
    kept = store / "checkpoints" / read_manifest(links[1]).checkpoint_id.hex()
    (kept / PARENT_LINK).symlink_to(links[0])
    assert is_whole(kept)
    spoil_chunk(kept)
    parent_store.keep_parents(archives[1:])
    assert os.readlink(kept / PARENT_LINK) == str(links[0])
    assert is_whole(kept)


def test_other_images_of_a_checkpoint_do_not_replace_it(
    tmp_path: Path, store: Path, links: list[Path]
) -> None:
    """What is built on it knows its images by their digests."""
    flatten(links[1], tmp_path / "flat")
    _, kept = keep_and_spoil(store, links[1], tmp_path / "a.tar")
    before = (kept / image_name(7)).read_bytes()
    with pytest.raises(CheckpointError, match=r"the archive has other images .*move it away"):
        parent_store.keep_parents([pack(tmp_path / "flat", tmp_path / "flat.tar")])
    assert (kept / image_name(7)).read_bytes() == before
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]


def test_one_that_is_locked_is_not_called_damaged(
    tmp_path: Path, store: Path, links: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "PATIENCE_S", 0.2)
    archive = pack(links[0], tmp_path / "a.tar")
    parent_store.keep_parents([archive])
    kept = store / "checkpoints" / read_manifest(links[0]).checkpoint_id.hex()
    held = try_exclude(kept)
    assert held is not None
    with held, pytest.raises(ImageError) as caught:
        parent_store.keep_parents([archive])
    assert f"{kept} has been locked for 0.2 s" in str(caught.value)
    assert "damaged" not in str(caught.value)


def test_what_was_replaced_may_be_hard_to_delete(
    tmp_path: Path, store: Path, links: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, kept = keep_and_spoil(store, links[0], tmp_path / "a.tar")
    unlink = os.unlink

    def refuse(path: object, *, dir_fd: int | None = None) -> None:
        if dir_fd is not None and is_trash(Path(os.readlink(f"/proc/self/fd/{dir_fd}")).name):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        unlink(path, dir_fd=dir_fd)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "unlink", refuse)
    parent_store.keep_parents([archive])
    assert is_whole(kept)


@pytest.mark.parametrize("spoilt", [False, True])
def test_another_import_puts_it_there_at_the_same_time(
    tmp_path: Path,
    store: Path,
    links: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    *,
    spoilt: bool,
) -> None:
    """Between the two renames of this one."""
    archive, kept = keep_and_spoil(store, links[0], tmp_path / "a.tar")
    rename = Path.rename

    def rename_and_import(self: Path, target: Path) -> Path:
        made = rename(self, target)
        if is_trash(Path(target).name):
            shutil.copytree(links[0], kept)
            if spoilt:
                spoil_chunk(kept)
        return made

    monkeypatch.setattr(Path, "rename", rename_and_import)
    if spoilt:
        with pytest.raises(CheckpointError, match="put there just now, is damaged"):
            parent_store.keep_parents([archive])
    else:
        parent_store.keep_parents([archive])
        assert is_whole(kept)
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]


def test_a_store_that_others_can_write_to_is_refused(
    tmp_path: Path, store: Path, links: list[Path]
) -> None:
    store.mkdir()
    store.chmod(0o777)
    with pytest.raises(CheckpointError, match="others could write there"):
        parent_store.keep_parents([pack(links[0], tmp_path / "a.tar")])


@pytest.mark.parametrize("pid", [7, 8])
def test_cpu_memory_is_kept_and_mended(tmp_path: Path, store: Path, pid: int) -> None:
    """Of a process with GPU memory (7), and of one without (8)."""
    whole, memory = tmp_path / "whole", memory_of(["A", "b"])
    make_link(whole, {7: memory}, cpu_memory={7: memory_of(["C"]), 8: memory})
    archive = pack(whole, tmp_path / "whole.tar")
    parent_store.keep_parents([archive])
    kept = store / "checkpoints" / read_manifest(whole).checkpoint_id.hex()
    wanted = {path.name: path.read_bytes() for path in whole.glob("gpustasis-*")}
    assert len(wanted) == 4

    def found() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in kept.iterdir()}

    assert found() == wanted
    name = image_name(pid, MemoryKind.CPU)
    raw = bytearray(wanted[name])
    raw[4096] ^= 1
    (kept / name).write_bytes(raw)
    parent_store.keep_parents([archive])
    assert found() == wanted
    (whole / name).write_bytes(raw)
    (kept / name).unlink()
    with pytest.raises(ImageError, match=rf"{name}: .*checksum"):
        parent_store.keep_parents([pack(whole, tmp_path / "damaged.tar")])
