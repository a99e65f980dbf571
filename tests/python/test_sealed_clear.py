# SPDX-License-Identifier: Apache-2.0
"""What lies in the clear beside sealed files (of a dump with the risk "clear-images") is copied by
`unseal`; who is to blame if it cannot be."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path

import pytest

from campaigns.rig import small_filesystem
from gpustasis import files
from gpustasis._core import ENVELOPE_NAME, MANIFEST_NAME, FreshKey, image_name, write_sealed
from gpustasis.errors import CheckpointError, SealError
from gpustasis.sealing.keys import KeyFile
from gpustasis.sealing.unseal import unseal
from support.certificates import Pair
from support.chains import make_link, memory_of
from support.recipients import make_recipient

BIG = 2 << 20
OURS = (MANIFEST_NAME, image_name(7))


@pytest.fixture
def me(tmp_path: Path) -> Pair:
    return make_recipient(tmp_path)


@pytest.fixture
def sealed(me: Pair, tmp_path: Path) -> Path:
    """Only our own files are; of CRIU's, one is large."""
    plain, place = tmp_path / "plain", tmp_path / "sealed"
    make_link(plain, {7: memory_of(["a1", "A2"])})
    (plain / "pages-1.img").write_bytes(os.urandom(BIG))
    place.mkdir()
    fresh = FreshKey()
    write_sealed(fresh, plain, list(OURS), place)
    (place / ENVELOPE_NAME).write_bytes(fresh.key.wrap([me.certificate.read_bytes()]))
    for path in plain.iterdir():
        if path.name not in OURS:
            shutil.copy2(path, place)
    return place


def test_it_comes_with_the_rest(sealed: Path, me: Pair, tmp_path: Path) -> None:
    done = unseal(sealed, KeyFile(me.key), tmp_path / "out")
    plain = tmp_path / "plain"
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == {
        path.name: path.read_bytes() for path in plain.iterdir()
    }
    assert done.files == len(list(plain.iterdir()))
    assert done.plain_bytes == sum(path.stat().st_size for path in plain.iterdir())


def test_a_place_that_is_full_is_named(sealed: Path, me: Pair, tmp_path: Path) -> None:
    with small_filesystem(tmp_path / "full", BIG // 2, 0) as place:
        with pytest.raises(CheckpointError, match="No space left on device") as caught:
            unseal(sealed, KeyFile(me.key), place / "out")
        assert str(caught.value).startswith(f"cannot write {place / 'out'}: ")
        assert not isinstance(caught.value, SealError)
        assert os.listdir(place) == []


class Unreadable(io.BytesIO):
    def read(self, size: int | None = -1) -> bytes:
        raise OSError(5, "Input/output error")

    def fileno(self) -> int:
        return 0


def test_a_file_that_cannot_be_read_is_named(
    sealed: Path, me: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = sealed / "pages-1.img"

    def open_regular(path: Path, flags: int = 0) -> io.BufferedIOBase:
        return Unreadable() if path == pages else files.open_regular(path, flags)

    monkeypatch.setattr("gpustasis.sealing.directory.open_regular", open_regular)
    with pytest.raises(SealError, match=f"^cannot read {pages}: Input/output error$"):
        unseal(sealed, KeyFile(me.key), tmp_path / "out")
    assert not (tmp_path / "out").exists()
