# SPDX-License-Identifier: Apache-2.0
"""Checkpoints whose tasks have memory alike, which one image holds: every reader finds it, and what
is wrong there is told of all that need it."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpustasis._core import (
    CorruptDataError,
    Encoding,
    ImageReader,
    ManifestTask,
    MemoryKind,
    ParentIndex,
    UnsupportedDataError,
    image_name,
    read_manifest,
)
from gpustasis.cli import cli
from gpustasis.errors import ImageError, UnsupportedError
from gpustasis.image.difference import compare
from gpustasis.image.flatten import flatten
from gpustasis.image.store import list_store
from gpustasis.image.store_verification import verify_store
from gpustasis.image.verification import verify_directory
from support.chains import checkpoint_id, contents, make_link, memory_of
from support.golden import ALIKE_FIRST, ALIKE_SECOND, write_golden_alike
from support.image_samples import PAGE
from support.image_seal import sealed
from support.json_output import check_document
from support.plain_reader import PlainImage, PlainSource

WORDS = ["A", "b", "0", "C"]
GOLDEN = Path(__file__).parent.parent / "data" / "golden" / "v1-alike"
MAGIC_AND_ENDS = 128 + 40 * 4 + 48  # of an image of four chunks and a source: from the sources on


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """Tasks 7 and 9, the second with a chunk of its own."""
    make_link(
        tmp_path / "one", {7: memory_of(WORDS), 9: memory_of(["A", "D", "0", "C"])}, alike=True
    )
    return tmp_path / "one"


def flip(path: Path, number: int) -> None:
    """One bit of a chunk that the image holds itself."""
    chunk = ImageReader.open(path).chunk(number)
    assert chunk.source == 0
    raw = bytearray(path.read_bytes())
    raw[chunk.offset + chunk.stored_size // 2] ^= 0x10
    path.write_bytes(raw)


def run(*words: object) -> str:
    result = CliRunner().invoke(cli, [str(word) for word in words])
    assert result.exception is None, result.output
    return result.output


def test_inspect_counts_it_apart(pair: Path) -> None:
    found = check_document(run("inspect", "--json", pair), "inspect")
    image = next(p["cuda"]["image"] for p in found["processes"] if p["pid"] == 9)
    assert image["encodings"]["alike"] == {
        "chunks": 2,
        "plain_bytes": 2 * PAGE,
        "stored_bytes": 0,
    }
    assert image["encodings"]["ref"]["chunks"] == 0
    (source,) = image["sources"]
    assert (source["depth"], source["pid"], source["state"]) == (0, 7, "right")
    assert source["directory"] == str(pair)
    assert f"alike with {pair}/gpustasis-7.img" in run("inspect", pair)
    assert found["parent"] is None


def test_verify_reads_it_where_it_is(pair: Path) -> None:
    found = check_document(run("verify", "--json", pair), "verify")
    assert (found["alike_bytes"], found["earlier_bytes"], found["problems"]) == (2 * PAGE, 0, [])
    assert "of it alike and stored once" in run("verify", pair)
    flip(pair / image_name(7), 0)
    problems = verify_directory(pair).problems
    assert len(problems) == 2  # of both that need it
    assert {"gpustasis-7.img: chunk 0" in problem for problem in problems} == {True, False}


def test_a_store_is_checked_once_and_damage_is_told_of_both(pair: Path) -> None:
    sound = verify_store(pair.parent)
    assert sound.damaged == []
    assert sound.read_bytes == sum(
        chunk.stored_size
        for pid in (7, 9)
        for image in [ImageReader.open(pair / image_name(pid))]
        for chunk in map(image.chunk, range(len(image)))
        if chunk.source == 0
    )
    flip(pair / image_name(7), 0)
    (found,) = verify_store(pair.parent).damaged
    assert (found.damaged_chunks, found.damaged_elsewhere) == (2, 0)
    path = pair / image_name(7)
    path.write_bytes(path.read_bytes()[:-1])
    (found,) = verify_store(pair.parent).damaged
    whose = f"gpustasis-7.img of checkpoint {checkpoint_id('one').hex()}, this one, is replaced"
    assert any(whose in problem for problem in found.problems)
    assert "gpustasis-7.img" in list_store(pair.parent)[0].problem
    path.unlink()
    (found,) = verify_store(pair.parent).damaged
    assert any("this one, is missing" in problem for problem in found.problems)


def test_flatten_stores_it_in_each(pair: Path, tmp_path: Path) -> None:
    done = flatten(pair, tmp_path / "flat")
    assert done.earlier_bytes == 0
    assert contents(tmp_path / "flat") == contents(pair)
    assert compare(pair, tmp_path / "flat").amounts.same == 8 * PAGE
    for pid in (7, 9):
        assert not ImageReader.open(tmp_path / "flat" / image_name(pid)).info.sources
    flip(pair / image_name(7), 0)
    with pytest.raises(ImageError, match="chunk 0"):
        flatten(pair, tmp_path / "damaged")


def test_a_child_names_the_image_that_holds_it(pair: Path, tmp_path: Path) -> None:
    words = [*WORDS, "E"]
    make_link(tmp_path / "two", {7: memory_of(words), 9: memory_of(words)}, parent=pair, alike=True)
    sources = ImageReader.open(tmp_path / "two" / image_name(9)).info.sources
    assert [(source.depth, source.pid) for source in sources] == [(0, 7), (1, 7)]
    found = verify_directory(tmp_path / "two")
    assert (found.alike_bytes, found.earlier_bytes, found.earlier_checkpoints) == (
        PAGE,
        6 * PAGE,
        1,
    )
    assert found.problems == []
    assert flatten(tmp_path / "two", tmp_path / "flat").earlier_bytes == 6 * PAGE
    assert contents(tmp_path / "flat") == contents(tmp_path / "two")


def test_only_complete_images_of_the_checkpoint_are_known(pair: Path) -> None:
    index = ParentIndex(PAGE)
    assert len(index) == 0
    (task, _) = read_manifest(pair).tasks
    with pytest.raises(ValueError, match="chunk size"):
        ParentIndex().add(pair, checkpoint_id("one"), task)
    index.add(pair, checkpoint_id("one"), task)
    assert len(index) == 3
    with pytest.raises(ValueError, match="known already"):
        index.add(pair, checkpoint_id("one"), task)
    with pytest.raises(OSError, match="gpustasis-8"):
        index.add(pair, checkpoint_id("one"), ManifestTask(pid=8, externalized=True))


def reader_of(path: Path) -> PlainImage:
    def read_source(source: PlainSource) -> bytes:
        assert source.depth == 0
        file = path.parent / source.name
        if not file.exists():
            raise ImageError("missing")
        return file.read_bytes()

    return PlainImage(path.read_bytes(), read_source)


words = st.lists(st.sampled_from("0ABCdef"), min_size=1, max_size=6)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    gpu=st.lists(words, min_size=1, max_size=4),
    cpu=st.lists(words, max_size=2),
    below=st.none() | st.lists(words, min_size=1, max_size=2),
)
def test_any_tasks(
    tmp_path: Path, gpu: list[list[str]], cpu: list[list[str]], below: list[list[str]] | None
) -> None:
    """Every content is stored once at most, apart from what one image has twice, and all comes
    back, also from the flat copy."""
    place = Path(tempfile.mkdtemp(dir=tmp_path))
    parent = None
    if below is not None:
        parent = place / "below"
        make_link(parent, {7 + n: memory_of(w) for n, w in enumerate(below)}, alike=True)
    images = {7 + number: memory_of(task) for number, task in enumerate(gpu)}
    memory = {7 + number: memory_of(task) for number, task in enumerate(cpu)}
    top = place / "top"
    make_link(top, images, cpu_memory=memory, parent=parent, alike=True)
    for kind, wanted in ((MemoryKind.GPU, images), (MemoryKind.CPU, memory)):
        plain = {pid: b"".join(part for _, part in runs) for pid, runs in wanted.items()}
        assert contents(top, kind) == plain
    holders: dict[bytes, str] = {}
    for path in sorted(place.glob("*/gpustasis-*[0-9].img")):
        image = ImageReader.open(path)
        for chunk in map(image.chunk, range(len(image))):
            if chunk.source == 0 and chunk.encoding != Encoding.ZERO:
                assert holders.setdefault(chunk.hash, str(path)) == str(path)
    assert verify_directory(top).problems == []
    flatten(top, place / "flat")
    for kind in (MemoryKind.GPU, MemoryKind.CPU):
        assert contents(place / "flat", kind) == contents(top, kind)
    if parent is None:
        for task in read_manifest(top).tasks:
            plain_image = reader_of(top / task.image_name)
            plain_image.verify()
            read = b"".join(map(plain_image.read_chunk, range(len(plain_image.chunks))))
            assert read == contents(top, task.kind)[task.pid]
    shutil.rmtree(place)


def verdict(path: Path, *, core: bool) -> str:
    try:
        if core:
            image = ImageReader.open(path)
            image.attach_sources()
            image.verify(1)
        else:
            reader_of(path).verify()
    except (CorruptDataError, ImageError, OSError):  # OSError: a source that is not there
        return "corrupt"
    except (UnsupportedDataError, UnsupportedError):
        return "unsupported"
    return "whole"


def test_both_readers_refuse_the_same(pair: Path) -> None:
    """One byte changed, all checksums made right: in the header, the source and the index."""
    path = pair / image_name(9)
    whole = path.read_bytes()
    assert verdict(path, core=True) == verdict(path, core=False) == "whole"
    source = len(whole) - MAGIC_AND_ENDS
    generator = random.Random(3)
    places = [
        *range(16, 17),
        *generator.choices(range(80), k=100),
        *(source + at for at in range(48) for _ in range(3)),
        *generator.choices(range(source + 48, len(whole) - 128), k=150),
    ]
    seen = Counter[str]()
    for at in places:
        file = bytearray(whole)
        file[at] = generator.choice([0, 1, 2, 7, 9, 16, 17, 255, file[at] ^ 1])
        path.write_bytes(sealed(file))
        found = verdict(path, core=True)
        assert found == verdict(path, core=False), f"byte {at}: {file[at]}"
        seen[found] += 1
    assert seen["corrupt"] > 100
    assert seen["unsupported"] > 0


class TestGolden:
    def test_both_readers_read_it(self) -> None:
        assert verify_directory(GOLDEN).problems == []
        for path, memory in (
            (GOLDEN / image_name(7), ALIKE_FIRST),
            (GOLDEN / image_name(9, MemoryKind.CPU), ALIKE_SECOND),
        ):
            plain = reader_of(path)
            plain.verify()
            image = ImageReader.open(path)
            image.attach_sources()
            for index in range(len(image)):
                begin = index * PAGE
                assert image.read_chunk(index) == memory[0][1][begin : begin + PAGE]
                assert plain.read_chunk(index) == image.read_chunk(index)
        assert [(source.depth, source.pid) for source in plain.sources] == [(0, 7)]
        assert image.totals.alike.chunks == 4
        assert plain.has_alike
        assert not plain.has_parent

    def test_the_writer_still_writes_it(self, tmp_path: Path) -> None:
        write_golden_alike(tmp_path)
        for path in GOLDEN.iterdir():
            assert (tmp_path / path.name).read_bytes() == path.read_bytes()
