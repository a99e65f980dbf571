# SPDX-License-Identifier: Apache-2.0
"""A reader written from docs/format.md alone opens what this version seals; both open what an
earlier one has sealed: tests/data/sealed, v1 by `gpustasis seal`, v1-dump while a dump made it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from gpustasis._core import DataKey, ImageReader, MemoryKind, image_name
from gpustasis.sealing.keys import KeyFile
from gpustasis.sealing.recipients import read_recipients
from gpustasis.sealing.seal import seal
from gpustasis.sealing.unseal import unseal
from support.inventory import write_inventory
from support.plain_manifest import parse_manifest
from support.plain_reader import PlainImage
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

PAGE = 4096
IMAGE_FRAME = 32 << 10  # of the images of a dump


def random_bytes(seed: int) -> Iterator[int]:
    """As C++'s std::minstd_rand."""
    while True:
        seed = seed * 48271 % ((1 << 31) - 1)
        yield seed & 0xFF


def memory(pages: int, seed: int) -> bytes:
    return bytes(islice(random_bytes(seed), pages * PAGE)) + bytes(PAGE) + b"\x09" * PAGE


# Of process 4242 in tests/data/sealed/v1-dump, which has FILES as CRIU's.
MEMORY = {
    image_name(4242, MemoryKind.GPU): memory(9, seed=1),
    image_name(4242, MemoryKind.CPU): memory(1, seed=2),
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


def with_key(source: Path, tmp_path: Path) -> tuple[Path, Path]:
    """The checkpoint there, and its private key, as one has to keep that."""
    key = tmp_path / "key.pem"
    shutil.copyfile(source / "key.pem", key)
    key.chmod(0o600)
    return source / "checkpoint", key


@pytest.fixture
def vector(repository: Path, tmp_path: Path) -> tuple[Path, Path]:
    """What `gpustasis seal` has made."""
    return with_key(repository / "tests/data/sealed/v1", tmp_path)


@pytest.fixture
def dumped(repository: Path, tmp_path: Path) -> tuple[Path, Path]:
    """What a dump has sealed while it was made."""
    return with_key(repository / "tests/data/sealed/v1-dump", tmp_path)


def test_the_independent_reader_opens_the_vector(vector: tuple[Path, Path]) -> None:
    assert open_directory(*vector) == expected()


def test_the_vector_opens(vector: tuple[Path, Path], tmp_path: Path) -> None:
    directory, key = vector
    unseal(directory, KeyFile(key), tmp_path / "out")
    assert files_of(tmp_path / "out") == expected()


def test_the_independent_reader_opens_what_a_dump_has_sealed(dumped: tuple[Path, Path]) -> None:
    files = {file.name.decode(): file for file in open_directory(*dumped)}
    assert files.keys() == {*FILES, *MEMORY, "gpustasis-manifest.img"}
    assert [files[name] for name in FILES] == expected()
    manifest = parse_manifest(files["gpustasis-manifest.img"].content)
    assert manifest.checkpoint_id == bytes(range(16))
    assert [task.pid for task in manifest.tasks] == [4242, 4242]
    for task, (name, content) in zip(manifest.tasks, MEMORY.items(), strict=True):
        image = PlainImage(files[name].content)
        image.verify()
        assert image.digest == task.digest
        chunks = (image.read_chunk(index) for index in range(len(content) // PAGE))
        assert b"".join(chunks) == content
    sizes = [len(files[name].content) for name in MEMORY]
    assert sizes[0] > IMAGE_FRAME > sizes[1]


def test_what_a_dump_has_sealed_opens(dumped: tuple[Path, Path], tmp_path: Path) -> None:
    directory, key_file = dumped
    key = DataKey.unwrap((directory / "gpustasis-sealed.cms").read_bytes(), key_file)
    for name, content in MEMORY.items():
        image = ImageReader.find_sealed(directory, name, key)
        image.verify()
        chunks = (image.read_chunk(index) for index in range(len(image)))
        assert b"".join(chunks) == content
    unseal(directory, KeyFile(key_file), tmp_path / "out")
    assert files_of(tmp_path / "out") == open_directory(*dumped)


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
