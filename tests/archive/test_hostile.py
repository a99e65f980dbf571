# SPDX-License-Identifier: Apache-2.0
"""Archives that were made to deceive are refused, with the reason and the member; nothing is
written, and no memory is taken that the limits do not allow."""

from __future__ import annotations

import gzip
import resource
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard

from gpustasis.archive.flatten import flatten_archive
from gpustasis.archive.opened import open_files
from gpustasis.archive.stream import DEFAULT_LIMITS, Limits
from gpustasis.errors import ArchiveError, CheckpointError, ImageError
from support.archives import Raw, compressed, pack, pax, tar
from support.image_samples import make_checkpoint, mixture, noise

ROOT = Raw(b"checkpoint/", type=b"5")
MIB = 1 << 20


def refused(tmp_path: Path, raw: bytes, limits: Limits = DEFAULT_LIMITS) -> str:
    path = tmp_path / "hostile.tar"
    path.write_bytes(raw)
    with pytest.raises(ArchiveError) as caught, open_files(path, limits=limits):
        pass
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert text.isprintable()
    assert sorted(tmp_path.iterdir()) == [path]
    return text


def long(name: bytes, kind: bytes = b"L") -> Raw:
    return Raw(b"././@LongLink", name + b"\0", type=kind, magic=b"ustar  \0")


@pytest.mark.parametrize(
    ("members", "what"),
    [
        ([Raw(b"/etc/passwd", b"x")], "'/etc/passwd' has a name that leads out"),
        ([Raw(b"checkpoint/../../x", b"x")], "leads out of the archive"),
        ([Raw(b"../x", type=b"5")], "leads out of the archive"),
        ([pax(path="/etc/shadow"), Raw(b"x")], "'/etc/shadow' has a name that leads out"),
        ([pax(path="a/../../b"), Raw(b"x")], "leads out"),
        ([pax(path="a\0b"), Raw(b"x")], "path is b'a"),
        ([long(b"../" * 50 + b"x"), Raw(b"x")], "leads out"),
        ([Raw(b"\x1b[2Jx/..", b"x")], r"'\x1b[2Jx/..'"),
        ([Raw(b"./", b"x")], "has the name of a directory"),
        ([Raw(b"x/", b"x")], "has the name of a directory and is none"),
        ([Raw(b"", b"x")], "has no name"),
        ([long(b"a" * 5000), Raw(b"x")], "a name of 5000 bytes"),
        ([pax(path="a" * 5000), Raw(b"x")], "a name of 5000 bytes"),
        ([long(b"a/" * 40 + b"x"), Raw(b"x")], "lies 40 directories deep"),
        ([Raw(b"x", b"1"), Raw(b"x", b"2")], "'x' comes twice"),
        ([Raw(b"x", b"1"), Raw(b"./x", b"2")], "'x' comes twice"),
        ([Raw(b"x", b"1"), Raw(b"x/", type=b"5")], "'x' comes twice"),
        ([Raw(b"x/y", b"1"), Raw(b"x", type=b"2", target=b"/etc")], "'x' comes twice"),
        ([ROOT, Raw(b"checkpoint", type=b"2", target=b"/etc")], "'checkpoint' comes twice"),
        (
            [Raw(b"checkpoint", type=b"2", target=b"/etc"), Raw(b"checkpoint/x", b"1")],
            "'checkpoint/x' lies in 'checkpoint', which is no directory",
        ),
        ([Raw(b"x", b"1" * 10, type=b"S")], "of type b'S'"),
        ([Raw(b"x", type=b"M")], "more than one volume"),
        ([Raw(b"x", type=b"?")], "of type b'?'"),
        ([pax(GNU__sparse__major="1"), Raw(b"x")], "sparse members are not read"),
        ([replace(pax(size="9"), type=b"g"), Raw(b"x")], "for all members that follow"),
        ([long(b"y"), long(b"z"), Raw(b"x")], "of type 'L' behind one of type 'L'"),
        ([long(b"y"), pax(path="z"), Raw(b"x")], "of type 'x' behind one of type 'L'"),
        ([pax(path="y"), pax(path="z"), Raw(b"x")], "of type 'x' behind one of type 'x'"),
        ([Raw(b"x/.", b"y")], "has the name of a directory and is none"),
        ([Raw(b"x", type=b"2")], "is a link without a target"),
        ([pax(size="-1"), Raw(b"x")], "size is b'-1'"),
        ([pax(size="9" * 30), Raw(b"x")], "size is b'999"),
        ([pax(mtime="nan"), Raw(b"x")], "mtime is b'nan'"),
        ([Raw(b"x", b"no record", type=b"x"), Raw(b"x")], "has no length"),
        ([Raw(b"x", b"99 path=x\n", type=b"x"), Raw(b"x")], "not as long as it says"),
        ([Raw(b"x", b"9 abcdef\n", type=b"x"), Raw(b"x")], "has no keyword"),
        ([Raw(b"x", size=2 * MIB, type=b"x")], "an extended header of 2097152 bytes"),
        ([long(b"x")], "ends behind an extended header"),
        ([Raw(b"x", type=b"2", target=b"y", content=b"!")], "symbolic link with 1 bytes"),
        ([pax(linkpath="y" * 5000), Raw(b"x", type=b"2")], "a target of 5000 bytes"),
        ([Raw(b"x", break_checksum=True)], "its checksum is wrong"),
        ([ROOT, Raw(b"x", magic=bytes(8))], "its magic is"),
        ([Raw(b"x", size_field=b"9" * 12)], "a number is not octal"),
        ([Raw(b"x", size_field=b"\xff" * 12)], "negative or too large"),
        ([Raw(b"x", size_field=b"\x80" + b"\x7f" * 11)], "negative or too large"),
        ([Raw(b"x", size_field=b"\x80" + bytes(4) + b"\x7f" + bytes(6))], "are the limit"),
        ([Raw(b"x", b"short", size=5000)], "cut short"),
        ([Raw(b"checkpoint/pstree.img", size=5 * MIB)], "pstree.img has 5242880 bytes"),
        ([Raw(b"config.dump", b"[" * 4000), ROOT], "config.dump"),
        ([Raw(b"config.dump", b"[1]"), ROOT], "no JSON object"),
        ([Raw(b"config.dump", b"\xff\xfe"), ROOT], "config.dump"),
    ],
)
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_refused(tmp_path: Path, members: list[Raw], what: str, compression: str) -> None:
    path = tmp_path / "hostile.tar"
    path.write_bytes(compressed(tar(members), compression))
    with pytest.raises(ArchiveError) as caught, open_files(path) as files:
        files.facts()  # type: ignore[union-attr]
    text = str(caught.value)
    assert what in text
    assert text.startswith(f"{path}: ")
    assert text.isprintable()
    assert sorted(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("end", "what"),
    [
        (b"", "cut short"),
        (bytes(512), "end mark is not whole"),
        (bytes(1024) + Raw(b"more", b"x").packed(), "something follows"),
        (bytes(1024) + b"x", "something follows"),
        (bytes(2 * MIB), "follow its end mark"),
    ],
)
def test_the_end_is_looked_at(tmp_path: Path, end: bytes, what: str) -> None:
    assert what in refused(tmp_path, tar([ROOT], end))


@pytest.mark.parametrize("kind", [b"1", b"2", b"3", b"4", b"6"])
def test_what_stands_in_for_one_of_our_files_is_named(tmp_path: Path, kind: bytes) -> None:
    """Links and devices are members like others until one of them is needed; none is made."""
    path = tmp_path / "a.tar"
    name = b"checkpoint/gpustasis-manifest.img"
    path.write_bytes(tar([ROOT, Raw(name, type=kind, target=b"/etc/passwd")]))
    with open_files(path) as files, pytest.raises(ArchiveError, match=r"manifest\.img: is a "):
        files.manifest()


@pytest.mark.parametrize("kind", [b"1", b"2", b"3", b"4", b"5", b"6"])
def test_flatten_writes_ordinary_files_only(tmp_path: Path, kind: bytes) -> None:
    images = tmp_path / "images"
    images.mkdir()
    make_checkpoint(images, {7: mixture()})
    hostile = pack(images, tmp_path / "hostile.tar")
    with tarfile.open(hostile, "a") as archive:
        info = tarfile.TarInfo("checkpoint/extra")
        info.type, info.linkname = kind, "/etc/passwd"
        archive.addfile(info)
    before = sorted(tmp_path.iterdir())
    with open_files(hostile) as files, pytest.raises(CheckpointError, match="checkpoint/extra"):
        flatten_archive(files, tmp_path / "out")  # type: ignore[arg-type]
    assert sorted(tmp_path.iterdir()) == before


def test_flatten_follows_no_link_planted_beside_its_output(tmp_path: Path) -> None:
    images, victim = tmp_path / "images", tmp_path / "victim"
    images.mkdir()
    victim.mkdir()
    (victim / "precious").write_text("mine")
    make_checkpoint(images, {7: mixture()})
    path = pack(images, tmp_path / "a.tar")
    (tmp_path / ".out.part").symlink_to(victim)
    with open_files(path) as files, pytest.raises(CheckpointError, match="is a link"):
        flatten_archive(files, tmp_path / "out")  # type: ignore[arg-type]
    assert [p.name for p in victim.iterdir()] == ["precious"]
    assert not (tmp_path / "out").exists()


def test_bounds_are_kept(tmp_path: Path) -> None:
    many = [Raw(b"m%d" % number) for number in range(20)]
    few = replace(DEFAULT_LIMITS, members=10)
    assert "more than 10 members" in refused(tmp_path, tar([ROOT, *many]), few)
    names = replace(DEFAULT_LIMITS, names_bytes=2000)
    assert "take more than 2000 bytes" in refused(tmp_path, tar([ROOT, *many]), names)
    targets = [
        part
        for number in range(20)
        for part in (pax(linkpath="t" * 4000), Raw(b"m%d" % number, type=b"2"))
    ]
    links = replace(DEFAULT_LIMITS, names_bytes=40_000)
    assert "targets of its links take more" in refused(tmp_path, tar([ROOT, *targets]), links)
    # One character of four bytes makes all the others of its name as wide.
    wide = [Raw(b"%s-%d" % (("\U0001f600" + 76 * "a").encode(), number)) for number in range(20)]
    narrow = [Raw(b"%s-%d" % (80 * b"a", number)) for number in range(20)]
    letters = replace(DEFAULT_LIMITS, names_bytes=20 * (160 + 200))
    (tmp_path / "hostile.tar").write_bytes(tar([ROOT, *narrow]))
    with open_files(tmp_path / "hostile.tar", limits=letters):
        pass
    assert "take more than 7200 bytes" in refused(tmp_path, tar([ROOT, *wide]), letters)
    cores = [Raw(b"checkpoint/core-%d.img" % number, b"x" * 1000) for number in range(20)]
    kept = replace(DEFAULT_LIMITS, kept_bytes=10_000)
    assert "more than 10000 bytes" in refused(tmp_path, tar([ROOT, *cores]), kept)
    images = [Raw(b"checkpoint/gpustasis-%d.img" % pid, bytes(500)) for pid in range(1, 20)]
    files = replace(DEFAULT_LIMITS, images=10)
    assert "more than 10 images" in refused(tmp_path, tar([ROOT, *images]), files)
    unpacked = replace(DEFAULT_LIMITS, unpacked_bytes=10_000)
    assert "10000 are the limit" in refused(tmp_path, tar([ROOT, *cores]), unpacked)


def test_an_image_needs_no_descriptor(tmp_path: Path) -> None:
    directory = tmp_path / "images"
    directory.mkdir()
    make_checkpoint(directory, {pid: mixture() for pid in range(1, 60)})
    path = pack(directory, tmp_path / "a.tar")
    ended = subprocess.run(
        [sys.executable, "-m", "gpustasis", "verify", path],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20)),
    )
    assert ended.returncode == 0, ended.stderr
    assert "59 images whole" in ended.stdout


def test_an_endless_list_of_extended_headers_ends(tmp_path: Path) -> None:
    headers = [long(b"x" * 100) for _ in range(100)]
    few = replace(DEFAULT_LIMITS, members=50)
    assert "behind one of type 'L'" in refused(tmp_path, tar([ROOT, *headers]), few)
    pairs = [
        part for n in range(40) for part in (long(b"x" * 100 + b"%d" % n), Raw(b"member%d" % n))
    ]
    assert "more than 50 members" in refused(tmp_path, tar([ROOT, *pairs]), few)


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_a_bomb_ends_at_the_limit(tmp_path: Path, compression: str) -> None:
    bomb = tar([ROOT, Raw(b"checkpoint/pages-1.img", bytes(64 * MIB))])
    limits = replace(DEFAULT_LIMITS, ratio=100, ratio_free_bytes=8 * MIB)
    text = refused(tmp_path, compressed(bomb, compression), limits)
    assert "100 times its size is the limit" in text


def test_an_index_longer_than_the_limit(tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    make_checkpoint(images, {7: mixture(), 8: mixture()})
    path = pack(images, tmp_path / "a.tar")
    limits = replace(DEFAULT_LIMITS, index_bytes=1000)
    with (
        open_files(path, limits=limits) as files,
        pytest.raises(ImageError, match="are left of the limit"),
    ):
        manifest = files.manifest()
        assert manifest is not None
        files.open_image(manifest, manifest.tasks[1])


def test_an_archive_that_changes_between_two_passes(tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    make_checkpoint(images, {7: mixture()})
    path = pack(images, tmp_path / "a.tar")
    raw = path.read_bytes()
    with open_files(path) as files:
        path.write_bytes(tar([ROOT]))
        with pytest.raises(ArchiveError, match="was changed while it was read"):
            list(files.again())  # type: ignore[union-attr]
        path.write_bytes(raw.replace(b"inventory", b"inventorx"))
        path.write_bytes(raw[:3000])
        with pytest.raises(ArchiveError):
            list(files.again())  # type: ignore[union-attr]


MEASURED = """
import resource, sys
from click.testing import CliRunner
from gpustasis.cli import cli, inspect, verify  # with all they import
import gpustasis.archive.opened
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
result = CliRunner().invoke(cli, [sys.argv[1], sys.argv[2]])
print(result.exit_code, peak() - before, str(result.exception)[:300])
"""


def measured(command: str, path: Path) -> tuple[int, int, str]:
    """Exit status, bytes of memory beyond what the imports took, and the error."""

    def no_more() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))

    ended = subprocess.run(
        [sys.executable, "-c", MEASURED, command, path],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=no_more,
    )
    assert ended.returncode == 0, ended.stderr
    status, extra, error = ended.stdout.strip().split(" ", 2)
    return int(status), int(extra), error


@pytest.mark.parametrize(("index", "most"), [(100 * MIB, 250 * MIB), (600 * MIB, 100 * MIB)])
def test_an_image_that_is_all_index_takes_what_the_limit_allows(
    tmp_path: Path, index: int, most: int
) -> None:
    """Its trailer says where the index begins: 100 MiB are kept, 600 MiB are beyond the limit."""
    size = 1 << 30
    manifest = Raw(b"checkpoint/gpustasis-manifest.img", b"x" * 100)
    trailer = (size - index).to_bytes(8, "little") + bytes(120)
    path = tmp_path / "bomb"
    with path.open("wb") as file, zstandard.ZstdCompressor(level=1).stream_writer(file) as out:
        out.write(tar([ROOT, manifest], end=b""))
        out.write(Raw(b"checkpoint/gpustasis-7.img", size=size).packed())
        for _ in range(1023):
            out.write(bytes(MIB))
        out.write(bytes(MIB - 128) + trailer + bytes(1024))
    _, extra, error = measured("verify", path)
    assert "1 problem found" in error
    assert extra < most


def test_memory_is_bounded_whatever_the_archive_holds(tmp_path: Path) -> None:
    """A gigabyte in an image, in pages, and in JSON; and a window of zstd beyond the limit."""
    manifest = Raw(b"checkpoint/gpustasis-manifest.img", b"x" * 100)
    image = Raw(b"checkpoint/gpustasis-7.img", size=1 << 30)
    pages = Raw(b"checkpoint/pages-1.img", size=1 << 30)
    path = tmp_path / "bomb"
    with path.open("wb") as file, zstandard.ZstdCompressor(level=1).stream_writer(file) as out:
        out.write(tar([ROOT, manifest], end=b""))
        for member in (image, pages):
            out.write(member.packed())
            for _ in range(1024):
                out.write(bytes(MIB))
        out.write(bytes(1024))
    assert path.stat().st_size < MIB
    for command in ("inspect", "verify"):
        status, extra, error = measured(command, path)
        assert status == 1
        assert "manifest" in error or "1 problem found" in error
        assert extra < 100 * MIB, error
    deep = Raw(b"checkpoint/gpustasis-dump.json", b"[" * 3 * MIB)
    path.write_bytes(gzip.compress(tar([ROOT, deep]), 1))
    _, extra, error = measured("inspect", path)
    assert extra < 200 * MIB, error
    wide = zstandard.ZstdCompressionParameters(window_log=29, compression_level=1)
    packer = zstandard.ZstdCompressor(compression_params=wide)
    packing = packer.compressobj()
    path.write_bytes(packing.compress(tar([ROOT, manifest]) + noise(MIB)) + packing.flush())
    _, extra, error = measured("inspect", path)
    assert "does not unpack" in error
    assert extra < 100 * MIB
