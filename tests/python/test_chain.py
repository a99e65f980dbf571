# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on top of each other: inspect and verify say what is there and what is not."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gpustasis._core import PARENT_LINK, ImageReader, image_name
from gpustasis.cli import cli
from gpustasis.errors import ImageError
from gpustasis.image import checkpoint as image_checkpoint
from gpustasis.image import directory as image_directory
from gpustasis.image.checkpoint import (
    State,
    chain_directories,
    find_checkpoint,
    find_sources,
    parent_directory,
)
from gpustasis.image.directory import share, try_exclude
from gpustasis.image.verification import verify_directory
from support.chains import checkpoint_id, is_whole, make_chain, make_link, memory_of
from support.deadlines import run_with_deadline
from support.image_samples import PAGE


@pytest.fixture
def chain(tmp_path: Path) -> list[Path]:
    """c000 <- c001 <- c002 <- c003, each with a page of its own."""
    return make_chain(tmp_path, 3)


def states(directory: Path) -> dict[int, State]:
    """By depth."""
    image = ImageReader.open(directory / image_name(7))
    return {
        found.source.depth: found.state for found in find_sources(directory, image.info.sources)
    }


def inspect(directory: Path) -> Any:
    result = CliRunner().invoke(cli, ["inspect", "--json", str(directory)])
    assert result.exception is None, result.exception
    return json.loads(result.output)


def inspect_text(directory: Path) -> str:
    result = CliRunner().invoke(cli, ["inspect", str(directory)])
    assert result.exception is None, result.exception
    return result.output


def test_a_link_with_the_id_of_a_checkpoint_is_not_followed(
    chain: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore does not follow it either (src/core/lineage.cpp, O_NOFOLLOW)."""
    root, wanted = tmp_path / "lib", checkpoint_id("c000")
    monkeypatch.setattr(image_checkpoint, "STORE_ROOT", root)
    for place in (root / "checkpoints", root / "containers" / "some"):
        place.mkdir(parents=True)
        (place / wanted.hex()).symlink_to(chain[0])
    assert find_checkpoint(wanted) is None
    shutil.copytree(chain[0], root / "containers" / "other" / wanted.hex())
    assert find_checkpoint(wanted) == root / "containers" / "other" / wanted.hex()


class TestLinks:
    def test_lead_to_the_full_checkpoint(self, chain: list[Path]) -> None:
        assert chain_directories(chain[3], 9) == chain[::-1]
        assert chain_directories(chain[3], 1) == [chain[3], chain[2]]
        assert parent_directory(chain[0]) is None

    def test_are_relative_so_that_a_store_can_be_moved(
        self, chain: list[Path], tmp_path: Path
    ) -> None:
        other = tmp_path / "elsewhere"
        other.mkdir()
        for directory in chain:
            directory.rename(other / directory.name)
        assert is_whole(other / chain[3].name)

    def test_in_a_circle_end(self, chain: list[Path]) -> None:
        (chain[0] / PARENT_LINK).symlink_to("../c003")
        assert len(chain_directories(chain[3], 50)) == 51
        (chain[1] / PARENT_LINK).unlink()
        (chain[1] / PARENT_LINK).symlink_to(PARENT_LINK)
        assert chain_directories(chain[3], 50) == [chain[3], chain[2], chain[1]]

    def test_may_be_anything(self, chain: list[Path]) -> None:
        (chain[2] / PARENT_LINK).unlink()
        (chain[2] / PARENT_LINK).write_text("no link")
        with pytest.raises(ImageError, match="is no link"):
            parent_directory(chain[2])
        assert states(chain[3])[2] is State.MISSING
        assert inspect(chain[2])["parent"]["state"] == "replaced"


class TestSources:
    def test_are_right(self, chain: list[Path]) -> None:
        assert states(chain[3]) == {1: State.RIGHT, 2: State.RIGHT, 3: State.RIGHT}

    def test_are_missing_from_where_a_directory_is_gone(self, chain: list[Path]) -> None:
        chain[1].rename(chain[1].with_name("away"))
        assert states(chain[3]) == {1: State.RIGHT, 2: State.MISSING, 3: State.MISSING}

    def test_are_missing_without_their_file(self, chain: list[Path]) -> None:
        (chain[1] / image_name(7)).unlink()
        assert states(chain[3]) == {1: State.RIGHT, 2: State.MISSING, 3: State.RIGHT}

    @pytest.mark.parametrize("how", ["longer", "digest", "short", "directory"])
    def test_are_replaced(self, chain: list[Path], how: str) -> None:
        path = chain[0] / image_name(7)
        raw = path.read_bytes()
        path.unlink()
        if how == "directory":
            path.mkdir()
        else:
            changed = {
                "longer": raw + b"x",
                "digest": raw[:-1] + bytes([raw[-1] ^ 1]),
                "short": b"",
            }
            path.write_bytes(changed[how])
        assert states(chain[3])[3] is State.REPLACED


class TestInspect:
    def test_json(self, chain: list[Path]) -> None:
        found = inspect(chain[3])
        assert found["parent"] == {
            "checkpoint_id": checkpoint_id("c002").hex(),
            "chain_length": 3,
            "directory": str(chain[2]),
            "state": "right",
        }
        (process,) = found["processes"]
        image = process["cuda"]["image"]
        assert image["encodings"]["ref"]["chunks"] == 7
        first, second, third = image["sources"]
        assert (first["depth"], second["depth"], third["depth"]) == (1, 2, 3)
        assert third["directory"] == str(chain[0])
        assert third["checkpoint_id"] == checkpoint_id("c000").hex()
        assert third["digest"] == ImageReader.open(chain[0] / image_name(7)).digest.hex()
        assert {source["state"] for source in image["sources"]} == {"right"}
        assert inspect(chain[0])["parent"] is None

    def test_text(self, chain: list[Path]) -> None:
        text = inspect_text(chain[3])
        assert "on top of 3" in text
        assert str(chain[2]) in text
        assert "gpustasis-7.img, depth 3" in text
        assert "MISSING" not in text

    def test_works_without_the_parents(self, chain: list[Path]) -> None:
        for directory in chain[:3]:
            shutil.rmtree(directory)
        found = inspect(chain[3])
        assert found["parent"]["state"] == "missing"
        assert found["parent"]["directory"] == str(chain[2])
        sources = found["processes"][0]["cuda"]["image"]["sources"]
        assert {(source["state"], source["directory"]) for source in sources} == {("missing", None)}
        text = inspect_text(chain[3])
        assert "(MISSING)" in text
        (chain[3] / PARENT_LINK).unlink()
        assert inspect(chain[3])["parent"]["directory"] is None
        assert "no link to it" in inspect_text(chain[3])

    def test_shows_some_of_many_sources_those_that_are_wrong_first(self, tmp_path: Path) -> None:
        chain = make_chain(tmp_path, 11, pages=12)
        (chain[0] / image_name(7)).unlink()
        text = inspect_text(chain[-1])
        assert text.count("gpustasis-7.img, depth") == 8
        assert "depth 11 (MISSING)" in text
        assert "and from 3 more" in text
        assert len(inspect(chain[-1])["processes"][0]["cuda"]["image"]["sources"]) == 11

    def test_says_that_a_parent_is_another_one(self, chain: list[Path]) -> None:
        shutil.rmtree(chain[2])
        chain[0].rename(chain[2])
        assert inspect(chain[3])["parent"]["state"] == "replaced"
        assert "(REPLACED)" in inspect_text(chain[3])


class TestVerify:
    def test_goes_through_the_chain_and_says_so(self, chain: list[Path]) -> None:
        found = verify_directory(chain[3], threads=1)
        assert found.problems == []
        assert (found.earlier_checkpoints, found.earlier_bytes) == (3, 7 * PAGE)
        result = CliRunner().invoke(cli, ["verify", str(chain[3])])
        assert "0.0 MiB of it in 3 earlier checkpoints" in result.output
        result = CliRunner().invoke(cli, ["verify", str(chain[0])])
        assert "earlier" not in result.output

    def test_finds_damage_wherever_it_is(self, chain: list[Path]) -> None:
        """A chunk of the full checkpoint that the last one uses."""
        image = ImageReader.open(chain[3] / image_name(7))
        depths = [source.depth for source in image.info.sources]
        number = next(
            index
            for index in range(len(image))
            if image.chunk(index).source and depths[image.chunk(index).source - 1] == 3
        )
        path = chain[0] / image_name(7)
        raw = bytearray(path.read_bytes())
        raw[image.chunk(number).offset + 1] ^= 2
        path.write_bytes(raw)
        (problem,) = verify_directory(chain[3], threads=1).problems
        assert f"chunk {number} at" in problem
        assert verify_directory(chain[0], threads=1).problems

    def test_names_what_is_missing_and_what_was_replaced(self, chain: list[Path]) -> None:
        away = chain[0].with_name("away")
        chain[0].rename(away)
        (problem,) = verify_directory(chain[3], threads=1).problems
        assert checkpoint_id("c000").hex() in problem
        assert "missing" in problem
        make_link(chain[0], {7: memory_of(["A", "b"])})
        (problem,) = verify_directory(chain[3], threads=1).problems
        assert checkpoint_id("c000").hex() in problem
        assert str(chain[0]) in problem

    def test_needs_no_parent_that_holds_nothing_for_it(self, tmp_path: Path) -> None:
        make_link(tmp_path / "a", {7: memory_of(["A"])})
        make_link(tmp_path / "b", {7: memory_of(["B", "0"])}, parent=tmp_path / "a")
        shutil.rmtree(tmp_path / "a")
        assert is_whole(tmp_path / "b")


def test_a_source_must_be_attached_before_a_chunk_is_read(chain: list[Path]) -> None:
    image = ImageReader.open(chain[3] / image_name(7))
    number = next(index for index in range(len(image)) if image.chunk(index).source)
    with pytest.raises(ValueError, match="source"):
        image.read_chunk(number)
    with pytest.raises(ValueError, match="source"):
        image.verify()
    image.attach_sources()
    image.verify()


def test_a_reader_holds_its_chain(chain: list[Path]) -> None:
    image = ImageReader.open(chain[3] / image_name(7))
    image.attach_sources()
    assert [try_exclude(directory) for directory in chain] == [None] * 4
    del image
    for directory in chain:
        lock = try_exclude(directory)
        assert lock is not None
        lock.close()


def test_who_is_removed_is_not_read(chain: list[Path]) -> None:
    image = ImageReader.open(chain[3] / image_name(7))
    lock = try_exclude(chain[1])
    assert lock is not None
    with lock, pytest.raises(OSError, match="locked"):
        image.attach_sources()


def test_a_lock_on_what_was_renamed_is_none(chain: list[Path]) -> None:
    with share(chain[0]):
        assert try_exclude(chain[0]) is None
    chain[0].rename(chain[0].with_name("away"))
    with pytest.raises(ImageError, match="cannot open"):
        share(chain[0])


def test_an_image_can_refer_to_every_image_of_the_parent(tmp_path: Path) -> None:
    make_link(tmp_path / "a", {7: memory_of(["A"]), 9: memory_of(["B"])})
    make_link(tmp_path / "b", {8: memory_of(["B", "A", "C"])}, parent=tmp_path / "a")
    image = ImageReader.open(tmp_path / "b" / image_name(8))
    assert [(source.depth, source.pid) for source in image.info.sources] == [(1, 7), (1, 9)]
    assert image.totals.ref.chunks == 2


def test_a_lock_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may open a directory can hold one."""
    held = try_exclude(tmp_path)
    assert held is not None
    monkeypatch.setattr(image_directory, "PATIENCE_S", 0.2)
    with held, pytest.raises(ImageError, match=r"has been locked for 0\.2 s"):
        run_with_deadline(lambda: share(tmp_path))
    monkeypatch.setattr(image_directory, "PATIENCE_S", 20)
    held = try_exclude(tmp_path)
    assert held is not None
    timer = threading.Timer(0.2, held.close)
    timer.start()
    run_with_deadline(lambda: share(tmp_path)).close()
    timer.join()
