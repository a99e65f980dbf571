# SPDX-License-Identifier: Apache-2.0
"""Directories that appear whole: what flatten, seal and unseal write."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpustasis.errors import CheckpointError
from gpustasis.image.directory import new_directory, require_free, require_outside


def test_it_is_on_the_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    real_sync, real_rename = os.fsync, os.rename

    def sync(descriptor: int) -> None:
        events.append("sync " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real_sync(descriptor)

    def rename(source: Path, target: Path) -> None:
        events.append(f"rename to {target.name}")
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", rename)
    with new_directory(tmp_path / "out") as place:
        (place / "file").touch()
    assert events == ["sync .out.part", "rename to out", f"sync {tmp_path.name}"]
    assert os.listdir(tmp_path) == ["out"]


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot write .*out: no"):  # noqa: SIM117
        with new_directory(tmp_path / "out") as place:
            (place / "file").touch()
            raise OSError("no")
    assert os.listdir(tmp_path) == []


def killed(out: Path) -> Path:
    """What a process that was killed while it made `out` has left."""
    child = os.fork()
    if child == 0:
        with new_directory(out) as place:
            (place / "inventory.img").write_text("half")
            os._exit(0)
    os.waitpid(child, 0)
    return out.with_name(f".{out.name}.part")


def test_a_directory_that_we_did_not_make_is_left_alone(tmp_path: Path) -> None:
    """Though it is our user's own, has the name, and nobody uses it."""
    part = tmp_path / ".out.part"
    part.mkdir(mode=0o700)
    (part / "precious").touch()
    with pytest.raises(CheckpointError, match=r"\.out\.part is there already.*remove it"):
        new_directory(tmp_path / "out").__enter__()
    assert os.listdir(part) == ["precious"]


def test_one_in_the_place_of_ours_is_left_alone(tmp_path: Path) -> None:
    part = killed(tmp_path / "out")
    part.rename(tmp_path / "moved")
    part.mkdir(mode=0o700)
    (part / "precious").touch()
    with pytest.raises(CheckpointError, match="remove it"):
        new_directory(tmp_path / "out").__enter__()
    assert os.listdir(part) == ["precious"]


@pytest.mark.parametrize("change", ["owner", "link", "content"])
def test_only_our_word_is_taken(tmp_path: Path, change: str) -> None:
    part = killed(tmp_path / "out")
    marker = part.with_name(part.name + ".gpustasis")
    if change == "owner":
        os.chown(marker, 12345, 12345)
    elif change == "link":
        marker.rename(tmp_path / "elsewhere")
        marker.symlink_to("elsewhere")
    else:
        marker.write_text(marker.read_text() + "1")
    with pytest.raises(CheckpointError, match="remove it"):
        new_directory(tmp_path / "out").__enter__()
    assert os.listdir(part) == ["inventory.img"]


def test_what_was_killed_is_used_up(tmp_path: Path) -> None:
    part = killed(tmp_path / "out")
    assert os.listdir(part) == ["inventory.img"]
    with new_directory(tmp_path / "out") as place:
        assert os.listdir(place) == []
    assert os.listdir(tmp_path) == ["out"]


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """Bound to itself: on the file system that is around it, too."""
    place = tmp_path / "a\\b c"
    place.mkdir()
    subprocess.run(["mount", "--bind", place, place], check=True)
    yield place
    subprocess.run(["umount", place], check=True)


def test_places_that_nothing_can_take(
    tmp_path: Path, mounted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match="is a mount point"):
        require_free(mounted)
    empty = tmp_path / "empty"
    empty.mkdir()
    require_free(empty)
    monkeypatch.chdir(empty)
    for path in (Path(), Path("../empty"), empty, Path("../empty/.."), Path("..")):
        with pytest.raises(CheckpointError, match="where you are"):
            require_free(path)


def test_a_place_within(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "link").symlink_to("inner")
    require_outside(tmp_path / "inner-too", inner)
    require_outside(tmp_path / "inner", inner)
    for out in (inner / "out", tmp_path / "link" / "out", inner / "a" / "out"):
        with pytest.raises(CheckpointError, match="would be in"):
            require_outside(out, inner)
