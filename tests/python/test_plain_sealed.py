# SPDX-License-Identifier: Apache-2.0
"""A reader written from docs/format.md alone opens what this version seals; both open what an
earlier one has sealed: tests/data/sealed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gpustasis.sealing.keys import KeyFile
from gpustasis.sealing.recipients import read_recipients
from gpustasis.sealing.seal import seal
from gpustasis.sealing.unseal import unseal
from support.inventory import write_inventory
from support.plain_sealed import PlainFile, open_directory
from support.recipients import make_recipient

# What tests/data/sealed/v1 was made of, with frames of 4096 bytes, at this time.
TIME_NS = 1_790_000_000_123_456_789
FILES = {
    "core-1.img": (0o640, b"core of a job\n" * 700),
    "empty.img": (0o600, b""),
    "inventory.img": (0o644, b"inventory, in the clear"),
    "pages-1.img": (0o600, bytes(range(256)) * 16),
}


def expected() -> list[PlainFile]:
    return [
        PlainFile(name.encode(), mode, TIME_NS, content) for name, (mode, content) in FILES.items()
    ]


def files_of(directory: Path) -> list[PlainFile]:
    return [
        PlainFile(
            path.name.encode(),
            path.stat().st_mode & 0o777,
            path.stat().st_mtime_ns,
            path.read_bytes(),
        )
        for path in sorted(directory.iterdir())
    ]


@pytest.fixture
def vector(repository: Path, tmp_path: Path) -> tuple[Path, Path]:
    """The directory and the private key of tests/data/sealed/v1, as one has to keep that."""
    source = repository / "tests/data/sealed/v1"
    key = tmp_path / "key.pem"
    shutil.copyfile(source / "key.pem", key)
    key.chmod(0o600)
    return source / "checkpoint", key


def test_the_independent_reader_opens_the_vector(vector: tuple[Path, Path]) -> None:
    assert open_directory(*vector) == expected()


def test_the_vector_opens(vector: tuple[Path, Path], tmp_path: Path) -> None:
    directory, key = vector
    unseal(directory, KeyFile(key), tmp_path / "out")
    assert files_of(tmp_path / "out") == expected()


@pytest.mark.parametrize("frame_size", [4096, 65536, 1 << 20])
def test_the_independent_reader_opens_what_is_sealed_now(tmp_path: Path, frame_size: int) -> None:
    me, other = make_recipient(tmp_path, "me"), make_recipient(tmp_path, "other", "SECP256R1")
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    write_inventory(directory)
    for number in range(40):
        (directory / f"fdinfo-{number}.img").write_bytes(bytes([number]) * (number * 977))
    before = files_of(directory)
    recipients = read_recipients([other.certificate, me.certificate])
    seal(directory, recipients, tmp_path / "sealed", frame_size=frame_size)
    assert open_directory(tmp_path / "sealed", me.key) == before
