# SPDX-License-Identifier: Apache-2.0
"""Archives of checkpoints whose tasks have memory alike: the image that holds it lies before or
behind the one that needs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpustasis._core import ImageReader, image_name
from gpustasis.archive.flatten import flatten_archive
from gpustasis.archive.opened import open_files
from gpustasis.archive.verification import verify_archive
from gpustasis.cli import cli
from gpustasis.errors import ImageError
from gpustasis.image.verification import verify_directory
from support.archives import COMPRESSIONS, pack
from support.chains import contents, make_link, memory_of
from support.image_samples import PAGE

WORDS = ["A", "b", "0", "C"]


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    make_link(
        tmp_path / "one", {7: memory_of(WORDS), 9: memory_of(["A", "D", "0", "C"])}, alike=True
    )
    return tmp_path / "one"


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_it_is_verified_and_flattened(pair: Path, tmp_path: Path, compression: str) -> None:
    path = pack(pair, tmp_path / "a.tar", compression=compression)
    with open_files(path) as archive:
        found = verify_archive(archive, threads=1)  # type: ignore[arg-type]
        assert found.problems == []
        assert (found.alike_bytes, found.outside_bytes, found.plain_bytes) == (
            2 * PAGE,
            0,
            8 * PAGE,
        )
        done = flatten_archive(archive, tmp_path / "flat", threads=1)  # type: ignore[arg-type]
    assert done.earlier_bytes == 0
    assert contents(tmp_path / "flat") == contents(pair)
    assert verify_directory(tmp_path / "flat").alike_bytes == 0


def test_inspect_says_that_it_is_in_the_archive(pair: Path, tmp_path: Path) -> None:
    path = pack(pair, tmp_path / "a.tar")
    result = CliRunner().invoke(cli, ["inspect", "--json", str(path)])
    image = json.loads(result.output)["processes"][-1]["cuda"]["image"]
    (source,) = image["sources"]
    assert (source["depth"], source["state"], source["directory"]) == (0, "right", str(path))
    (pair / image_name(7)).unlink()
    result = CliRunner().invoke(cli, ["inspect", "--json", str(pack(pair, path))])
    assert "gpustasis-7.img" in result.output


def test_damage_and_another_image_are_found(pair: Path, tmp_path: Path) -> None:
    holder = pair / image_name(7)
    whole = holder.read_bytes()
    chunk = ImageReader.open(holder).chunk(0)
    raw = bytearray(whole)
    raw[chunk.offset + 1] ^= 1
    changed = {
        "damaged": (bytes(raw), "chunk 0"),
        "other": (whole[:-1] + bytes([whole[-1] ^ 1]), "needs gpustasis-7.img of checkpoint"),
        "missing": (b"", "needs gpustasis-7.img of checkpoint"),
    }
    for name, (content, text) in changed.items():
        holder.write_bytes(content)
        if not content:
            holder.unlink()
        with open_files(pack(pair, tmp_path / f"{name}.tar")) as archive:
            problems = verify_archive(archive, threads=1).problems  # type: ignore[arg-type]
            assert any("gpustasis-9.img" in p and text in p for p in problems), problems
            with pytest.raises(ImageError):
                flatten_archive(archive, tmp_path / "out", threads=1)  # type: ignore[arg-type]
        assert not (tmp_path / "out").exists()


def test_beside_a_parent(pair: Path, tmp_path: Path) -> None:
    words = [*WORDS, "E"]
    top = tmp_path / "two"
    make_link(top, {7: memory_of(words), 9: memory_of(words)}, parent=pair, alike=True)
    path = pack(top, tmp_path / "two.tar")
    with open_files(path) as archive:  # what is alike is checked all the same
        found = verify_archive(archive, threads=1)  # type: ignore[arg-type]
        assert found.problems == []
        assert (found.alike_bytes, found.outside_bytes) == (PAGE, 6 * PAGE)
    for parent in (pair, pack(pair, tmp_path / "one.tar")):
        with open_files(path, [parent]) as archive:
            found = verify_archive(archive, threads=1)  # type: ignore[arg-type]
            assert found.problems == []
            assert (found.alike_bytes, found.earlier_bytes) == (PAGE, 6 * PAGE)
            out = tmp_path / f"flat-{parent.name}"
            flatten_archive(archive, out, threads=1)  # type: ignore[arg-type]
            assert contents(out) == contents(top)
