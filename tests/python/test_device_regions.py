# SPDX-License-Identifier: Apache-2.0
"""Regions that are memory of GPUs, which a driver has handed over: docs/format.md, "Region"."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpustasis._core import (
    GpuInfo,
    ImageInfo,
    ImageReader,
    MemoryKind,
    Region,
    RegionKind,
    write_image,
)
from support.image_samples import BOOT_ID, CHECKPOINT_ID, PAGE, Memory, noise
from support.plain_reader import STRIPE, PlainImage

_SIZES = st.lists(
    st.one_of(st.integers(0, 5), st.integers(-3, 3).map(lambda more: STRIPE // PAGE + more)),
    min_size=1,
    max_size=3,
).filter(any)


def address(number: int, offset: int) -> int:
    return offset // STRIPE << 34 | number << 26 | offset % STRIPE


def regions(*sizes: int) -> list[Region]:
    """Of so many bytes on each GPU."""
    found = [
        Region(address(number, offset), min(STRIPE, size - offset), 3, RegionKind.DEVICE)
        for number, size in enumerate(sizes)
        for offset in range(0, size, STRIPE)
    ]
    return sorted(found, key=lambda region: region.address)


def info(
    found: list[Region], *, gpus: int = 2, kind: MemoryKind = MemoryKind.GPU, chunk: int = PAGE
) -> ImageInfo:
    return ImageInfo(
        pid=7,
        checkpoint_id=CHECKPOINT_ID,
        boot_id=BOOT_ID,
        comm="train",
        gpus=[GpuInfo(bytes([number]) * 16, "GPU", 1 << 37) for number in range(gpus)],
        chunk_size=chunk,
        regions=found,
        kind=kind,
    )


def memory_of(found: list[Region]) -> Memory:
    """The first and the last page of each stripe hold something, all else is zero."""
    memory = []
    for region in found:
        page = noise(PAGE, hex(region.address))
        content = page + bytes(region.length - PAGE)
        if region.length > PAGE:
            content = content[:-PAGE] + page
        memory.append((region.address, content))
    return memory


@settings(deadline=None, max_examples=12)
@given(pages=_SIZES)
def test_both_readers_read_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, pages: list[int]
) -> None:
    path = tmp_path_factory.mktemp("device") / "a.img"
    found = regions(*(count * PAGE for count in pages))
    memory = memory_of(found)
    write_image(path, info(found, gpus=3, chunk=1 << 20), memory)
    image, plain = ImageReader.open(path), PlainImage(path.read_bytes())
    assert image.info.regions == found
    assert [(r.address, r.length, r.kind) for r in plain.regions] == [
        (r.address, r.length, 2) for r in found
    ]
    assert plain.has_devices
    expected = b"".join(content for _, content in memory)
    assert b"".join(image.read_chunk(i) for i in range(len(image))) == expected
    assert b"".join(plain.read_chunk(i) for i in range(len(plain.chunks))) == expected


def test_stripes_of_several_gpus_alternate() -> None:
    found = regions(2 * STRIPE + PAGE, STRIPE + PAGE)
    assert [region.address >> 26 & 0xFF for region in found] == [0, 1, 0, 1, 0]
    assert [region.length for region in found] == [STRIPE, STRIPE, STRIPE, PAGE, PAGE]


@pytest.mark.parametrize(
    ("found", "options", "why"),
    [
        ([*regions(PAGE), Region(1 << 40, PAGE)], {}, "memory of a GPU beside other memory"),
        ([Region(0, PAGE), *regions(0, PAGE)], {}, "memory of a GPU beside other memory"),
        (regions(PAGE), {"kind": MemoryKind.CPU}, "memory of a GPU beside other memory"),
        (regions(PAGE, PAGE, PAGE), {}, "of a GPU that is not listed"),
        (regions(PAGE), {"gpus": 0}, "of a GPU that is not listed"),
        (regions(2 * STRIPE)[1:], {}, "not the next stripe of its GPU's memory"),
        (
            [Region(0, STRIPE - PAGE, 3, RegionKind.DEVICE), *regions(2 * STRIPE)[1:]],
            {},
            "not the next stripe of its GPU's memory",
        ),
        ([Region(PAGE, PAGE, 3, RegionKind.DEVICE)], {}, "not the next stripe"),
        ([Region(0, STRIPE + PAGE, 3, RegionKind.DEVICE)], {}, "not the next stripe"),
    ],
)
def test_others_are_refused(
    tmp_path: Path, found: list[Region], options: dict[str, object], why: str
) -> None:
    memory = [(region.address, bytes(region.length)) for region in found]
    with pytest.raises(ValueError, match=why):
        write_image(tmp_path / "a.img", info(found, **options), memory)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
