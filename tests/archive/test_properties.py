# SPDX-License-Identifier: Apache-2.0
"""Whatever is in an archive: it is read or refused, never a traceback, never a file outside."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from campaigns import archives
from gpustasis._core import ManifestTask, image_name, read_manifest, write_manifest
from gpustasis.archive.flatten import flatten_archive
from gpustasis.archive.opened import open_archive, open_files
from gpustasis.archive.stream import DEFAULT_LIMITS, Compression, UnpackedStream
from gpustasis.archive.tar import Kind, TarReader
from gpustasis.archive.verification import verify_archive
from gpustasis.errors import ArchiveError, CheckpointError
from support.archives import COMPRESSIONS, compressed, pack
from support.chains import make_chain, make_link, memory_of
from support.image_samples import make_checkpoint, mixture
from support.image_seal import sealed

SEED = 20261121
ROUNDS = 300
ONE_DIRECTORY = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture
def sample(tmp_path: Path) -> bytes:
    images = tmp_path / "images"
    images.mkdir()
    words = ["A", "b", "0", "C"]
    make_link(images, {7: memory_of(words), 9: memory_of(words)})
    return pack(images, tmp_path / "sample.tar").read_bytes()


def test_mutated_archives_are_read_or_refused(tmp_path: Path, sample: bytes) -> None:
    """Seeded; `make soak` does it for longer."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    tally = archives.run(sample, scratch, Random(SEED), ROUNDS)
    tally.require_clean()
    assert tally.counts["refused"] > ROUNDS // 4
    assert tally.counts["read"] > 0  # changed where no engine looks, or outside of our files


def test_mutated_images_with_right_checksums(tmp_path: Path) -> None:
    """Forged metadata and indexes reach the places of chunks."""
    rng = Random(SEED)
    images, place = tmp_path / "images", tmp_path / "place"
    images.mkdir()
    place.mkdir()
    make_checkpoint(images, {7: mixture()})
    whole = (images / image_name(7)).read_bytes()
    refused = 0
    for _ in range(ROUNDS // 4):
        raw = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            at = rng.choice([rng.randrange(240), rng.randrange(len(raw) - 900, len(raw) - 128)])
            raw[at] = rng.choice([0, 1, 255, rng.randrange(256)])
        (images / image_name(7)).write_bytes(sealed(raw))
        if sealed(raw) != whole:
            assert not archives.is_read(pack(images, place / "a.tar"))
            refused += 1
    assert refused > ROUNDS // 8


def test_forged_sources_with_right_digests(tmp_path: Path) -> None:
    """Indexes that refer to wrong places of a parent, which the manifest vouches for."""
    rng = Random(SEED)
    store = tmp_path / "store"
    store.mkdir()
    parent, child = make_chain(store, 1)
    below = pack(parent, tmp_path / "parent.tar.gz", compression="gzip")
    whole = (child / image_name(7)).read_bytes()
    manifest = read_manifest(child)
    problems = 0
    for _ in range(ROUNDS // 8):
        raw = bytearray(whole)
        index = len(raw) - 128 - 40 * 8
        for _ in range(rng.randint(1, 3)):
            raw[index + rng.randrange(40 * 8)] = rng.randrange(256)
        forged = sealed(raw)
        (child / image_name(7)).write_bytes(forged)
        task = ManifestTask(pid=7, externalized=True, digest=forged[-16:])
        write_manifest(
            child,
            type(manifest)(
                checkpoint_id=manifest.checkpoint_id,
                gpus=manifest.gpus,
                tasks=[task],
                parent_id=manifest.parent_id,
                chain_length=1,
            ),
        )
        with open_files(pack(child, tmp_path / "child.tar"), [below]) as files:
            problems += bool(verify_archive(files, threads=1).problems)  # type: ignore[arg-type]
            with pytest.raises(CheckpointError):
                flatten_archive(files, tmp_path / "out", threads=1)  # type: ignore[arg-type]
        assert not (tmp_path / "out").exists()
    assert problems == ROUNDS // 8


_names = st.lists(
    st.text(
        st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=40
    ).filter(lambda part: part not in (".", "..")),
    min_size=1,
    max_size=5,
).map("/".join)
_members = st.lists(
    st.tuples(_names, st.binary(max_size=2000)), max_size=8, unique_by=lambda m: m[0]
)
_formats = st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])


@ONE_DIRECTORY
@given(members=_members, written_as=_formats, how=st.sampled_from(COMPRESSIONS))
def test_what_tar_writes_is_read(
    tmp_path: Path, members: list[tuple[str, bytes]], written_as: int, how: str
) -> None:
    """By another implementation, with long names, other alphabets and any content."""
    taken = {name for name, _ in members}
    members = [m for m in members if not any(m[0].startswith(f"{t}/") for t in taken)]
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=written_as) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    path = tmp_path / "a"
    path.write_bytes(compressed(packed.getvalue(), how))
    with path.open("rb") as file:
        stream = UnpackedStream(file, Compression(how), DEFAULT_LIMITS, "a")
        reader = TarReader(stream, DEFAULT_LIMITS)
        found = [(m.name, reader.read(m.size)) for m in reader if m.kind is Kind.FILE]
    assert found == members


@ONE_DIRECTORY
@given(raw=st.binary(max_size=3000), how=st.sampled_from(COMPRESSIONS))
def test_any_bytes_are_refused(tmp_path: Path, raw: bytes, how: str) -> None:
    path = tmp_path / "a"
    path.write_bytes(compressed(raw, how))
    with pytest.raises(ArchiveError), open_archive(path):
        pass
