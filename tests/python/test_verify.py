# SPDX-License-Identifier: Apache-2.0
"""`gpustasis verify`: finds what is wrong with our files, and says where."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpustasis._core import ImageReader, Manifest, image_name, write_image, write_manifest
from gpustasis.cli import cli
from gpustasis.errors import ImageError
from gpustasis.image.directory import try_exclude
from gpustasis.image.verification import verify_directory
from support.image_samples import info_of, make_checkpoint, mixture
from support.inventory import NAMES_IMAGES, images_name, write_inventory

SEED = 20260801


def problems(directory: Path) -> list[str]:
    return verify_directory(directory, threads=1).problems


def test_a_whole_checkpoint_passes(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, {7: mixture(), 9: []}, staged_in_criu=(8,))
    told: list[tuple[str, int, int]] = []
    found = verify_directory(tmp_path, 2, lambda *args: told.append(args))
    assert found.problems == []
    assert (found.images, found.plain_bytes) == (2, 7 * 4096)
    assert told[-1] == ("gpustasis-7.img", 7 * 4096, 7 * 4096)


def test_memory_that_the_manifest_does_not_list_is_found(tmp_path: Path) -> None:
    manifest = make_checkpoint(tmp_path, {7: mixture(), 9: mixture()}, staged_in_criu=(8,))
    names = ("gpustasis", NAMES_IMAGES, images_name(tmp_path))
    write_inventory(tmp_path, *names)
    assert problems(tmp_path) == []
    for pid in (7, 8, 9):
        tasks = [task for task in manifest.tasks if task.pid != pid]
        (tmp_path / image_name(pid)).unlink(missing_ok=True)
        write_manifest(
            tmp_path,
            Manifest(checkpoint_id=manifest.checkpoint_id, gpus=manifest.gpus, tasks=tasks),
        )
        (problem,) = problems(tmp_path)
        assert "does not list the memory that the dump has left out of CRIU's images" in problem
        make_checkpoint(tmp_path, {7: mixture(), 9: mixture()}, staged_in_criu=(8,))
    write_inventory(tmp_path, "gpustasis")  # of the first versions: nothing says so
    assert problems(tmp_path) == []


def test_1000_of_1000_random_bit_flips_are_found(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, {7: mixture(), 9: mixture()}, alignment=4096)
    files = {path: path.read_bytes() for path in sorted(tmp_path.iterdir())}
    offsets = [(path, bit) for path, raw in files.items() for bit in range(8 * len(raw))]
    assert problems(tmp_path) == []
    found = 0
    for path, bit in random.Random(SEED).sample(offsets, 1000):
        damaged = bytearray(files[path])
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        (first, *_) = problems(tmp_path)
        assert path.name in first
        found += 1
        path.write_bytes(files[path])
    assert found == 1000


def test_a_damaged_chunk_is_named_and_the_rest_still_checked(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, {7: mixture(), 9: mixture()})
    for pid in (7, 9):
        path = tmp_path / image_name(pid)
        chunk = ImageReader.open(path).chunk(1)
        raw = bytearray(path.read_bytes())
        raw[chunk.offset + 5] ^= 0x10
        path.write_bytes(raw)
    first, second = problems(tmp_path)
    assert "gpustasis-7.img: chunk 1 at 0x7f0000001000: content does not match" in first
    assert "gpustasis-9.img" in second


def test_missing_unnamed_and_replaced_images_are_found(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, {7: mixture(), 8: mixture(), 9: mixture(), 10: mixture()})
    (tmp_path / image_name(7)).unlink()
    write_image(tmp_path / image_name(11), info_of(mixture(), 11), mixture())
    other = [(0x10000, b"other" * 4096)]
    write_image(tmp_path / image_name(8), info_of(other, 8), other)
    (tmp_path / image_name(9)).write_bytes((tmp_path / image_name(10)).read_bytes())
    missing, replaced, swapped, unnamed = problems(tmp_path)
    assert "gpustasis-7.img" in missing
    assert "No such file" in missing
    assert "gpustasis-8.img" in replaced
    assert "the digests differ" in replaced
    assert "gpustasis-9.img: is the image of pid 10" in swapped
    assert "gpustasis-11.img: not named by the manifest" in unnamed


def test_an_image_of_another_checkpoint_is_found(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, {7: mixture()})
    info = info_of(mixture(), 7)
    foreign = type(info)(pid=7, checkpoint_id=b"f" * 16, regions=info.regions)
    write_image(tmp_path / image_name(7), foreign, mixture())
    (problem,) = problems(tmp_path)
    assert "belongs to another checkpoint" in problem


@pytest.mark.parametrize("content", [None, b"", b"\0" * 1000])
def test_a_manifest_that_is_missing_or_is_none_is_a_problem(
    tmp_path: Path, content: bytes | None
) -> None:
    make_checkpoint(tmp_path, {7: mixture()})
    manifest = tmp_path / "gpustasis-manifest.img"
    manifest.unlink()
    if content is not None:
        manifest.write_bytes(content)
    (problem,) = problems(tmp_path)
    assert "gpustasis-manifest.img" in problem


def test_a_newer_image_is_a_problem_of_its_own(tmp_path: Path) -> None:
    import xxhash

    make_checkpoint(tmp_path, {7: []})
    path = tmp_path / image_name(7)
    raw = bytearray(path.read_bytes())
    raw[16] = 2
    raw[240:256] = xxhash.xxh3_128_digest(raw[:240])
    path.write_bytes(raw)
    (problem,) = problems(tmp_path)
    assert "is encrypted, which this version cannot read" in problem


class TestCommand:
    def test_whole(self, tmp_path: Path) -> None:
        make_checkpoint(tmp_path, {7: mixture()})
        result = CliRunner().invoke(cli, ["verify", str(tmp_path)])
        assert result.exit_code == 0
        assert "manifest and 1 image whole" in result.output

    def test_damaged(self, tmp_path: Path) -> None:
        make_checkpoint(tmp_path, {7: mixture()})
        (tmp_path / image_name(7)).write_bytes(b"")
        result = CliRunner().invoke(cli, ["verify", str(tmp_path)])
        assert "gpustasis-7.img: too short" in result.output
        assert isinstance(result.exception, ImageError)
        assert result.exception.exit_code == 10
        assert "1 problem found" in str(result.exception)


def test_a_store_in_which_nothing_can_be_checked(tmp_path: Path) -> None:
    """Somebody is writing its only checkpoint."""
    (tmp_path / "one").mkdir()
    make_checkpoint(tmp_path / "one", {7: mixture()})
    lock = try_exclude(tmp_path / "one")
    assert lock is not None
    with lock:
        result = CliRunner().invoke(cli, ["verify", str(tmp_path)])
    assert isinstance(result.exception, ImageError), result.output
    assert "nothing was checked" in str(result.exception)
    assert "whole" not in result.output
