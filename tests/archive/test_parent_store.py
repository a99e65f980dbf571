# SPDX-License-Identifier: Apache-2.0
"""Imported parents lie in the store only once every byte of them was checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpustasis._core import MANIFEST_NAME, image_name, read_manifest
from gpustasis.errors import CheckpointError, ImageError
from gpustasis.image import checkpoint as chain
from gpustasis.runtimes import parent_store
from support.archives import COMPRESSIONS, pack
from support.chains import make_chain


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


def test_a_store_that_others_can_write_to_is_refused(
    tmp_path: Path, store: Path, links: list[Path]
) -> None:
    store.mkdir()
    store.chmod(0o777)
    with pytest.raises(CheckpointError, match="others could write there"):
        parent_store.keep_parents([pack(links[0], tmp_path / "a.tar")])
