# SPDX-License-Identifier: Apache-2.0
"""Archives of each engine, packed in each way, are what the directory is that they were made of."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpustasis._core import image_name
from gpustasis.archive.opened import inspect_archive, open_files
from gpustasis.archive.verification import verify_archive
from gpustasis.cli import cli
from gpustasis.errors import ArchiveError, CheckpointError
from gpustasis.image.difference import compare, compare_files
from gpustasis.image.inspection import inspect_directory
from support.archives import COMPRESSIONS, CONTAINER, CREATED, ENGINES, Raw, pack, side_files, tar
from support.chains import make_link, memory_of
from support.image_samples import make_checkpoint, mixture
from support.inventory import NAMES_IMAGES, images_name, write_inventory


@pytest.fixture
def images(tmp_path: Path) -> Path:
    directory = tmp_path / "images"
    directory.mkdir()
    make_checkpoint(directory, {7: mixture(), 9: []}, staged_in_criu=(8,), alignment=4096)
    write_inventory(directory)
    (directory / "pages-1.img").write_bytes(b"p" * 5000)
    (directory / "gpustasis-dump.json").write_text(
        '{"version":1,"result":"ok","error":"","backend":"emulator","tasks":[],"phases_ms":{}}'
    )
    return directory


def test_memory_that_the_manifest_does_not_list_is_found(tmp_path: Path, images: Path) -> None:
    write_inventory(images, "gpustasis", NAMES_IMAGES, images_name(images))
    with open_files(pack(images, tmp_path / "whole.tar")) as whole:
        assert verify_archive(whole).problems == []
    (images / image_name(9)).unlink()
    make_checkpoint(images, {7: mixture()}, staged_in_criu=(8,), alignment=4096)
    with open_files(pack(images, tmp_path / "cut.tar")) as cut:
        (problem,) = verify_archive(cut).problems
    assert "checkpoint/gpustasis-manifest.img: does not list the memory that" in problem


def inspected(path: Path, *words: str) -> dict[str, object]:
    result = CliRunner().invoke(cli, ["inspect", "--json", str(path), *words])
    assert result.exit_code == 0, result.output + repr(result.exception)
    found: dict[str, object] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_inspect_says_what_it_says_of_the_directory(
    tmp_path: Path, images: Path, engine: str, compression: str
) -> None:
    archive = pack(images, tmp_path / "a.bin", engine=engine, compression=compression)
    found = inspected(archive)
    facts = found.pop("archive")
    assert facts == {
        "engine": engine,
        "compression": compression,
        "container_name": "trainer",
        "container_id": CONTAINER,
        "pod": "" if engine == "podman" else "trainer-0",
        "namespace": "" if engine == "podman" else "jobs",
        "image": "localhost/train:latest",
        "image_requested": "localhost/train:1",
        "image_id": "a8758716bb6a",
        "runtime": "runc",
        "created": CREATED,
        "checkpointed": "2026-11-21T00:10:45.673538606+05:30",
        "members": sum(1 for _ in images.iterdir())
        + len(side_files(engine))
        + (1 if engine == "containerd" else 2),
        "file_bytes": archive.stat().st_size,
        "unpacked_bytes": facts["unpacked_bytes"],  # type: ignore[index]
        "checkpoint_bytes": sum(path.stat().st_size for path in images.iterdir()),
        "rootfs_diff_bytes": 10240,
        "volumes_bytes": 2048 if engine == "podman" else 0,
    }
    whole = inspected(images)
    assert whole.pop("archive") is None
    assert (whole.pop("directory"), found.pop("directory")) == (str(images), str(archive))
    assert found == whole


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_verify_and_flatten(tmp_path: Path, images: Path, engine: str, compression: str) -> None:
    archive = pack(images, tmp_path / "a", engine=engine, compression=compression)
    result = CliRunner().invoke(cli, ["verify", str(archive)])
    assert result.exit_code == 0, result.output
    assert "manifest and 2 images whole" in result.output
    result = CliRunner().invoke(cli, ["flatten", str(archive), "-o", str(tmp_path / "out")])
    assert result.exit_code == 0, repr(result.exception)
    out = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert out == {path.name: path.read_bytes() for path in images.iterdir()}
    for path in images.iterdir():
        copy = (tmp_path / "out" / path.name).stat()
        assert copy.st_mode == path.stat().st_mode
        if path.name not in (image_name(7), image_name(9)):  # these are new
            assert abs(copy.st_mtime_ns - path.stat().st_mtime_ns) < 1000  # tarfile's floats


def test_an_index_longer_than_what_is_read_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Header and trailer tell how long it is; a second pass reads it."""
    directory = tmp_path / "images"
    words = [f"A{number}" for number in range(40)]
    make_link(directory, {7: memory_of(words), 8: memory_of(["0"])})
    monkeypatch.setattr("gpustasis.archive.chunks._FIRST_TAIL", 400)
    for compression in COMPRESSIONS:
        archive = pack(directory, tmp_path / compression, compression=compression)
        with open_files(archive) as files:
            assert (
                inspect_archive(files).to_json()["processes"]
                == (inspect_directory(directory).to_json()["processes"])
            )
            found = verify_archive(files)
            assert (found.problems, found.images) == ([], 2)


def test_diff_of_archives_and_directories(tmp_path: Path) -> None:
    make_link(tmp_path / "a", {7: memory_of(["A", "B", "c"])}, taken=1_700_000_000)
    make_link(tmp_path / "b", {7: memory_of(["A", "D", "c"])}, taken=1_700_000_060)
    packed_a = pack(tmp_path / "a", tmp_path / "a.tar.zst", compression="zstd")
    packed_b = pack(tmp_path / "b", tmp_path / "b.tar")
    expected = compare(tmp_path / "a", tmp_path / "b")
    assert expected.seconds == 60
    for a, b in ((packed_a, packed_b), (tmp_path / "a", packed_b), (packed_a, tmp_path / "b")):
        with open_files(a) as before, open_files(b) as after:
            assert compare_files(before, after) == expected
    result = CliRunner().invoke(cli, ["diff", "--json", str(packed_a), str(packed_b)])
    assert json.loads(result.stdout)["fresh_mib_per_s"] > 0


def test_damage_in_an_archive_is_named(tmp_path: Path, images: Path) -> None:
    """In its first chunk, its last byte of padding, its index, and by an image that is missing."""
    path = images / image_name(7)
    whole = path.read_bytes()
    for offset, what in (
        (4096, "chunk 0 at 0x7f0000000000: stored bytes do not match their checksum"),
        (4096 + 3000, "is not zero"),
        (len(whole) - 140, "index does not match its checksum"),
        (10, "gpustasis-7.img: "),
    ):
        damaged = bytearray(whole)
        damaged[offset] ^= 1
        path.write_bytes(damaged)
        archive = pack(images, tmp_path / "a.tar.gz", compression="gzip")
        with open_files(archive) as files:
            (problem,) = verify_archive(files).problems
        assert problem.startswith(f"{archive}: checkpoint/gpustasis-7.img: ")
        assert what in problem
        assert "/proc/" not in problem
    path.unlink()
    (images / image_name(77)).write_bytes(b"no image")
    with open_files(pack(images, tmp_path / "a.tar")) as files:
        missing, unnamed = verify_archive(files).problems
    assert "checkpoint/gpustasis-7.img: is not in the archive" in missing
    assert "checkpoint/gpustasis-77.img: not named by the manifest" in unnamed


def test_a_damaged_archive_leaves_nothing_of_a_flatten(tmp_path: Path, images: Path) -> None:
    path = images / image_name(7)
    raw = bytearray(path.read_bytes())
    raw[4096] ^= 1
    path.write_bytes(raw)
    archive = pack(images, tmp_path / "a.tar")
    place = tmp_path / "place"
    place.mkdir()
    result = CliRunner().invoke(cli, ["flatten", str(archive), "-o", str(place / "out")])
    assert "chunk 0 at" in str(result.exception)
    assert list(place.iterdir()) == []


def test_an_archive_without_gpu_state_is_shown(tmp_path: Path) -> None:
    directory = tmp_path / "images"
    directory.mkdir()
    archive = pack(directory, tmp_path / "a.tar", engine="cri-o")
    result = CliRunner().invoke(cli, ["inspect", str(archive)])
    assert isinstance(result.exception, CheckpointError)
    assert "neither pstree.img nor a manifest" in str(result.exception)
    result = CliRunner().invoke(cli, ["verify", str(archive)])
    assert "gpustasis-manifest.img: missing" in result.output


@pytest.mark.parametrize(
    ("members", "what"),
    [
        ([Raw(b"pod.options", b"{}")], "checkpoint of a whole pod"),
        ([Raw(b"pre-checkpoint/pages-1.img", b"x")], "pre-checkpoint"),
        ([Raw(b"oci-layout", b"{}")], "OCI image layout"),
        ([Raw(b"hello", b"x")], "no container's checkpoint"),
    ],
)
def test_other_archives_are_told_apart(tmp_path: Path, members: list[Raw], what: str) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(tar(members))
    with pytest.raises(ArchiveError, match=what), open_files(path):
        pass


@pytest.mark.parametrize(
    ("head", "what"),
    [
        (b"", "is cut short: it is empty"),
        (b"text\n" * 500, "no checkpoint archive"),
        (b"\xfd7zXZ\0" + bytes(600), "packed with xz"),
        (b"BZh9" + bytes(600), "packed with bzip2"),
        (b"PK\x03\x04" + bytes(600), "packed with zip"),
        (b"\x1f\x8b" + bytes(600), "does not unpack"),
        (b"\x28\xb5\x2f\xfd" + b"\xff" * 600, "does not unpack"),
    ],
)
def test_what_is_no_archive(tmp_path: Path, head: bytes, what: str) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(head)
    with pytest.raises(ArchiveError, match=what), open_files(path):
        pass


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ArchiveError, match="neither a directory"), open_files(tmp_path / "pipe"):
        pass
