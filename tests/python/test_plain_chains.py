# SPDX-License-Identifier: Apache-2.0
"""The plain Python reader agrees with the C++ one about images on top of a parent."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpustasis._core import (
    CorruptDataError,
    ImageReader,
    Source,
    UnsupportedDataError,
    image_name,
    read_manifest,
)
from gpustasis.errors import ImageError, UnsupportedError
from support.chains import checkpoint_id, make_chain, make_link, memory_of
from support.image_seal import sealed
from support.plain_manifest import parse_manifest
from support.plain_reader import PlainImage, PlainSource

METADATA_SIZE, GPU_SIZE, REGION_SIZE, SOURCE_SIZE, ENTRY_SIZE = 96, 280, 24, 48, 40


def reader_of(chain: list[Path]) -> PlainImage:
    """Of the last one; the others are where `depth` says."""

    def read_source(source: PlainSource) -> bytes:
        return (chain[-1 - source.depth] / image_name(source.pid)).read_bytes()

    return PlainImage((chain[-1] / image_name(7)).read_bytes(), read_source)


def fields(source: PlainSource | Source) -> tuple[bytes, bytes, int, int, int]:
    return source.checkpoint_id, source.digest, source.file_size, source.pid, source.depth


def assert_same(image: ImageReader, plain: PlainImage) -> None:
    assert plain.parent_id == image.info.parent_id
    assert [fields(source) for source in plain.sources] == [
        fields(source) for source in image.info.sources
    ]
    for index, chunk in enumerate(plain.chunks):
        other = image.chunk(index)
        assert (chunk.offset, chunk.stored_size) == (other.offset, other.stored_size)
        assert (chunk.encoding, chunk.source) == (other.encoding.value, other.source)
        assert plain.read_chunk(index) == image.read_chunk(index)


def test_a_chain(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 5)
    image = ImageReader.open(chain[-1] / image_name(7))
    image.attach_sources()
    image.verify()
    plain = reader_of(chain)
    plain.verify()
    assert_same(image, plain)
    assert {source.depth for source in plain.sources} == {1, 2, 3, 4, 5}
    manifest = parse_manifest((chain[-1] / "gpustasis-manifest.img").read_bytes())
    assert (manifest.parent_id, manifest.chain_length) == (checkpoint_id("c004"), 5)


words = st.lists(st.sampled_from("0ABCdef"), min_size=1, max_size=6)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(links=st.lists(st.tuples(words, words), min_size=1, max_size=5))
def test_any_chain(tmp_path: Path, links: list[tuple[list[str], list[str]]]) -> None:
    place = Path(tempfile.mkdtemp(dir=tmp_path))
    chain: list[Path] = []
    for number, (one, two) in enumerate(links):
        images = {7: memory_of(one), 9: memory_of(two)}
        parent = chain[-1] if chain else None
        make_link(place / f"c{number}", images, parent=parent)
        chain.append(place / f"c{number}")
    image = ImageReader.open(chain[-1] / image_name(7))
    image.attach_sources()
    plain = reader_of(chain)
    plain.verify()
    assert_same(image, plain)
    content = b"".join(plain.read_chunk(index) for index in range(len(plain.chunks)))
    assert content == memory_of(links[-1][0])[0][1]
    shutil.rmtree(place)


def test_sources_that_are_missing_or_others_are_refused(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 2)
    file = (chain[-1] / image_name(7)).read_bytes()
    with pytest.raises(ImageError, match="files of its sources are needed"):
        PlainImage(file).verify()
    swapped = [chain[1], chain[0], chain[2]]
    with pytest.raises(ImageError, match="is another file"):
        reader_of(swapped).verify()


def verdict_of_core(path: Path) -> str:
    try:
        image = ImageReader.open(path)
        image.attach_sources()
        image.verify(1)
    except (CorruptDataError, OSError):  # OSError: a source of another name or depth
        return "corrupt"
    except UnsupportedDataError:
        return "unsupported"
    return "whole"


def verdict_of_plain(file: bytes, chain: list[Path]) -> str:
    def read_source(source: PlainSource) -> bytes:
        if source.depth >= len(chain):
            raise ImageError("the links do not lead so far")
        path = chain[-1 - source.depth] / image_name(source.pid)
        if not path.exists():
            raise ImageError("missing")
        return path.read_bytes()

    try:
        PlainImage(file, read_source).verify()
    except ImageError:
        return "corrupt"
    except UnsupportedError:
        return "unsupported"
    return "whole"


def test_both_readers_refuse_the_same(tmp_path: Path) -> None:
    """One byte changed, all checksums made right: in header, metadata, sources, index, trailer."""
    chain = make_chain(tmp_path, 2)
    path = chain[-1] / image_name(7)
    whole = path.read_bytes()
    assert verdict_of_core(path) == verdict_of_plain(whole, chain) == "whole"
    count = len(ImageReader.open(path).info.sources)
    assert count == 2
    tail = METADATA_SIZE + GPU_SIZE + REGION_SIZE + count * SOURCE_SIZE + 8 * ENTRY_SIZE + 128
    sources = len(whole) - tail + METADATA_SIZE + GPU_SIZE + REGION_SIZE
    index = sources + count * SOURCE_SIZE
    generator = random.Random(7)
    places = [
        *generator.choices(range(256), k=300),
        *generator.choices(range(len(whole) - tail, len(whole)), k=700),
        *generator.choices(range(sources, index), k=600),
        *(index + ENTRY_SIZE * chunk + at for chunk in range(8) for at in range(16, 40)),
    ]
    seen: dict[str, int] = {}
    for at in places:
        file = bytearray(whole)
        file[at] = generator.choice(
            [0, 1, 2, 3, 4, 7, 8, 128, 255, file[at] ^ 1, file[at] + 1 & 255]
        )
        path.write_bytes(sealed(file))
        verdict = verdict_of_core(path)
        assert verdict == verdict_of_plain(path.read_bytes(), chain), f"byte {at}: {file[at]}"
        seen[verdict] = seen.get(verdict, 0) + 1
    assert set(seen) == {"whole", "corrupt", "unsupported"}, seen
    assert seen["corrupt"] > 500


def test_both_readers_refuse_the_same_manifests(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 1)
    path = chain[-1] / "gpustasis-manifest.img"
    whole = path.read_bytes()
    generator = random.Random(9)
    seen = set()
    for _ in range(1500):
        file = bytearray(whole)
        first = generator.choice([0, len(file) - 48])  # the parent section is the end
        file[generator.randrange(first, len(file) - 16)] = generator.choice([0, 1, 2, 3, 9, 255])
        if generator.random() < 0.05:
            file[-48:-28] = bytes(20)
        if generator.random() < 0.05:
            del file[-48:-16]
        file[-16:] = xxhash.xxh3_128_digest(file[:-16])
        path.write_bytes(file)
        core = plain = "whole"
        try:
            read_manifest(path.parent)
        except CorruptDataError:
            core = "corrupt"
        except UnsupportedDataError:
            core = "unsupported"
        try:
            parse_manifest(bytes(file))
        except ImageError:
            plain = "corrupt"
        except UnsupportedError:
            plain = "unsupported"
        assert core == plain, bytes(file).hex()
        seen.add(core)
    assert seen == {"whole", "corrupt", "unsupported"}
