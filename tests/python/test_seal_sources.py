# SPDX-License-Identifier: Apache-2.0
"""What `seal` takes: whole checkpoints that need no other, which hold still; and whom it blames."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpustasis._core import (
    MANIFEST_NAME,
    PARENT_LINK,
    SEALED_NAME,
    MemoryKind,
    SealedReader,
    image_name,
)
from gpustasis.criu.images import inventory_plugins
from gpustasis.errors import CheckpointError, SealError
from gpustasis.image.verification import verify_directory
from gpustasis.sealing.keys import KeyFile
from gpustasis.sealing.recipients import read_recipients
from gpustasis.sealing.seal import seal
from gpustasis.sealing.unseal import unseal
from support.certificates import Pair
from support.chains import contents, is_whole, make_link, memory_of
from support.command import call
from support.inventory import NAMES_IMAGES, write_inventory
from support.recipients import make_recipient

BIG = 40 << 20  # bytes: progress is told of each 16 MiB


@pytest.fixture(scope="module")
def me(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_recipient(tmp_path_factory.mktemp("me"))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    make_link(tmp_path / "one", {7: memory_of(["a1", "0", "A2"])})
    (tmp_path / "one" / "core-7.img").write_bytes(b"")
    os.truncate(tmp_path / "one" / "core-7.img", BIG)
    return tmp_path / "one"


def without_image(directory: Path) -> None:
    (directory / image_name(7)).unlink()


def pages_in_parent(directory: Path) -> None:
    """A pagemap as CRIU writes it with --prev-images-dir; the link to that is gone."""
    magic = (0x54564319).to_bytes(4, "little") + (0x56084025).to_bytes(4, "little")
    head, entry = b"\x08\x01", b"\x08\x80\x20\x10\x03\x18\x01"
    sized = b"".join(len(part).to_bytes(4, "little") + part for part in (head, entry))
    (directory / "pagemap-7.img").write_bytes(magic + sized)


def damaged_manifest(directory: Path) -> None:
    raw = bytearray((directory / MANIFEST_NAME).read_bytes())
    raw[50] ^= 1
    (directory / MANIFEST_NAME).write_bytes(raw)


@pytest.mark.parametrize(
    ("change", "says", "status"),
    [
        (without_image, f"{image_name(7)} is missing", 14),
        (pages_in_parent, "pagemap-7.img.*takes a dump without --prev-images-dir", 14),
        (damaged_manifest, MANIFEST_NAME, 10),
    ],
)
def test_what_is_not_whole(
    checkpoint: Path,
    me: Pair,
    change: Callable[[Path], None],
    says: str,
    status: int,
    tmp_path: Path,
) -> None:
    change(checkpoint)
    with pytest.raises(CheckpointError, match=says) as caught:
        seal(checkpoint, read_recipients([me.certificate]), tmp_path / "out")
    assert caught.value.exit_code == status
    assert os.listdir(tmp_path) == ["one"]


def test_a_manifest_that_is_gone_or_is_another(checkpoint: Path, me: Pair, tmp_path: Path) -> None:
    """CRIU's inventory says that there is one, and which memory it lists."""
    recipients = read_recipients([me.certificate])
    names = inventory_plugins(checkpoint)
    write_inventory(checkpoint, "gpustasis", NAMES_IMAGES, "images-" + "0" * 32)
    with pytest.raises(CheckpointError, match="does not list the memory"):
        seal(checkpoint, recipients, tmp_path / "out")
    write_inventory(checkpoint, *names)
    for own in ("gpustasis", NAMES_IMAGES):
        write_inventory(checkpoint, own)
        (checkpoint / MANIFEST_NAME).unlink(missing_ok=True)
        (checkpoint / image_name(7)).unlink(missing_ok=True)
        with pytest.raises(CheckpointError, match=f"{MANIFEST_NAME}: missing"):
            seal(checkpoint, recipients, tmp_path / "out")
        (problem,) = verify_directory(checkpoint).problems
        assert f"{MANIFEST_NAME}: missing: CRIU's inventory says" in problem
    write_inventory(checkpoint)
    seal(checkpoint, recipients, tmp_path / "out")
    assert "checkpoint of CRIU alone" in verify_directory(checkpoint).problems[0]


def test_a_checkpoint_that_has_lost_its_link(checkpoint: Path, me: Pair, tmp_path: Path) -> None:
    """The manifest says that it has a parent, which is found by its id as well."""
    make_link(tmp_path / "two", {7: memory_of(["a1", "0", "B2"])}, parent=checkpoint)
    (tmp_path / "two" / PARENT_LINK).unlink()
    with pytest.raises(SealError, match=f"{MANIFEST_NAME}.*gpustasis flatten"):
        seal(tmp_path / "two", read_recipients([me.certificate]), tmp_path / "out")


def test_the_remedy_for_an_earlier_dump_is_one(checkpoint: Path, me: Pair, tmp_path: Path) -> None:
    """flatten does not take such a checkpoint."""
    (checkpoint / "parent").symlink_to("../earlier")
    with pytest.raises(SealError, match="takes a dump without --prev-images-dir") as caught:
        seal(checkpoint, read_recipients([me.certificate]), tmp_path / "out")
    assert "flatten" not in str(caught.value)


def shorten(path: Path) -> None:
    os.truncate(path, 100)


def remove(path: Path) -> None:
    path.unlink()


def touch(path: Path) -> None:
    os.utime(path)


def link(path: Path) -> None:
    path.unlink()
    path.symlink_to("elsewhere")


@pytest.mark.parametrize("when", ["sealed", "read back"])
@pytest.mark.parametrize("change", [shorten, remove, touch, link])
def test_a_source_that_changes_is_to_blame(
    checkpoint: Path, me: Pair, change: Callable[[Path], None], when: str, tmp_path: Path
) -> None:
    path = checkpoint / "core-7.img"
    size = sum(file.stat().st_size for file in checkpoint.iterdir())
    told: list[int] = []

    def disturb(done: int) -> None:
        if not told and done >= (1 if when == "sealed" else size + 1):
            told.append(done)
            change(path)

    with pytest.raises(SealError) as caught:
        seal(
            checkpoint,
            read_recipients([me.certificate]),
            tmp_path / "out",
            threads=1,
            frame_size=65536,
            on_progress=disturb,
        )
    said = str(caught.value)
    assert told
    assert said.startswith(str(checkpoint))
    assert "cannot write" not in said
    if change is not touch or when == "sealed":  # else it is found at the end, by the listing
        assert "core-7.img" in said
    assert os.listdir(tmp_path) == ["one"]


def test_a_sealed_file_that_cannot_be_read_is_to_blame(
    checkpoint: Path, me: Pair, tmp_path: Path
) -> None:
    """Not the directory that it is unsealed to."""
    seal(checkpoint, read_recipients([me.certificate]), tmp_path / "sealed", frame_size=65536)
    told: list[int] = []

    def disturb(done: int) -> None:
        if not told:
            os.truncate(tmp_path / "sealed" / SEALED_NAME, 5000)
        told.append(done)

    with pytest.raises(SealError, match=f"sealed/{SEALED_NAME}: ") as caught:
        unseal(
            tmp_path / "sealed", KeyFile(me.key), tmp_path / "out", threads=1, on_progress=disturb
        )
    assert "cannot write" not in str(caught.value)


@pytest.mark.parametrize("command", ["seal", "unseal"])
def test_out_is_not_in_what_is_read(
    checkpoint: Path, me: Pair, command: str, tmp_path: Path
) -> None:
    source, words = checkpoint, ["--to", me.certificate]
    if command == "unseal":
        source, words = tmp_path / "sealed", ["--key", me.key]
        seal(checkpoint, read_recipients([me.certificate]), source)
    before = sorted(os.listdir(source))
    done = call(command, source, *words, "-o", source / "out")
    assert done.exit_code == CheckpointError.exit_code
    assert "would be in" in done.output
    assert sorted(os.listdir(source)) == before


def test_the_directory_that_one_is_in_is_no_place(
    checkpoint: Path, me: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal(checkpoint, read_recipients([me.certificate]), tmp_path / "sealed")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def read(*words: object) -> None:
        raise AssertionError("it was begun")

    monkeypatch.setattr(SealedReader, "open", read)
    done = call("unseal", tmp_path / "sealed", "--key", me.key, "-o", ".")
    assert done.exit_code == CheckpointError.exit_code, done.output
    assert "where you are" in done.output


# argv: the hard limit of core dumps. Prints whether the kernel may dump this process.
DUMPABLE = """
import ctypes, resource, sys
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_CORE, (limit, limit))
from gpustasis.cli import key_options
print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))
key_options.keep_from_dumps()
print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0), resource.getrlimit(resource.RLIMIT_CORE)[0])
"""


@pytest.mark.parametrize(("hard", "soft"), [(0, 0), (1 << 20, 1), (-1, 1)])
def test_what_holds_keys_is_never_dumped(hard: int, soft: int) -> None:
    """With core_pattern a pipe, the kernel does not look at a limit of 0; nor, then, at one that
    cannot be raised to 1."""
    argv = [sys.executable, "-c", DUMPABLE, str(hard)]
    done = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"1\n0 {soft}\n"


@pytest.mark.parametrize("kib", [0, 8])
@pytest.mark.parametrize("command", ["seal", "unseal"])
def test_no_file_is_blamed_for_memory(
    checkpoint: Path, me: Pair, command: str, kib: int, tmp_path: Path
) -> None:
    source, words = checkpoint, ["--to", me.certificate]
    if command == "unseal":
        source, words = tmp_path / "sealed", ["--key", me.key]
        seal(checkpoint, read_recipients([me.certificate]), source)
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, ({kib << 10},) * 2)\n"
        "from gpustasis.cli import main; main()"
    )
    drop = ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock"]
    argv = [*drop, sys.executable, "-c", code, command, source, *words, "-o", tmp_path / "out"]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == SealError.exit_code, done.stderr
    assert "cannot lock memory for" in done.stderr
    assert str(tmp_path) not in done.stderr
    assert str(me.certificate) not in done.stderr


def test_cpu_memory_goes_with_it(me: Pair, tmp_path: Path) -> None:
    """Beside GPU memory of the same process, and of a process that has none."""
    checkpoint, sealed, opened = (tmp_path / name for name in ("one", "sealed", "opened"))
    memory = memory_of(["a1", "B2"])
    make_link(checkpoint, {7: memory}, cpu_memory={7: memory_of(["C3"]), 8: memory})
    seal(checkpoint, read_recipients([me.certificate]), sealed)
    unseal(sealed, KeyFile(me.key), opened)
    assert is_whole(opened)
    for kind in (MemoryKind.GPU, MemoryKind.CPU):
        assert contents(opened, kind) == contents(checkpoint, kind)
    for name in (image_name(7, MemoryKind.CPU), image_name(8, MemoryKind.CPU)):
        kept = (checkpoint / name).rename(tmp_path / name)
        with pytest.raises(SealError, match=f"holds no whole checkpoint: {name} is missing"):
            seal(checkpoint, read_recipients([me.certificate]), tmp_path / "other")
        kept.rename(checkpoint / name)
