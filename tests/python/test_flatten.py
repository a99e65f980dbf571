# SPDX-License-Identifier: Apache-2.0
"""`gpustasis flatten`: the copy holds the same memory to the bit, and needs no other checkpoint."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner

from campaigns import chain_kills
from gpustasis._core import (
    MANIFEST_NAME,
    PARENT_LINK,
    ImageReader,
    ManifestTask,
    image_name,
    read_manifest,
    write_manifest,
)
from gpustasis.cli import cli
from gpustasis.errors import CheckpointError, ImageError
from gpustasis.image.directory import new_directory, try_exclude
from gpustasis.image.flatten import flatten
from gpustasis.image.verification import verify_directory
from support.chains import contents, is_whole, make_chain, make_link, memory_of
from support.deadlines import run_with_deadline
from support.plain_reader import PlainImage

SEED = 20261121


def test_the_copy_is_a_full_checkpoint_of_the_same_memory(tmp_path: Path) -> None:
    """Byte for byte the images that a full dump of it would have written."""
    store = tmp_path / "store"
    store.mkdir()
    last = make_chain(store, 4)[-1]
    flat = tmp_path / "flat"
    done = flatten(last, flat)
    assert done.images == 1
    assert done.earlier_bytes > 0
    words = [f"a{page}" if page % 2 else f"A{page}" for page in range(8)]
    for number in range(1, 5):
        words[number] = f"B{number}"
    full = tmp_path / "full" / last.name
    full.parent.mkdir()
    make_link(full, {7: memory_of(words)})
    assert contents(flat) == contents(last) == contents(full)
    assert image_bytes(flat) == image_bytes(full)
    assert read_manifest(flat).checkpoint_id == read_manifest(last).checkpoint_id
    shutil.rmtree(store)
    assert is_whole(flat)
    assert is_self_contained(flat)


def image_bytes(directory: Path) -> bytes:
    """The image but for what depends on the alignment, which flatten does not keep."""
    image = PlainImage((directory / image_name(7)).read_bytes())
    return b"".join(image.read_chunk(index) for index in range(len(image.chunks)))


def is_self_contained(directory: Path) -> bool:
    manifest = read_manifest(directory)
    images = [
        ImageReader.open(directory / image_name(t.pid)) for t in manifest.tasks if t.externalized
    ]
    return (
        (manifest.parent_id, manifest.chain_length) == (bytes(16), 0)
        and all(image.info.parent_id == bytes(16) for image in images)
        and all(image.totals.ref.chunks == 0 and not image.info.sources for image in images)
        and not (directory / PARENT_LINK).is_symlink()
    )


def test_a_chain_of_120(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    chain = make_chain(store, 120, pages=40)
    found = verify_directory(chain[-1], threads=1)
    assert found.problems == []
    assert found.earlier_checkpoints == 39
    expected = contents(chain[-1])
    flat = tmp_path / "flat"
    flatten(chain[-1], flat)
    shutil.rmtree(store)
    assert is_whole(flat)
    assert is_self_contained(flat)
    assert contents(flat) == expected


def test_several_tasks_and_one_that_is_in_criu_images(tmp_path: Path) -> None:
    make_link(tmp_path / "a", {7: memory_of(["A", "0"]), 9: memory_of(["b"])})
    make_link(
        tmp_path / "b", {7: memory_of(["b", "0"]), 9: memory_of(["A", "C"])}, parent=tmp_path / "a"
    )
    manifest = read_manifest(tmp_path / "b")
    more = type(manifest)(
        checkpoint_id=manifest.checkpoint_id,
        gpus=manifest.gpus,
        tasks=[ManifestTask(pid=3), *manifest.tasks],
        parent_id=manifest.parent_id,
        chain_length=1,
    )
    write_manifest(tmp_path / "b", more)
    flatten(tmp_path / "b", tmp_path / "flat")
    flat = read_manifest(tmp_path / "flat")
    assert [(task.pid, task.externalized) for task in flat.tasks] == [
        (3, False),
        (7, True),
        (9, True),
    ]
    shutil.rmtree(tmp_path / "a")
    assert is_whole(tmp_path / "flat")


def test_a_full_checkpoint_is_copied_too(tmp_path: Path) -> None:
    make_link(tmp_path / "a", {7: memory_of(["A", "0", "b"])})
    done = flatten(tmp_path / "a", tmp_path / "flat")
    assert done.earlier_bytes == 0
    assert contents(tmp_path / "flat") == contents(tmp_path / "a")


def test_other_files_are_copied_with_mode_and_time(tmp_path: Path) -> None:
    make_link(tmp_path / "a", {7: memory_of(["A"])}, taken=1_800_000_000)
    make_link(tmp_path / "b", {7: memory_of(["A"])}, parent=tmp_path / "a", taken=1_800_000_060)
    source = tmp_path / "b"
    (source / "pages-1.img").write_bytes(os.urandom(3_000_000))
    (source / "empty").write_bytes(b"")
    (source / "gpustasis-dump.json").write_text("{}")
    (source / "pages-1.img").chmod(0o640)
    os.utime(source / "pages-1.img", (1_700_000_000, 1_700_000_000))
    (source / ".gpustasis-7.img.part").write_bytes(b"half")
    (source / "gpustasis-99.img").write_bytes(b"of another dump")
    (source / "parent").symlink_to("../a")  # and no page is in it
    flat = tmp_path / "flat"
    done = flatten(source, flat)
    names = {path.name for path in flat.iterdir()}
    others = {"pages-1.img", "empty", "gpustasis-dump.json", "inventory.img"}
    assert names == others | {MANIFEST_NAME, image_name(7)}
    for name in others:
        assert (flat / name).read_bytes() == (source / name).read_bytes()
    status = (flat / "pages-1.img").stat()
    assert (stat.S_IMODE(status.st_mode), status.st_mtime) == (0o640, 1_700_000_000)
    assert (flat / MANIFEST_NAME).stat().st_mtime == 1_800_000_060
    assert done.other_bytes == sum((source / name).stat().st_size for name in others)


def test_a_copy_is_for_its_owner_alone(tmp_path: Path) -> None:
    """Whoever may look into the original; memory of a job is in both."""
    source, flat = tmp_path / "a", tmp_path / "flat"
    make_link(source, {7: memory_of(["A"])})
    source.chmod(0o755)
    os.utime(source, (1_700_000_000, 1_700_000_000))
    flatten(source, flat)
    assert stat.S_IMODE(flat.stat().st_mode) == 0o700
    assert flat.stat().st_mtime == 1_700_000_000


def with_pages_in_parent(directory: Path) -> None:
    """As CRIU writes it with --prev-images-dir: three pages of its own, two in the parent."""
    messages = [b"\x08\x01", b"\x08\x80\x20\x10\x03\x20\x04", b"\x08\x80\x40\x10\x02\x20\x01"]
    raw = b"".join(len(message).to_bytes(4, "little") + message for message in messages)
    (directory / "pagemap-7.img").write_bytes(bytes.fromhex("1943565425400856") + raw)


class TestRefusals:
    def refused(self, tmp_path: Path, error: type[CheckpointError], text: str) -> None:
        before = {path.name for path in tmp_path.iterdir()}
        with pytest.raises(error, match=text):
            flatten(tmp_path / "b", tmp_path / "flat")
        assert {path.name for path in tmp_path.iterdir()} == before

    @pytest.fixture
    def pair(self, tmp_path: Path) -> Path:
        make_link(tmp_path / "a", {7: memory_of(["A", "C"])})
        make_link(tmp_path / "b", {7: memory_of(["A", "D"])}, parent=tmp_path / "a")
        return tmp_path

    def test_pages_of_criu_in_an_earlier_dump(self, pair: Path) -> None:
        (pair / "b" / "parent").symlink_to("../a")
        with_pages_in_parent(pair / "b")
        self.refused(pair, CheckpointError, rf"pagemap-7\.img: 2 pages .*{pair}/a\)")

    def test_a_parent_that_is_gone(self, pair: Path) -> None:
        shutil.rmtree(pair / "a")
        self.refused(pair, ImageError, "missing")

    def test_a_parent_that_was_replaced(self, pair: Path) -> None:
        shutil.rmtree(pair / "a")
        make_link(pair / "a", {7: memory_of(["A", "X"])})
        self.refused(pair, ImageError, "another")

    def test_a_chunk_of_the_parent_that_is_damaged(self, pair: Path) -> None:
        image = pair / "a" / image_name(7)
        raw = bytearray(image.read_bytes())
        raw[ImageReader.open(image).chunk(0).offset + 9] ^= 4
        image.write_bytes(raw)
        self.refused(pair, ImageError, r"a/gpustasis-7\.img|content|chunk 0")

    def test_what_is_no_checkpoint_of_ours(self, tmp_path: Path) -> None:
        (tmp_path / "b").mkdir()
        self.refused(tmp_path, ImageError, "no manifest")

    def test_what_is_no_file(self, pair: Path) -> None:
        (pair / "b" / "folder").mkdir()
        self.refused(pair, ImageError, "folder is no ordinary file")

    @pytest.mark.parametrize("kind", ["fifo", "link"])
    def test_what_becomes_no_file_meanwhile(self, pair: Path, kind: str) -> None:
        """A FIFO must not be waited for, and nothing be read through a link."""
        (pair / "b" / "extra").write_text("something")
        (pair / "secret").write_text("secret")

        def exchange(name: str) -> None:
            if name == "extra":
                (pair / "b" / name).unlink()
                if kind == "fifo":
                    os.mkfifo(pair / "b" / name)
                else:
                    (pair / "b" / name).symlink_to("../secret")

        with pytest.raises(CheckpointError, match="extra"):
            run_with_deadline(lambda: flatten(pair / "b", pair / "flat", exchange))
        assert not (pair / "flat").exists()

    def test_a_fifo_in_place_of_an_image_of_criu(self, pair: Path) -> None:
        os.mkfifo(pair / "b" / "pagemap-7.img")
        with pytest.raises(ImageError, match=r"pagemap-7\.img: is no ordinary file"):
            run_with_deadline(lambda: flatten(pair / "b", pair / "flat"))

    def test_a_place_that_is_taken(self, pair: Path) -> None:
        (pair / "flat").mkdir()
        (pair / "flat" / "something").write_text("mine")
        self.refused(pair, CheckpointError, "flat is there already")
        assert (pair / "flat" / "something").read_text() == "mine"

    def test_a_place_that_somebody_is_writing(self, pair: Path) -> None:
        (pair / ".flat.part").mkdir()
        lock = try_exclude(pair / ".flat.part")
        assert lock is not None
        with lock:
            self.refused(pair, CheckpointError, "another process is writing")


def test_an_empty_directory_is_a_place(tmp_path: Path) -> None:
    make_link(tmp_path / "a", {7: memory_of(["A"])})
    (tmp_path / "flat").mkdir()
    flatten(tmp_path / "a", tmp_path / "flat")
    assert is_whole(tmp_path / "flat")


def test_a_full_file_system_leaves_nothing(tmp_path: Path) -> None:
    make_link(tmp_path / "a", {7: memory_of([f"A{page}" for page in range(600)])})
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small], check=True)
    try:
        with pytest.raises(CheckpointError, match="No space left"):
            flatten(tmp_path / "a", small / "flat")
        assert list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", small], check=True)


class TestCommand:
    def test_says_what_it_did(self, tmp_path: Path) -> None:
        make_link(tmp_path / "a", {7: memory_of(["A"] * 256)})
        make_link(tmp_path / "b", {7: memory_of(["A"] * 256)}, parent=tmp_path / "a")
        words = ["flatten", str(tmp_path / "b"), "-o", str(tmp_path / "flat")]
        result = CliRunner().invoke(cli, words)
        assert result.exit_code == 0, result.output
        assert "1 image, " in result.output
        assert "1.0 MiB of memory were in earlier checkpoints" in result.output

    def test_an_error_is_one(self, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        words = ["flatten", str(tmp_path / "a"), "-o", str(tmp_path / "flat")]
        result = CliRunner().invoke(cli, words)
        assert isinstance(result.exception, ImageError)


@pytest.fixture(scope="session")
def killer(compile_c: Callable[..., Path], repository: Path) -> Path:
    return compile_c(repository / "tests" / "programs" / "kill_at_syscall.c")


def test_flatten_is_killed_anywhere(killer: Path, tmp_path: Path) -> None:
    """The long form is the campaign kill-store of make soak."""
    chain_kills.run_flatten(killer, tmp_path, Random(SEED), 16).require_clean()


def test_prune_is_killed_anywhere(killer: Path, tmp_path: Path) -> None:
    """The long form is the campaign kill-store of make soak."""
    chain_kills.run_prune(killer, tmp_path, Random(SEED), 16).require_clean()


class TestPlantedBesideIt:
    """Others may write where the copy goes, as to /tmp: what they put at the hidden name in
    advance is neither followed, emptied, filled nor kept."""

    def test_a_link(self, tmp_path: Path) -> None:
        make_link(tmp_path / "a", {7: memory_of(["A"])})
        victim = tmp_path / "victim"
        victim.mkdir()
        (victim / "precious").write_text("mine")
        (tmp_path / ".flat.part").symlink_to(victim)
        with pytest.raises(CheckpointError, match=r"\.flat\.part is a link"):
            flatten(tmp_path / "a", tmp_path / "flat")
        assert [p.name for p in victim.iterdir()] == ["precious"]
        assert not (tmp_path / "flat").exists()

    @pytest.mark.parametrize(("owner", "mode"), [(65534, 0o700), (0, 0o777), (0, 0o720)])
    def test_a_directory(self, tmp_path: Path, owner: int, mode: int) -> None:
        make_link(tmp_path / "a", {7: memory_of(["A"])})
        part = tmp_path / ".flat.part"
        part.mkdir()
        (part / "theirs").write_text("x")
        os.chown(part, owner, owner)
        part.chmod(mode)
        with pytest.raises(CheckpointError, match=r"\.flat\.part is there already.*remove it"):
            flatten(tmp_path / "a", tmp_path / "flat")
        assert (part / "theirs").exists() and not (tmp_path / "flat").exists()

    def test_exchanged_while_it_is_filled(self, tmp_path: Path) -> None:
        make_link(tmp_path / "a", {7: memory_of(["A"])})
        victim = tmp_path / "victim"
        victim.mkdir()

        def exchange(name: str) -> None:
            part = tmp_path / ".flat.part"
            if not part.is_symlink():
                part.rename(tmp_path / "stolen")
                part.symlink_to(victim)

        with pytest.raises(CheckpointError, match="exchanged for another"):
            flatten(tmp_path / "a", tmp_path / "flat", exchange)
        assert list(victim.iterdir()) == []
        assert not (tmp_path / "flat").is_symlink()

    def test_what_a_killed_flatten_left_is_used_up(self, tmp_path: Path) -> None:
        make_link(tmp_path / "a", {7: memory_of(["A"])})
        part = tmp_path / ".flat.part"
        child = os.fork()
        if child == 0:
            with new_directory(tmp_path / "flat") as place:
                (place / "inventory.img").write_text("half")
                os._exit(0)
        os.waitpid(child, 0)
        assert (part / "inventory.img").exists()
        flatten(tmp_path / "a", tmp_path / "flat")
        assert is_whole(tmp_path / "flat")
        assert sorted(os.listdir(tmp_path)) == ["a", "flat"]
