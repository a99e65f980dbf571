# SPDX-License-Identifier: Apache-2.0
"""Images that are not files of their own: parts of a larger file, and ends with chunks that pass
by."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpustasis._core import (
    IMAGE_HEADER_SIZE,
    IMAGE_TRAILER_SIZE,
    MANIFEST_NAME,
    CorruptDataError,
    Encoding,
    FlatImageWriter,
    ImageReader,
    image_name,
    parse_manifest,
    read_manifest,
    write_image,
)
from support.image_samples import (
    PAGE,
    Sample,
    info_of,
    make_checkpoint,
    mixture,
    noise,
    samples,
)

ONE_DIRECTORY = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
PLACE = "a.tar: checkpoint/a.img"


def ends(image: bytes) -> tuple[bytes, bytes]:
    """What from_ends() needs of an image."""
    length = ImageReader.tail_size(image[-IMAGE_TRAILER_SIZE:], len(image))
    return image[:IMAGE_HEADER_SIZE], image[-length:]


@ONE_DIRECTORY
@given(sample=samples(), before=st.integers(0, 3 * PAGE), behind=st.integers(0, PAGE))
def test_a_part_of_a_file_is_read_as_the_image(
    tmp_path: Path, sample: Sample, before: int, behind: int
) -> None:
    write_image(tmp_path / "a.img", sample.info, sample.memory, alignment=sample.alignment)
    whole = ImageReader.open(tmp_path / "a.img")
    content = (tmp_path / "a.img").read_bytes()
    (tmp_path / "a.tar").write_bytes(b"\xee" * before + content + b"\xdd" * behind)
    with (tmp_path / "a.tar").open("rb") as file:
        part = ImageReader.open_part(file.fileno(), before, len(content), PLACE)
    part.verify()
    assert (part.info, part.digest, part.totals) == (whole.info, whole.digest, whole.totals)
    for index in range(len(whole)):
        assert part.read_chunk(index) == whole.read_chunk(index)


@ONE_DIRECTORY
@given(sample=samples())
def test_ends_and_stored_chunks_make_the_same_image(tmp_path: Path, sample: Sample) -> None:
    write_image(tmp_path / "a.img", sample.info, sample.memory, alignment=sample.alignment)
    content = (tmp_path / "a.img").read_bytes()
    (tmp_path / "b.img").unlink(missing_ok=True)
    image = ImageReader.from_ends(*ends(content), len(content), PLACE)
    with FlatImageWriter(image, tmp_path / "b.img") as flat:
        for index in reversed(range(len(image))):
            chunk = image.chunk(index)
            stored = content[chunk.offset : chunk.offset + chunk.stored_size]
            image.check_stored(index, stored)
            if chunk.encoding != Encoding.ZERO:
                flat.put(index, stored)
        assert not (tmp_path / "b.img").exists()
        result = flat.finish()
    assert (tmp_path / "b.img").read_bytes() == content
    assert (result.digest, result.totals) == (image.digest, image.totals)


def test_a_part_that_is_not_there_is_refused(tmp_path: Path) -> None:
    write_image(tmp_path / "a.img", info_of(mixture()), mixture())
    size = (tmp_path / "a.img").stat().st_size
    with (tmp_path / "a.img").open("rb") as file:
        for offset, length in ((1, size), (0, size - 1), (size + 1, 1), (2**63, 2**63), (0, 0)):
            with pytest.raises(CorruptDataError, match=f"^{PLACE}: "):
                ImageReader.open_part(file.fileno(), offset, length, PLACE)


def test_damage_in_a_part_is_found_and_named(tmp_path: Path) -> None:
    write_image(tmp_path / "a.img", info_of(mixture()), mixture(), alignment=64)
    content = (tmp_path / "a.img").read_bytes()
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1
        (tmp_path / "a.tar").write_bytes(bytes(7) + damaged)
        with (tmp_path / "a.tar").open("rb") as file, pytest.raises(CorruptDataError, match=PLACE):
            ImageReader.open_part(file.fileno(), 7, len(content), PLACE).verify(1)


def test_damaged_ends_are_found(tmp_path: Path) -> None:
    write_image(tmp_path / "a.img", info_of(mixture()), mixture())
    content = (tmp_path / "a.img").read_bytes()
    header, tail = ends(content)
    for place in [*range(len(header)), *range(len(content) - len(tail), len(content))]:
        damaged = bytearray(content)
        damaged[place] ^= 0x10
        with pytest.raises(CorruptDataError, match=PLACE):
            ImageReader.from_ends(*ends(damaged), len(content), PLACE)
    with pytest.raises(CorruptDataError, match="metadata"):
        ImageReader.from_ends(header, tail[1:], len(content), PLACE)


def test_stored_bytes_of_another_chunk_are_refused(tmp_path: Path) -> None:
    memory = [(PAGE, b"\x07" * PAGE + noise(PAGE) + bytes(PAGE) + b"\x08" * PAGE)]
    write_image(tmp_path / "a.img", info_of(memory), memory)
    content = (tmp_path / "a.img").read_bytes()
    image = ImageReader.from_ends(*ends(content), len(content), PLACE)
    kinds = [image.chunk(index).encoding for index in range(4)]
    assert kinds == [Encoding.LZ4, Encoding.RAW, Encoding.ZERO, Encoding.LZ4]
    stored = [
        content[chunk.offset : chunk.offset + chunk.stored_size]
        for chunk in map(image.chunk, range(4))
    ]
    for index in range(4):
        for other in range(4):
            if index == other:
                image.check_stored(index, stored[other])
                continue
            with pytest.raises(CorruptDataError, match=rf"{PLACE}: chunk {index} at 0x"):
                image.check_stored(index, stored[other])
    with pytest.raises(ValueError, match="no chunk 4"):
        image.check_stored(4, b"")


def test_chunks_cannot_be_read_through_ends(tmp_path: Path) -> None:
    write_image(tmp_path / "a.img", info_of(mixture()), mixture())
    content = (tmp_path / "a.img").read_bytes()
    image = ImageReader.from_ends(*ends(content), len(content), PLACE)
    with pytest.raises(ValueError, match="only the ends"):
        image.read_chunk(1)
    with pytest.raises(ValueError, match="no directory"):
        image.attach_sources()


def test_a_flat_image_wants_each_chunk_once(tmp_path: Path) -> None:
    write_image(tmp_path / "a.img", info_of(mixture()), mixture(), compress=False)
    image = ImageReader.open(tmp_path / "a.img")
    with FlatImageWriter(image, tmp_path / "b.img") as flat:
        flat.put(0, bytes(PAGE))
        with pytest.raises(ValueError, match="put before"):
            flat.put(0, bytes(PAGE))
        with pytest.raises(ValueError, match="number of stored bytes"):
            flat.put(1, bytes(PAGE - 1))
        with pytest.raises(ValueError, match="does not exist"):
            flat.put(100, b"")
        with pytest.raises(ValueError, match="were not put"):
            flat.finish()
    assert sorted(os.listdir(tmp_path)) == ["a.img"]


def test_a_manifest_in_memory_is_the_one_on_disk(tmp_path: Path) -> None:
    manifest = make_checkpoint(tmp_path, {1: mixture(), 7: mixture()}, staged_in_criu=(3,))
    raw = (tmp_path / MANIFEST_NAME).read_bytes()
    assert parse_manifest(raw, PLACE) == manifest == read_manifest(tmp_path)
    for place in range(len(raw)):
        damaged = bytearray(raw)
        damaged[place] ^= 0x80
        with pytest.raises(CorruptDataError, match=PLACE):
            parse_manifest(damaged, PLACE)
    assert image_name(7) == "gpustasis-7.img"
