# SPDX-License-Identifier: Apache-2.0
"""The plain Python reader, written from docs/format.md, agrees with the C++ one."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpustasis._core import (
    CorruptDataError,
    ImageReader,
    MemoryKind,
    UnsupportedDataError,
    image_name,
    read_manifest,
    write_image,
)
from gpustasis.errors import ImageError, UnsupportedError
from support.golden import (
    CPU_FIRST,
    CPU_SECOND,
    GPU_MEMORY,
    MIXTURE,
    SMALLEST,
    smallest_info,
    write_golden,
    write_golden_memory,
)
from support.image_samples import Memory, Sample, info_of, make_checkpoint, mixture, samples
from support.image_seal import sealed
from support.plain_manifest import FEATURE_CPU_MEMORY, FEATURE_PARENT, parse_manifest
from support.plain_reader import PlainImage

GOLDEN = Path(__file__).parent.parent / "data" / "golden"
ONE_DIRECTORY = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def os_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def assert_same(image: ImageReader, plain: PlainImage) -> None:
    info = image.info
    assert (plain.checkpoint_id, plain.parent_id) == (info.checkpoint_id, info.parent_id)
    assert (plain.pid, plain.chunk_size, plain.digest) == (info.pid, info.chunk_size, image.digest)
    assert plain.kind == info.kind.value
    assert (plain.start_time, plain.boot_id) == (info.start_time, info.boot_id)
    assert (plain.comm, plain.driver_version) == (
        os_bytes(info.comm),
        os_bytes(info.driver_version),
    )
    assert plain.state_before == info.state_before.value
    assert plain.driver_api_version == info.driver_api_version
    assert [(g.uuid, g.memory_size, g.name) for g in plain.gpus] == [
        (g.uuid, g.memory_size, os_bytes(g.name)) for g in info.gpus
    ]
    assert [(r.address, r.length, r.protection, r.kind) for r in plain.regions] == [
        (r.address, r.length, r.protection, r.kind.value) for r in info.regions
    ]
    assert len(plain.chunks) == len(image)
    for index, chunk in enumerate(plain.chunks):
        other = image.chunk(index)
        assert (chunk.address, chunk.plain_size) == (other.address, other.plain_size)
        assert (chunk.offset, chunk.stored_size) == (other.offset, other.stored_size)
        assert (chunk.encoding, chunk.plain_hash) == (other.encoding.value, other.hash)
        assert plain.read_chunk(index) == image.read_chunk(index)


@ONE_DIRECTORY
@given(sample=samples())
def test_both_readers_read_the_same(tmp_path: Path, sample: Sample) -> None:
    path = tmp_path / "a.img"
    write_image(
        path, sample.info, sample.memory, compress=sample.compress, alignment=sample.alignment
    )
    plain = PlainImage(path.read_bytes())
    plain.verify()
    assert_same(ImageReader.open(path), plain)


def verdict_of_core(path: Path) -> str:
    try:
        ImageReader.open(path).verify(1)
    except CorruptDataError:
        return "corrupt"
    except UnsupportedDataError:
        return "unsupported"
    return "whole"


def verdict_of_plain(file: bytes) -> str:
    try:
        PlainImage(file).verify()
    except ImageError:
        return "corrupt"
    except UnsupportedError:
        return "unsupported"
    return "whole"


# What is stored where, away from chunk data: header, metadata, index, trailer.
@settings(max_examples=1500, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    at=st.integers(0, 255 + 96 + 280 + 48 + 7 * 40 + 128),
    value=st.one_of(st.integers(0, 255), st.sampled_from([0, 1, 2, 3, 4, 7, 8, 16, 128, 255])),
)
def test_both_readers_refuse_the_same(tmp_path: Path, at: int, value: int) -> None:
    path = tmp_path / "a.img"
    if not path.exists():
        write_image(path, info_of(mixture()), mixture(), alignment=64)
        (tmp_path / "whole").write_bytes(path.read_bytes())
    file = bytearray((tmp_path / "whole").read_bytes())
    ends = len(file) - (96 + 280 + 48 + 7 * 40 + 128)
    file[at if at < 256 else ends + at - 256] = value
    path.write_bytes(sealed(file))
    assert verdict_of_core(path) == verdict_of_plain(bytes(file))


@pytest.mark.parametrize("directory", ["first", "second"])
def test_both_readers_refuse_the_same_of_cpu_memory(tmp_path: Path, directory: str) -> None:
    """With any kind, and any features, that the fields can hold."""
    whole = (GOLDEN / "v1-memory" / directory / image_name(4242, MemoryKind.CPU)).read_bytes()
    path = tmp_path / "a.img"
    ends = int.from_bytes(whole[-128:-120], "little")
    regions = int.from_bytes(whole[ends + 32 : ends + 36], "little")
    places = [16, 76, *(ends + 96 + 24 * region + 20 for region in range(regions))]
    if directory == "second":
        places += [ends + 96 + 24 * regions + at for at in (46, 47)]
    verdicts = set()
    for at in places:
        for value in range(256):
            file = bytearray(whole)
            file[at] = value
            path.write_bytes(sealed(file))
            core = verdict(lambda: ImageReader.open(path))
            assert core == verdict(lambda now=bytes(file): PlainImage(now)), (at, value)
            verdicts.add((at, core))
    assert {verdict for _, verdict in verdicts} == {"whole", "corrupt", "unsupported"}
    assert {at for at, verdict in verdicts if verdict == "corrupt"} == set(places)


def test_the_check_above_sees_all_three_verdicts(tmp_path: Path) -> None:
    path = tmp_path / "a.img"
    write_image(path, info_of(mixture()), mixture(), alignment=64)
    whole = path.read_bytes()
    expected = {(24, 1): "whole", (16, 2): "unsupported", (8, 2): "unsupported", (76, 1): "corrupt"}
    for (at, value), verdict in expected.items():
        file = bytearray(whole)
        file[at] = value
        path.write_bytes(sealed(file))
        assert verdict_of_core(path) == verdict_of_plain(bytes(file)) == verdict


def test_the_plain_reader_finds_every_truncation_and_flip(tmp_path: Path) -> None:
    path = tmp_path / "a.img"
    write_image(path, smallest_info(), SMALLEST, alignment=64)
    whole = path.read_bytes()
    assert verdict_of_plain(whole) == "whole"
    for keep in range(len(whole)):
        assert verdict_of_plain(whole[:keep]) == "corrupt"
    for bit in range(8 * len(whole)):
        file = bytearray(whole)
        file[bit // 8] ^= 1 << bit % 8
        assert verdict_of_plain(bytes(file)) == "corrupt"


def test_both_readers_read_the_same_manifest(tmp_path: Path) -> None:
    manifest = make_checkpoint(tmp_path, {7: mixture(), 9: []}, staged_in_criu=(8, 10))
    plain = parse_manifest((tmp_path / "gpustasis-manifest.img").read_bytes())
    assert plain.checkpoint_id == manifest.checkpoint_id
    assert plain.driver_version.decode() == manifest.driver_version
    assert plain.driver_api_version == manifest.driver_api_version
    assert [(g.uuid, g.memory_size, g.name.decode()) for g in plain.gpus] == [
        (g.uuid, g.memory_size, g.name) for g in manifest.gpus
    ]
    assert [(t.pid, t.externalized, t.digest, t.state_before) for t in plain.tasks] == [
        (t.pid, t.externalized, t.digest, t.state_before.value) for t in manifest.tasks
    ]
    assert {t.gpu_source for t in plain.tasks} == {0, 1, 2}
    assert [(t.gpu_source, [(g.gpu, g.memory_size) for g in t.gpus]) for t in plain.tasks] == [
        (t.gpu_source.value, [(g.gpu, g.memory_size) for g in t.gpus]) for t in manifest.tasks
    ]


def test_both_readers_refuse_the_same_manifests(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, {7: [], 9: []})
    path = tmp_path / "gpustasis-manifest.img"
    whole = path.read_bytes()
    generator = random.Random(5)
    verdicts = set()
    for _ in range(1000):
        file = bytearray(whole)
        file[generator.randrange(len(file) - 16)] = generator.choice([0, 1, 2, 9, 255])
        file[-16:] = xxhash.xxh3_128_digest(file[:-16])
        path.write_bytes(file)
        core = verdict(lambda: read_manifest(tmp_path))
        assert core == verdict(lambda now=bytes(file): parse_manifest(now))
        verdicts.add(core)
    assert verdicts == {"whole", "corrupt", "unsupported"}


def verdict(read: Callable[[], object]) -> str:
    try:
        read()
    except (CorruptDataError, ImageError):
        return "corrupt"
    except (UnsupportedDataError, UnsupportedError):
        return "unsupported"
    return "whole"


class TestGoldenFiles:
    """Files of format version 1: they are read for ever, and today's writer makes the same."""

    V1 = GOLDEN / "v1"

    @pytest.mark.parametrize(
        ("name", "memory"),
        [("smallest.img", SMALLEST), ("mixture.img", MIXTURE)],
    )
    def test_both_readers_read_them(self, name: str, memory: list[tuple[int, bytes]]) -> None:
        image = ImageReader.open(self.V1 / name)
        image.verify()
        plain = PlainImage((self.V1 / name).read_bytes())
        plain.verify()
        assert_same(image, plain)
        content = b"".join(image.read_chunk(index) for index in range(len(image)))
        assert content == b"".join(part for _, part in memory)
        assert [(r.address, r.length) for r in image.info.regions] == [
            (address, len(part)) for address, part in memory
        ]

    def test_the_writer_makes_them_byte_for_byte(self, tmp_path: Path) -> None:
        write_golden(tmp_path)
        names = sorted(path.name for path in self.V1.iterdir())
        assert names == sorted(path.name for path in tmp_path.iterdir())
        for name in names:
            assert (tmp_path / name).read_bytes() == (self.V1 / name).read_bytes(), name

    def test_the_manifest_means_the_image(self) -> None:
        (_, task) = read_manifest(self.V1).tasks
        assert task.digest == ImageReader.open(self.V1 / "mixture.img").digest

    def test_the_worked_example_is_the_smallest_of_them(self) -> None:
        page = (GOLDEN.parent.parent.parent / "docs" / "format.md").read_text()
        example = page.split("## Worked example")[1].split("```")[1]
        rows = re.findall(r"^([0-9a-f]{3})  ([0-9a-f ]+)$", example, re.MULTILINE)
        file = (self.V1 / "smallest.img").read_bytes()
        shown = bytearray(len(file))
        for offset, row in rows:
            shown[int(offset, 16) : int(offset, 16) + 16] = bytes.fromhex(row)
        assert len(rows) > 10
        assert shown == file


class TestGoldenMemory:
    """Two checkpoints of format version 1 with CPU memory, the second built on the first."""

    V1 = GOLDEN / "v1-memory"
    IMAGES = (
        ("first", MemoryKind.CPU, CPU_FIRST, FEATURE_CPU_MEMORY),
        ("second", MemoryKind.CPU, CPU_SECOND, FEATURE_PARENT | FEATURE_CPU_MEMORY),
        ("second", MemoryKind.GPU, GPU_MEMORY, FEATURE_PARENT),
    )

    @pytest.mark.parametrize(("directory", "kind", "memory", "features"), IMAGES)
    def test_both_readers_read_them(
        self, directory: str, kind: MemoryKind, memory: Memory, features: int
    ) -> None:
        path = self.V1 / directory / image_name(4242, kind)
        image = ImageReader.open(path)
        image.attach_sources()
        image.verify()
        file = path.read_bytes()
        plain = PlainImage(file, lambda source: (self.V1 / "first" / source.name).read_bytes())
        plain.verify()
        assert_same(image, plain)
        content = b"".join(image.read_chunk(index) for index in range(len(image)))
        assert content == b"".join(part for _, part in memory)
        assert (image.info.kind, plain.kind) == (kind, kind.value)
        assert int.from_bytes(file[16:24], "little") == features
        refers = directory == "second" and kind == MemoryKind.CPU
        assert [source.kind for source in image.info.sources] == [MemoryKind.CPU] * refers
        assert [source.kind for source in plain.sources] == [1] * refers

    def test_both_readers_read_the_manifests(self) -> None:
        for directory, kinds, features in (
            ("first", [1], FEATURE_CPU_MEMORY),
            ("second", [0, 1], FEATURE_PARENT | FEATURE_CPU_MEMORY),
        ):
            manifest = read_manifest(self.V1 / directory)
            file = (self.V1 / directory / "gpustasis-manifest.img").read_bytes()
            plain = parse_manifest(file)
            assert [task.kind.value for task in manifest.tasks] == kinds
            assert [task.kind for task in plain.tasks] == kinds
            assert int.from_bytes(file[16:24], "little") == features
            for task in manifest.tasks:
                image = ImageReader.open(self.V1 / directory / task.image_name)
                assert image.digest == task.digest

    def test_the_writer_makes_them_byte_for_byte(self, tmp_path: Path) -> None:
        write_golden_memory(tmp_path)
        names = sorted(path.relative_to(self.V1) for path in self.V1.glob("*/*"))
        assert names == sorted(path.relative_to(tmp_path) for path in tmp_path.glob("*/*"))
        assert len(names) == 6
        for name in names:
            one, other = tmp_path / name, self.V1 / name
            assert one.is_symlink() == other.is_symlink(), name
            same = os.readlink if one.is_symlink() else Path.read_bytes
            assert same(one) == same(other), name
