# SPDX-License-Identifier: Apache-2.0
"""Packs: the golden one, and both readers on others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpustasis._core import MANIFEST_NAME, PACK_NAME, PackReader, read_manifest, write_pack
from support.golden import PACKED_FILES, PACKED_NS, write_golden_packed
from support.image_samples import CHECKPOINT_ID
from support.plain_manifest import FEATURE_FILES, parse_manifest
from support.plain_pack import read_pack

V1 = Path(__file__).parent.parent / "data" / "golden" / "v1-packed"
NAMES = st.text(st.characters(codec="ascii", exclude_characters="/\0"), min_size=1, max_size=40)


def test_both_readers_read_the_golden_one() -> None:
    pack = PackReader.open(V1)
    pack.verify()
    image, files = read_pack((V1 / PACK_NAME).read_bytes())
    assert image.digest == pack.digest and image.checkpoint_id == pack.checkpoint_id
    assert {file.name.decode(): (file.content, file.mode) for file in files} == PACKED_FILES
    assert {file.name: (pack.read(file.name), file.mode) for file in pack.files} == PACKED_FILES
    assert {file.mtime_ns for file in pack.files} == {PACKED_NS}
    assert {file.mtime_ns for file in files} == {PACKED_NS}
    assert pack.size == sum(len(content) for content, _ in PACKED_FILES.values())


def test_the_manifest_means_it() -> None:
    file = (V1 / MANIFEST_NAME).read_bytes()
    assert int.from_bytes(file[16:24], "little") == FEATURE_FILES
    digest = PackReader.open(V1).digest
    assert parse_manifest(file).pack == read_manifest(V1).pack == digest


def test_the_writer_makes_it_byte_for_byte(tmp_path: Path) -> None:
    write_golden_packed(tmp_path)
    for name in (PACK_NAME, MANIFEST_NAME):
        assert (tmp_path / name).read_bytes() == (V1 / name).read_bytes(), name


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(files=st.dictionaries(NAMES, st.binary(max_size=10_000), max_size=12))
def test_what_is_packed_both_readers_give_back(files: dict[str, bytes], tmp_path: Path) -> None:
    files = {n: c for n, c in files.items() if n not in (".", "..") and "gpustasis-" not in n}
    source = tmp_path / os.urandom(8).hex()
    target = tmp_path / os.urandom(8).hex()
    for directory in (source, target):
        directory.mkdir()
    for name, content in files.items():
        (source / name).write_bytes(content)
    digest = write_pack(source, list(files), target, checkpoint_id=CHECKPOINT_ID)
    pack = PackReader.open(target)
    assert pack.digest == digest
    assert {file.name: pack.read(file.name) for file in pack.files} == files
    _, plain = read_pack((target / PACK_NAME).read_bytes())
    assert {file.name.decode(): file.content for file in plain} == files
    out = tmp_path / os.urandom(8).hex()
    out.mkdir()
    pack.extract(out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == files


def test_a_file_that_is_not_there_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        PackReader.open(V1).read("no-such.img")
