# SPDX-License-Identifier: Apache-2.0
"""What the system refused reaches Python with its errno, from every layer of the core."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from campaigns.rig import small_filesystem
from gpustasis._core import (
    PARENT_LINK,
    DirtyTracker,
    ImageReader,
    Manifest,
    ParentIndex,
    image_name,
    read_manifest,
    write_image,
    write_manifest,
)
from gpustasis.errors import CheckpointError, ImageError
from gpustasis.image.checkpoint import open_image
from gpustasis.image.directory import try_exclude
from gpustasis.image.flatten import flatten
from support.chains import make_chain, make_link, memory_of
from support.image_samples import CHECKPOINT_ID, info_of, noise

NOBODY = 65534


@contextmanager
def without_privileges() -> Iterator[None]:
    """As a user to whom permissions apply."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(before)


def test_enospc(tmp_path: Path) -> None:
    memory = [(0x7F0000000000, noise(2 << 20))]
    with small_filesystem(tmp_path / "small", 1 << 20, 0) as small:
        with pytest.raises(OSError, match="No space left") as caught:
            write_image(small / "a.img", info_of(memory), memory)
        assert list(small.iterdir()) == []
    assert caught.value.errno == errno.ENOSPC
    assert str(caught.value).startswith("a.img: ")


def test_enoent(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        ImageReader.open(tmp_path / "a.img")
    assert caught.value.errno == errno.ENOENT
    assert str(caught.value) == f"{tmp_path / 'a.img'}: open: No such file or directory"
    with pytest.raises(FileNotFoundError):
        read_manifest(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_manifest(tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        write_manifest(tmp_path / "none", Manifest(checkpoint_id=CHECKPOINT_ID))


def test_eacces(tmp_path: Path) -> None:
    write_manifest(tmp_path, Manifest(checkpoint_id=CHECKPOINT_ID))
    tmp_path.chmod(0)
    try:
        with without_privileges(), pytest.raises(PermissionError) as caught:
            read_manifest(tmp_path)
    finally:
        tmp_path.chmod(0o700)
    assert caught.value.errno == errno.EACCES


def test_a_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError) as caught:
        ParentIndex.read(tmp_path / "file")
    assert caught.value.errno == errno.ENOTDIR


def test_a_parent_that_is_missing(tmp_path: Path) -> None:
    """Its errno comes through two sentences that say more."""
    child = make_chain(tmp_path, 1)[-1]
    (child / PARENT_LINK).unlink()
    image = ImageReader.open(child / image_name(7))
    with pytest.raises(FileNotFoundError, match="and the parent, checkpoint") as caught:
        image.attach_sources()
    assert caught.value.errno == errno.ENOENT


def test_a_process_that_has_ended() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with pytest.raises(ProcessLookupError) as caught:
        DirtyTracker(ended.pid)
    assert caught.value.errno == errno.ESRCH


def test_what_the_system_did_not_refuse_has_none(tmp_path: Path) -> None:
    make_link(tmp_path / "a", {7: memory_of(["A"])})
    lock = try_exclude(tmp_path / "a")
    assert lock is not None
    try:
        with pytest.raises(OSError, match="about to remove") as caught:
            ParentIndex.read(tmp_path / "a")
    finally:
        lock.close()
    assert caught.value.errno is None


def test_errors_of_the_package_carry_it(tmp_path: Path) -> None:
    make_link(tmp_path / "a", {7: memory_of([f"A{page}" for page in range(600)])})
    with (
        small_filesystem(tmp_path / "small", 1 << 20, 0) as small,
        pytest.raises(CheckpointError, match="No space left") as full,
    ):
        flatten(tmp_path / "a", small / "flat")
    assert full.value.errno == errno.ENOSPC

    manifest = read_manifest(tmp_path / "a")
    (tmp_path / "a" / image_name(7)).unlink()
    with pytest.raises(ImageError) as missing:
        open_image(tmp_path / "a", manifest, manifest.tasks[0])
    assert missing.value.errno == errno.ENOENT


def test_other_errors_of_the_package_have_none() -> None:
    assert CheckpointError("why").errno is None
    try:
        raise ImageError("why") from ValueError("because")
    except ImageError as exc:
        assert exc.errno is None
