# SPDX-License-Identifier: Apache-2.0
"""What is called durable is synced: of a dump that went to the disk at once CRIU's files may not
be."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import gpustasis
from gpustasis._core import ARENA_MARKER
from gpustasis.cli import cli
from gpustasis.criu.run import Run
from gpustasis.draining import syncing
from gpustasis.draining.drain import drain
from gpustasis.draining.waiting import wait_for
from gpustasis.errors import ImageError
from gpustasis.image.arena import Tier
from gpustasis.image.store import list_store
from support.chains import make_link, memory_of
from support.local_checkpoints import make_local


@pytest.fixture
def images(tmp_path: Path) -> Path:
    place = tmp_path / "store" / "one"
    place.parent.mkdir()
    make_link(place, {7: memory_of(["A"])})
    (place / "pages-1.img").write_bytes(b"of CRIU, which syncs nothing")
    return place


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what is synced."""
    found: list[str] = []
    fsync = os.fsync

    def sync(descriptor: int) -> None:
        found.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    return found


def require_all(synced: list[str], images: Path) -> None:
    """Names after what they name."""
    names = {path.name for path in images.iterdir()}
    assert "pages-1.img" in names and set(synced[:-2]) == names
    assert synced[-2:] == [images.name, images.parent.name]


@pytest.mark.parametrize("wanted", [Tier.LOCAL, Tier.DURABLE])
def test_what_is_waited_for_is_synced(images: Path, synced: list[str], wanted: Tier) -> None:
    assert wait_for(images, wanted, None) is Tier.DURABLE
    require_all(synced, images)


def test_what_is_looked_at_is_not(
    images: Path, tmp_path: Path, arena: Path, synced: list[str]
) -> None:
    make_local(tmp_path / "local", arena)
    assert wait_for(tmp_path / "local", Tier.LOCAL, None) is Tier.LOCAL
    assert [one.problem for one in list_store(images.parent)] == [""]
    assert synced == []


def call(images: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`checkpoint --wait durable`, whose dump is in `images` by now."""
    run = Run(pid=7, criu_version="4.3", log=images, seconds=1.0, statistics=None)
    made = gpustasis.Checkpoint(images, dump=run)
    monkeypatch.setattr(gpustasis, "checkpoint", lambda *_, **__: made)
    words = ["checkpoint", "7", "-D", str(images), "--wait", "durable", "--json"]
    return CliRunner().invoke(cli, words)


def test_a_dump_that_is_to_be_durable_is_synced(
    images: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = call(images, monkeypatch)
    assert result.exit_code == 0, result.output
    require_all(synced, images)


def test_what_cannot_be_synced_is_not_called_durable(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    words = f"^{images} could not be synced: it may not be what was dumped.*Input/output error"
    with pytest.raises(ImageError, match=words):
        wait_for(images, Tier.DURABLE, None)
    assert isinstance(call(images, monkeypatch).exception, ImageError)


def test_a_drain_that_ends_meanwhile_is_no_failure(
    tmp_path: Path, arena: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The marker goes last."""
    images, really, told = tmp_path / "one", os.scandir, list[str]()
    make_local(images, arena)
    marker = (images / ARENA_MARKER).read_bytes()
    drain(images)
    (images / ARENA_MARKER).write_bytes(marker)

    @contextmanager
    def listed(place: Path) -> Iterator[list[os.DirEntry[str]]]:
        with really(place) as items:
            found = list(items)
        told.extend(item.name for item in found)
        (images / ARENA_MARKER).unlink()
        yield found

    monkeypatch.setattr(os, "scandir", listed)
    assert wait_for(images, Tier.DURABLE, None) is Tier.DURABLE
    assert ARENA_MARKER in told


def test_who_may_not_read_a_file_has_all_of_the_file_system_synced(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really, told = os.open, list[int]()

    def opened(path: Any, flags: int, *more: Any, **keys: Any) -> int:
        if Path(path).name == "pages-1.img":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return really(path, flags, *more, **keys)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(syncing, "_sync_file_system", told.append)
    assert wait_for(images, Tier.DURABLE, None) is Tier.DURABLE
    assert len(told) == 1
