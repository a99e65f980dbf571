# SPDX-License-Identifier: Apache-2.0
"""Archives of a chain: each says what it needs, and with it is verified and flattened."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gpustasis._core import ImageReader, image_name, read_manifest
from gpustasis.archive.chunks import DirectoryParent
from gpustasis.cli import cli
from gpustasis.errors import CheckpointError, ImageError
from gpustasis.image.verification import verify_directory
from support.archives import COMPRESSIONS, ENGINES, pack
from support.chains import contents, make_chain, make_link, memory_of
from support.deadlines import run_with_deadline


@pytest.fixture
def chain(tmp_path: Path) -> list[Path]:
    """Directories: a full one and three on top of it."""
    store = tmp_path / "store"
    store.mkdir()
    return make_chain(store, 3)


@pytest.fixture
def archives(chain: list[Path], tmp_path: Path) -> list[Path]:
    kinds = zip([*ENGINES, "podman"], [*COMPRESSIONS, "zstd"], strict=True)
    return [
        pack(directory, tmp_path / f"{directory.name}.tar", engine=engine, compression=compression)
        for directory, (engine, compression) in zip(chain, kinds, strict=True)
    ]


def run(*words: object) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words])


def with_parents(paths: list[Path]) -> list[object]:
    return [word for path in paths for word in ("--parent", path)]


def test_inspect_says_which_parent_is_needed(chain: list[Path], archives: list[Path]) -> None:
    below = read_manifest(chain[2])
    found = json.loads(run("inspect", "--json", archives[3]).stdout)
    assert found["parent"] == {
        "checkpoint_id": below.checkpoint_id.hex(),
        "chain_length": 3,
        "directory": None,
        "state": "outside",
    }
    image = next(p["cuda"]["image"] for p in found["processes"] if p["cuda"])
    assert {s["state"] for s in image["sources"] if s["depth"]} == {"outside"}
    assert {s["state"] for s in image["sources"] if not s["depth"]} <= {"right"}
    shown = run("inspect", archives[3]).output
    assert f"{below.checkpoint_id.hex()}: not in the archive" in shown
    found = json.loads(run("inspect", "--json", archives[3], *with_parents(archives[:3])).stdout)
    assert found["parent"]["directory"] == str(archives[2])
    assert found["parent"]["state"] == "right"
    image = next(p["cuda"]["image"] for p in found["processes"] if p["cuda"])
    places = {s["depth"]: s["directory"] for s in image["sources"] if s["depth"]}
    assert places == {1: str(archives[2]), 2: str(archives[1]), 3: str(archives[0])}


def test_verify_checks_its_own_and_says_what_is_elsewhere(archives: list[Path]) -> None:
    result = run("verify", archives[3])
    assert result.exit_code == 0
    assert "not checked: not in the archive but in checkpoint" in result.output


def test_verify_with_parents_of_every_kind(chain: list[Path], archives: list[Path]) -> None:
    (store := chain[0].parent).joinpath("no checkpoint").mkdir()
    for parents in (archives[:3], [chain[2]], [archives[2], chain[1]], [store]):
        result = run("verify", archives[3], *with_parents(parents))
        assert result.exit_code == 0, result.output
        assert "of it in 3 earlier checkpoints" in result.output


def test_a_parent_that_is_missing_or_another_is_named(
    tmp_path: Path, chain: list[Path], archives: list[Path]
) -> None:
    first = read_manifest(chain[0]).checkpoint_id.hex()
    for command in (["verify"], ["flatten", "-o", tmp_path / "out"]):
        result = run(*command, archives[3], *with_parents(archives[1:3]))
        assert isinstance(result.exception, ImageError)
        said = result.output + str(result.exception)
        assert re.search(
            rf"needs gpustasis-7(\.\d)?\.img of checkpoint {first}, 3 before this one", said
        )
    assert not (tmp_path / "out").exists()
    result = run("verify", chain[3], "--parent", archives[2])
    assert isinstance(result.exception, CheckpointError)
    assert "is a directory: its link says" in str(result.exception)


def test_a_parent_that_is_a_directory_without_checkpoints_is_refused(
    tmp_path: Path, archives: list[Path]
) -> None:
    (tmp_path / "empty").mkdir()
    result = run("verify", archives[3], "--parent", tmp_path / "empty")
    assert isinstance(result.exception, CheckpointError)
    assert "empty is no checkpoint of gpustasis's, and no store of any" in str(result.exception)


def test_flatten_is_the_same_memory_and_needs_nobody(
    tmp_path: Path, chain: list[Path], archives: list[Path]
) -> None:
    expected = contents(chain[3])
    for number, parents in enumerate((archives[:3], [chain[2]])):
        out = tmp_path / f"out-{number}"
        result = run("flatten", archives[3], "-o", out, *with_parents(parents))
        assert result.exit_code == 0, repr(result.exception)
        assert contents(out) == expected
        assert verify_directory(out).problems == []
        image = ImageReader.open(out / image_name(7))
        assert (image.info.sources, image.info.parent_id) == ([], bytes(16))
        assert read_manifest(out).chain_length == 0
        assert not (out / "gpustasis-parent").is_symlink()


def test_flatten_writes_what_a_full_dump_writes(tmp_path: Path) -> None:
    """Byte for byte: a copy has no trace of where its chunks came from."""
    words = [["A", "b", "0", "C"], ["A", "D", "0", "b"]]
    make_link(tmp_path / "one", {7: memory_of(words[0]), 9: memory_of(["E"])})
    make_link(
        tmp_path / "two",
        {7: memory_of(words[1]), 9: memory_of(["C", "E", "E"])},
        parent=tmp_path / "one",
    )
    parent = pack(tmp_path / "one", tmp_path / "one.tar.gz", compression="gzip")
    archive = pack(tmp_path / "two", tmp_path / "two.tar")
    result = run("flatten", archive, "-o", tmp_path / "flat", "--parent", parent)
    assert result.exit_code == 0, repr(result.exception)
    (tmp_path / "full").mkdir()
    full = tmp_path / "full" / "two"
    make_link(full, {7: memory_of(words[1]), 9: memory_of(["C", "E", "E"])})
    for pid in (7, 9):
        assert (tmp_path / "flat" / image_name(pid)).read_bytes() == (
            full / image_name(pid)
        ).read_bytes()


def test_damage_in_a_parent_is_found(tmp_path: Path, chain: list[Path]) -> None:
    """Its digest is the right one; the chunk is not."""
    archive = pack(chain[1], tmp_path / "one.tar")
    chunk = ImageReader.open(chain[0] / image_name(7)).chunk(2)
    path = chain[0] / image_name(7)
    raw = bytearray(path.read_bytes())
    raw[chunk.offset] ^= 1
    path.write_bytes(raw)
    for parent in (chain[0], pack(chain[0], tmp_path / "zero.tar")):
        result = run("verify", archive, "--parent", parent)
        assert "chunk 2 at 0x7f0000002000: content does not match" in result.output
        assert str(parent) in result.output
        result = run("flatten", archive, "-o", tmp_path / "out", "--parent", parent)
        assert "chunk 2" in str(result.exception)
        assert not (tmp_path / "out").exists()


def test_a_fifo_in_a_parents_directory_is_not_waited_for(
    tmp_path: Path, chain: list[Path], archives: list[Path]
) -> None:
    """Not where it is looked for, and not where it is read: it may be put there between."""
    path = chain[0] / image_name(7)
    path.unlink()
    os.mkfifo(path)
    result = run_with_deadline(
        lambda: run("flatten", archives[1], "-o", tmp_path / "flat", "--parent", chain[0])
    )
    assert isinstance(result.exception, CheckpointError | ImageError)
    assert image_name(7) in str(result.exception)
    with pytest.raises(ImageError, match="is no ordinary file"):
        run_with_deadline(lambda: list(DirectoryParent(chain[0]).image_streams([image_name(7)])))
