"""Whatever is in an archive: it is read or refused, never a traceback, never a file outside."""

from __future__ import annotations

import io
import os
import random
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cudackpt._core import image_name
from cudackpt.archive.compression import Compression, UnpackedStream
from cudackpt.archive.flatten import flatten_archive
from cudackpt.archive.inspection import inspect_archive
from cudackpt.archive.limits import DEFAULT_LIMITS
from cudackpt.archive.opened import open_archive
from cudackpt.archive.tar_reader import Kind, TarReader
from cudackpt.archive.verification import verify_archive
from cudackpt.errors import ArchiveError, CheckpointError
from support.archives import COMPRESSIONS, compressed, pack
from support.chains import make_chain
from support.image_samples import make_checkpoint, mixture
from support.image_seal import sealed

SEED = 20261121
ROUNDS = int(os.environ.get("CUDACKPT_ARCHIVE_ROUNDS", "400"))
ONE_DIRECTORY = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def read_or_refuse(path: Path, place: Path) -> bool:
    """Do all that can be done with an archive; whether all of it succeeded.

    What is written lies in place/out, and only if flatten succeeded.
    """
    before = sorted(place.parent.rglob("*"))
    try:
        with open_archive(path) as archive:
            inspect_archive(archive)
            problems = verify_archive(archive, threads=1).problems
            flatten_archive(archive, place / "out", threads=1)
    except CheckpointError as exc:
        assert str(exc).isprintable()
        assert sorted(place.parent.rglob("*")) == before
        return False
    assert problems == []
    new = set(place.parent.rglob("*")) - set(before)
    assert new == {place / "out", *(place / "out").iterdir()}
    for written in (place / "out").iterdir():
        assert written.is_file()
        assert not written.is_symlink()
        written.unlink()
    (place / "out").rmdir()
    return True


def mutations(raw: bytes, rng: random.Random) -> bytes:
    """One to four changes: bits, bytes, blocks cut, doubled, swapped, zeroed, ends cut off."""
    changed = bytearray(raw)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(max(1, len(changed)))
        block = at // 512 * 512
        match rng.randrange(7):
            case 0:
                changed[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del changed[block : block + 512]
            case 2:
                changed[block:block] = changed[block : block + 512]
            case 3:
                other = rng.randrange(max(1, len(changed))) // 512 * 512
                changed[block : block + 512] = changed[other : other + 512]
            case 4:
                changed[block : block + 512] = bytes(512)
            case 5:
                del changed[at:]
            case 6:
                changed[at : at + 8] = rng.randbytes(8)
    return bytes(changed)


def with_checksums(raw: bytes) -> bytes:
    """The checksums of what looks like a header made right, so that what is in it is read."""
    fixed = bytearray(raw)
    for block in range(0, len(fixed) - 511, 512):
        if fixed[block + 257 : block + 262] == b"ustar":
            fixed[block + 148 : block + 156] = b" " * 8
            total = sum(fixed[block : block + 512])
            fixed[block + 148 : block + 156] = b"%06o\0 " % total
    return bytes(fixed)


@pytest.fixture
def sample(tmp_path: Path) -> bytes:
    images = tmp_path / "images"
    images.mkdir()
    make_checkpoint(images, {7: mixture(), 9: mixture()}, staged_in_criu=(8,))
    (images / "inventory.img").write_bytes(b"inventory")
    return pack(images, tmp_path / "sample.tar").read_bytes()


def test_mutated_archives_are_read_or_refused(tmp_path: Path, sample: bytes) -> None:
    """Seeded; CUDACKPT_ARCHIVE_ROUNDS makes it longer."""
    rng = random.Random(SEED)
    place = tmp_path / "place"
    place.mkdir()
    path = tmp_path / "mutated"
    tried: dict[bool, int] = {True: 0, False: 0}
    for turn in range(ROUNDS):
        raw = mutations(sample, rng)
        if turn % 3:
            raw = with_checksums(raw)
        packed = compressed(raw, COMPRESSIONS[turn % 2 * 2])
        if turn % 10 == 0:
            packed = mutations(packed, rng)
        path.write_bytes(packed)
        tried[read_or_refuse(path, place)] += 1
    assert tried[False] > ROUNDS // 4
    assert tried[True] > 0  # what no engine looks at, or what lies outside our files


def test_mutated_images_with_right_checksums(tmp_path: Path) -> None:
    """Forged metadata and indexes reach the places of chunks."""
    rng = random.Random(SEED)
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
            assert not read_or_refuse(pack(images, tmp_path / "a.tar"), place)
            refused += 1
    assert refused > ROUNDS // 8


def test_forged_sources_with_right_digests(tmp_path: Path) -> None:
    """Indexes that refer to wrong places of a parent, which the manifest vouches for."""
    from cudackpt._core import ManifestTask, read_manifest, write_manifest

    rng = random.Random(SEED)
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
        from cudackpt.archive.opening import open_files

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
