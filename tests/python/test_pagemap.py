# SPDX-License-Identifier: Apache-2.0
"""CRIU's pagemaps: told exactly are the pages that lie in an earlier dump."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpustasis.criu.images import parent_pages
from gpustasis.errors import ImageError

MAGIC = bytes.fromhex("1943565425400856")
HEAD = bytes([0x08, 1])


def varint(number: int) -> bytes:
    low = number & 0x7F
    return bytes([low]) if number < 0x80 else bytes([low | 0x80]) + varint(number >> 7)


def entry(address: int, pages: int, *, in_parent: bool | None = None, flags: int = 0) -> bytes:
    raw = b"\x08" + varint(address) + b"\x10" + varint(pages)
    if in_parent is not None:
        raw += bytes([0x18, in_parent])
    return raw + (b"\x20" + varint(flags) if flags else b"")


def write(directory: Path, name: str, *messages: bytes) -> Path:
    raw = b"".join(len(message).to_bytes(4, "little") + message for message in messages)
    path = directory / name
    path.write_bytes(MAGIC + raw)
    return path


def test_pages_of_its_own_are_none(tmp_path: Path) -> None:
    write(tmp_path, "pagemap-7.img", HEAD, entry(0x1000, 3, flags=4), entry(0x9000, 1, flags=6))
    write(tmp_path, "pagemap-shmem-12.img", HEAD)
    assert parent_pages(tmp_path) == {}


@pytest.mark.parametrize(
    "there", [entry(0x4000, 300, flags=1), entry(0x4000, 300, in_parent=True)], ids=["new", "old"]
)
def test_pages_in_the_parent_are_counted(tmp_path: Path, there: bytes) -> None:
    write(tmp_path, "pagemap-7.img", HEAD, entry(0x1000, 3, flags=4), there, there)
    write(tmp_path, "pagemap-8.img", HEAD, entry(0x1000, 3, flags=4, in_parent=False))
    write(tmp_path, "pagemap-shmem-12.img", HEAD, entry(0, 1, flags=1))
    assert parent_pages(tmp_path) == {"pagemap-7.img": 600, "pagemap-shmem-12.img": 1}


def test_other_files_are_not_looked_at(tmp_path: Path) -> None:
    (tmp_path / "pages-1.img").write_bytes(b"pages")
    (tmp_path / "pagemap-7.img.old").write_bytes(b"no pagemap")
    assert parent_pages(tmp_path) == {}


def test_every_truncation_within_a_record_is_damage(tmp_path: Path) -> None:
    path = write(tmp_path, "pagemap-7.img", HEAD, entry(0x4000, 300, flags=1))
    whole = path.read_bytes()
    ends = {len(MAGIC), len(MAGIC) + 4 + len(HEAD)}  # where a record ends
    for keep in range(len(whole)):
        path.write_bytes(whole[:keep])
        if keep in ends:
            assert parent_pages(tmp_path) == {}
        else:
            with pytest.raises(ImageError, match=r"pagemap-7\.img"):
                parent_pages(tmp_path)
