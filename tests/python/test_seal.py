# SPDX-License-Identifier: Apache-2.0
"""`gpustasis seal` and `unseal`: what comes out is what went in, and nothing of it is in between;
the plain checkpoint stays as it was, whatever becomes of the seal."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from gpustasis._core import ENVELOPE_NAME, PARENT_LINK, SEALED_NAME, SealedReader
from gpustasis.errors import CheckpointError, SealError
from gpustasis.sealing.keys import KeyFile
from gpustasis.sealing.recipients import read_recipients
from gpustasis.sealing.seal import seal
from gpustasis.sealing.unseal import unseal
from support.certificates import Pair
from support.chains import is_whole, make_link, memory_of
from support.command import call
from support.json_output import check_document
from support.recipients import make_recipient

MARKER = b"a-secret-of-the-job-7f3a"
INVENTORY = "inventory.img"
SEALED_FILES = sorted((ENVELOPE_NAME, SEALED_NAME, INVENTORY))
Contents = dict[str, tuple[int, int, bytes]]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Our images, and files as CRIU's: one is empty, one has a marker for its name."""
    directory = tmp_path / "store" / "one"
    directory.parent.mkdir()
    make_link(directory, {7: memory_of(["a1", "0", "A2", "b3"] * 8)})
    (directory / "core-7.img").write_bytes(MARKER * 300)
    (directory / MARKER.decode()).write_bytes(b"")
    (directory / "stats-dump").write_bytes(b"x")
    (directory / "stats-dump").chmod(0o640)
    os.utime(directory / "stats-dump", ns=(10**18, 10**18 + 7))
    return directory


@pytest.fixture(scope="module")
def me(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_recipient(tmp_path_factory.mktemp("me"))


def contents(directory: Path) -> Contents:
    return {
        path.name: (path.lstat().st_mode, path.lstat().st_mtime_ns, path.read_bytes())
        for path in directory.iterdir()
    }


@pytest.fixture
def sealed(checkpoint: Path, me: Pair, tmp_path: Path) -> Path:
    """A sealed copy beside it, in the same store."""
    seal(checkpoint, read_recipients([me.certificate]), checkpoint.with_name("sealed"))
    return checkpoint.with_name("sealed")


def test_there_and_back(checkpoint: Path, me: Pair, tmp_path: Path) -> None:
    before = contents(checkpoint)
    sealed = tmp_path / "sealed"
    done = call("seal", checkpoint, "--to", me.certificate, "-o", sealed, "--json")
    assert done.exit_code == 0, done.output
    found = check_document(done.stdout, "seal")
    assert found["files"] == len(before)
    assert found["recipients"][0]["subject"] == "CN=me"
    assert sorted(os.listdir(sealed)) == SEALED_FILES
    assert contents(sealed)[INVENTORY] == before[INVENTORY]
    assert contents(checkpoint) == before
    assert os.listdir(checkpoint.parent) == ["one"]

    done = call("unseal", sealed, "--key", me.key, "-o", tmp_path / "out", "--json")
    assert done.exit_code == 0, done.output
    assert check_document(done.stdout, "unseal")["files"] == len(before)
    assert contents(tmp_path / "out") == before
    assert is_whole(tmp_path / "out")


def test_it_is_said_that_the_plain_one_is_still_there(
    checkpoint: Path, me: Pair, tmp_path: Path
) -> None:
    done = call("seal", checkpoint, "--to", me.certificate, "-o", tmp_path / "sealed")
    assert done.exit_code == 0, done.output
    assert f"{checkpoint} is still there, in the clear" in done.output
    done = call("seal", checkpoint, "--to", me.certificate)
    assert done.exit_code == 2  # there is no form without -o


def test_no_marker_is_left(checkpoint: Path, me: Pair, tmp_path: Path) -> None:
    """Neither of contents nor of names, ours included."""
    assert any(MARKER in raw for _, _, raw in contents(checkpoint).values())
    seal(checkpoint, read_recipients([me.certificate]), tmp_path / "sealed", frame_size=4096)
    for name, (_, _, raw) in contents(tmp_path / "sealed").items():
        for marker in (MARKER, b"core-7", b"stats-dump", b"gpustasis-7.img", b"manifest"):
            assert marker not in raw
            assert marker not in name.encode()


def test_two_seals_of_one_checkpoint_have_nothing_in_common(
    checkpoint: Path, me: Pair, tmp_path: Path
) -> None:
    recipients = read_recipients([me.certificate])
    raw = []
    for name in ("a", "b"):
        seal(checkpoint, recipients, tmp_path / name, frame_size=4096)
        raw.append((tmp_path / name / SEALED_NAME).read_bytes()[128:])
    pieces = {raw[0][at : at + 16] for at in range(len(raw[0]) - 16)}
    both = [raw[1][at : at + 16] for at in range(16, len(raw[1]) - 16, 4096 + 32)]
    assert len(raw[0]) == len(raw[1])
    assert not pieces.intersection(both)


def without_inventory(directory: Path) -> None:
    (directory / INVENTORY).unlink()


def with_link(directory: Path) -> None:
    (directory / "link").symlink_to("core-7.img")


def with_directory(directory: Path) -> None:
    (directory / "sub").mkdir()


def with_parent(directory: Path) -> None:
    (directory / PARENT_LINK).symlink_to("../other")


def with_criu_parent(directory: Path) -> None:
    (directory / "parent").symlink_to("../other")


def with_fifo(directory: Path) -> None:
    os.mkfifo(directory / "fifo")


def with_part(directory: Path) -> None:
    (directory / ".core-8.img.part").touch()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without_inventory, "no whole checkpoint"),
        (with_link, "link is no ordinary file"),
        (with_directory, "sub is no ordinary file"),
        (with_fifo, "fifo is no ordinary file"),
        (with_parent, "flatten"),
        (with_criu_parent, "--prev-images-dir"),
        (with_part, ".core-8.img.part is not finished"),
    ],
)
def test_what_cannot_be_sealed_stays_as_it_is(
    checkpoint: Path, me: Pair, change: object, says: str
) -> None:
    assert callable(change)
    change(checkpoint)
    before = sorted(os.listdir(checkpoint))
    beside = sorted(os.listdir(checkpoint.parent))
    done = call("seal", checkpoint, "--to", me.certificate, "-o", checkpoint.with_name("out"))
    assert done.exit_code == SealError.exit_code
    assert says in done.output
    assert sorted(os.listdir(checkpoint)) == before
    assert sorted(os.listdir(checkpoint.parent)) == beside


def test_what_reads_back_wrongly_takes_no_place(
    checkpoint: Path, me: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte that the disk has lost: found before the sealed form gets its name."""
    before = contents(checkpoint)
    from gpustasis.sealing import seal as module

    def lose(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(500)
            byte = file.read(1)
            file.seek(500)
            file.write(bytes([byte[0] ^ 1]))

    monkeypatch.setattr(module, "_forget", lose)
    with pytest.raises(SealError, match="damaged, moved or forged"):
        seal(checkpoint, read_recipients([me.certificate]), checkpoint.with_name("out"))
    assert contents(checkpoint) == before
    assert os.listdir(checkpoint.parent) == ["one"]


def add(directory: Path) -> None:
    (directory / "late.img").touch()


def take(directory: Path) -> None:
    (directory / "stats-dump").unlink()


def touch(directory: Path) -> None:
    os.utime(directory / "core-7.img")


def change_in_secret(directory: Path) -> None:
    """Other bytes with the old size and mtime, and the old bytes again: only ctime differs."""
    path = directory / "core-7.img"
    raw, found = path.read_bytes(), path.stat()
    for content in (bytes(len(raw)), raw):
        path.write_bytes(content)
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def exchange(directory: Path) -> None:
    path = directory / "core-7.img"
    raw = path.read_bytes()
    path.rename(directory.parent.parent / "old")
    path.write_bytes(raw)


@pytest.mark.parametrize("change", [add, take, touch, change_in_secret, exchange])
def test_files_that_come_go_or_change_meanwhile(
    checkpoint: Path, me: Pair, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    from gpustasis.sealing import seal as module

    monkeypatch.setattr(module, "_forget", lambda path: change(checkpoint))
    with pytest.raises(SealError, match=r"came, went or changed|No such file"):
        seal(checkpoint, read_recipients([me.certificate]), checkpoint.with_name("out"))
    assert os.listdir(checkpoint.parent) == ["one"]


def test_names_that_are_no_utf_8(checkpoint: Path, me: Pair, tmp_path: Path) -> None:
    for name in (b"\x80x", "é".encode(), "\U0001f600".encode()):
        (checkpoint / os.fsdecode(name)).write_bytes(name)
    before = contents(checkpoint)
    done = call("seal", checkpoint, "--to", me.certificate, "-o", tmp_path / "sealed")
    assert done.exit_code == 0, done.output
    unseal(tmp_path / "sealed", KeyFile(me.key), tmp_path / "out")
    assert contents(tmp_path / "out") == before


# argv: the limit, its value, then words of the command line.
LIMITED = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
value = int(sys.argv[2])
resource.setrlimit(getattr(resource, sys.argv[1]), (value, value))
from gpustasis.cli import main
sys.argv = ["gpustasis", *sys.argv[3:]]
sys.exit(main())
"""


def limited(limit: str, value: int, *words: object) -> subprocess.CompletedProcess[str]:
    """The command line under a limit, without the capability to lock more memory than that."""
    argv = [sys.executable, "-c", LIMITED, limit, str(value), *map(str, words)]
    drop = ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock"]
    return subprocess.run([*drop, *argv], capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("kib", [0, 8, 36])
def test_memory_that_cannot_be_locked(checkpoint: Path, me: Pair, tmp_path: Path, kib: int) -> None:
    out = tmp_path / "out"
    done = limited(
        "RLIMIT_MEMLOCK", kib << 10, *("seal", checkpoint, "--to", me.certificate, "-o", out)
    )
    assert done.returncode == SealError.exit_code, done.stderr
    assert "RLIMIT_MEMLOCK" in done.stderr
    assert "ulimit -l" in done.stderr
    assert "Traceback" not in done.stderr
    assert not out.exists()


def test_output_that_cannot_be_written(
    checkpoint: Path, sealed: Path, me: Pair, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for words in (
        ("seal", checkpoint, "--to", me.certificate, "-o", out),
        ("unseal", sealed, "--key", me.key, "-o", out),
    ):
        done = limited("RLIMIT_FSIZE", 1000, *words)
        assert done.returncode == CheckpointError.exit_code, done.stderr
        assert f"cannot write {out}" in done.stderr
        assert "File too large" in done.stderr
        assert sorted(os.listdir(tmp_path)) == ["store"]


def test_other_commands_say_that_it_is_sealed(
    checkpoint: Path, sealed: Path, tmp_path: Path
) -> None:
    shutil.rmtree(checkpoint)
    checkpoint = sealed
    archive = tmp_path / "archive.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(checkpoint, "checkpoint")
    for words in (
        ["inspect", checkpoint],
        ["verify", checkpoint],
        ["flatten", checkpoint, "-o", tmp_path / "flat"],
        ["diff", checkpoint, checkpoint],
        ["restore", "-D", checkpoint],
        ["inspect", archive],
        ["verify", archive],
        ["flatten", archive, "-o", tmp_path / "flat"],
    ):
        done = call(*words)
        assert done.exit_code == SealError.exit_code, (words, done.output)
        assert "is sealed" in done.output
        assert "gpustasis unseal" in done.output
    done = call("recover", str(os.getpid()), "-D", checkpoint)
    assert done.exit_code == SealError.exit_code
    assert "is sealed: name the private key" in done.output
    done = call("list", checkpoint.parent)
    assert "is sealed" in done.output
    done = call("verify", checkpoint.parent)
    assert done.exit_code == SealError.exit_code
    assert "every checkpoint in it is sealed" in done.output
    done = call("prune", checkpoint.parent, "--keep-last", "1")
    assert done.exit_code == 0
    assert checkpoint.exists()
    done = call("doctor", "--archive", checkpoint)
    assert "is sealed" in done.output
    assert "open it with gpustasis unseal" in " ".join(done.output.split())


def test_a_directory_that_is_not_sealed(checkpoint: Path, me: Pair, tmp_path: Path) -> None:
    for words in (
        ["unseal", checkpoint, "--key", me.key, "-o", tmp_path / "out"],
        ["rewrap", checkpoint, "--key", me.key, "--to", me.certificate],
    ):
        done = call(*words)
        assert done.exit_code == SealError.exit_code
        assert "is not sealed" in done.output
    assert not (tmp_path / "out").exists()


def test_out_that_is_there_stays(checkpoint: Path, sealed: Path, me: Pair, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").touch()
    done = call("seal", checkpoint, "--to", me.certificate, "-o", out)
    assert done.exit_code == 3
    (tmp_path / "empty").mkdir()
    done = call("seal", checkpoint, "--to", me.certificate, "-o", tmp_path / "empty")
    assert done.exit_code == 3
    assert "is there already" in done.output
    done = call("unseal", sealed, "--key", me.key, "-o", out)
    assert done.exit_code == 3
    assert os.listdir(out) == ["mine"]


def test_many_files_and_frames(checkpoint: Path, me: Pair, tmp_path: Path) -> None:
    for number in range(300):
        (checkpoint / f"fdinfo-{number}.img").write_bytes(os.urandom(number * 37))
    before = contents(checkpoint)
    told: list[int] = []
    seal(
        checkpoint,
        read_recipients([me.certificate]),
        tmp_path / "sealed",
        frame_size=4096,
        threads=4,
        on_progress=told.append,
    )
    assert told[-1] >= 2 * sum(len(raw) for _, _, raw in before.values())
    unseal(tmp_path / "sealed", KeyFile(me.key), tmp_path / "out", threads=4)
    assert contents(tmp_path / "out") == before


def test_one_file_can_be_read(sealed: Path, me: Pair) -> None:
    from gpustasis._core import DataKey

    key = DataKey.unwrap((sealed / ENVELOPE_NAME).read_bytes(), me.key)
    reader = SealedReader.open(sealed, key)
    assert reader.read("core-7.img") == MARKER * 300
    with pytest.raises(ValueError, match="no sealed file"):
        reader.read("absent")
