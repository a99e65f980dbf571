# SPDX-License-Identifier: Apache-2.0
"""`gpustasis wait`, `arena list` and `arena clean --pool`, the priority of a drain, and what it
syncs: of checkpoints in memory that no dump has made."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gpustasis._core import (
    ARENA_MARKER,
    ARENA_OWNER,
    MANIFEST_NAME,
    SEALED_NAME,
    Manifest,
    write_manifest,
)
from gpustasis.cli import cli
from gpustasis.criu.images import INVENTORY_NAME
from gpustasis.draining.drain import drain
from gpustasis.draining.room import empty_pool
from gpustasis.draining.waiting import wait_for
from gpustasis.errors import CheckpointError, ImageError, LocalError
from gpustasis.image.arena import Tier, tier_of
from gpustasis.image.verification import verify_directory
from support.inventory import write_inventory
from support.json_output import check_document
from support.local_checkpoints import RESERVED, finish, make_local, under_way

SHORT_S, LONG_S = 0.2, 20.0


@pytest.fixture
def local(tmp_path: Path, arena: Path) -> tuple[Path, Path]:
    """A checkpoint that is complete in memory: its image directory, and that in the arena."""
    images = tmp_path / "one"
    stored = make_local(images, arena)
    assert not verify_directory(images).problems
    assert tier_of(images) == Tier.LOCAL
    return images, stored


@pytest.fixture
def later() -> Iterator[Any]:
    """later(function, *arguments): in another thread, in a moment."""
    timers = []

    def start(function: Any, *arguments: Any) -> None:
        timers.append(threading.Timer(SHORT_S, function, arguments))
        timers[-1].start()

    yield start
    for timer in timers:
        timer.join()


def run(*words: object, status: int = 0) -> dict[str, Any]:
    result = CliRunner().invoke(cli, [*map(str, words), "--json"])
    assert (result.exit_code == 0) == (status == 0), result.output
    command = " ".join(map(str, words[: 2 if words[0] == "arena" else 1]))
    found = check_document(result.stdout, command)
    assert not status or found["error"]["code"] == status
    return found


def test_a_local_checkpoint_is_local_at_once(local: tuple[Path, Path]) -> None:
    images, _ = local
    assert wait_for(images, Tier.LOCAL, None) == Tier.LOCAL
    assert wait_for(images, Tier.DURABLE, SHORT_S) == Tier.LOCAL
    assert run("wait", images, "--for", "local")["state"] == "local"
    refused = run("wait", images, "--timeout", SHORT_S, status=LocalError.exit_code)
    assert "only in memory yet" in refused["error"]["message"]


def test_it_is_waited_for_until_criu_has_ended_its_dump(local: tuple[Path, Path]) -> None:
    """The manifest is in the arena long before; and a dump whose inventory is there may fail."""
    images, stored = local
    with under_way(images, stored):
        assert (stored / MANIFEST_NAME).exists()
        assert wait_for(images, Tier.LOCAL, SHORT_S) is None
        words = ("wait", images, "--for", "local", "--timeout", SHORT_S)
        refused = run(*words, status=LocalError.exit_code)
        assert "its dump has not ended" in refused["error"]["message"]
        write_inventory(images, f"checkpoint-{stored.name}")
        assert wait_for(images, Tier.LOCAL, SHORT_S) is None
        (stored / RESERVED).unlink()
        assert wait_for(images, Tier.LOCAL, None) == Tier.LOCAL


def test_a_dump_that_ends_is_seen(local: tuple[Path, Path], later: Any) -> None:
    images, stored = local
    with under_way(images, stored):
        later(finish, images, stored)
        assert wait_for(images, Tier.LOCAL, LONG_S) == Tier.LOCAL


def test_before_the_manifest_is_there(local: tuple[Path, Path], later: Any) -> None:
    images, stored = local
    manifest = (stored / MANIFEST_NAME).read_bytes()
    with under_way(images, stored):
        (stored / MANIFEST_NAME).unlink()
        assert wait_for(images, Tier.LOCAL, SHORT_S) is None
        (stored / RESERVED).unlink()  # nor is room reserved when the marker is written
        assert wait_for(images, Tier.LOCAL, SHORT_S) is None
        (stored / RESERVED).touch()
        (stored / MANIFEST_NAME).write_bytes(manifest)
        later(finish, images, stored)
        assert wait_for(images, Tier.LOCAL, LONG_S) == Tier.LOCAL


def test_a_drain_is_seen(local: tuple[Path, Path], later: Any) -> None:
    images, _ = local
    later(drain, images)
    assert wait_for(images, Tier.DURABLE, LONG_S) == Tier.DURABLE
    assert not verify_directory(images).problems


def test_a_dump_that_was_broken_off_is_no_checkpoint(local: tuple[Path, Path]) -> None:
    images, stored = local
    with under_way(images, stored):
        pass
    with pytest.raises(ImageError, match="the dump was broken off"):
        wait_for(images, Tier.LOCAL, None)
    run("wait", images, status=ImageError.exit_code)


def test_a_dump_that_fails_is_no_checkpoint(local: tuple[Path, Path], later: Any) -> None:
    images, stored = local
    with under_way(images, stored):
        later((images / ARENA_MARKER).unlink)
        with pytest.raises(ImageError, match=f"no {INVENTORY_NAME}"):
            wait_for(images, Tier.LOCAL, LONG_S)


def test_where_nothing_was_dumped_there_is_nothing_to_wait_for(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=f"no {INVENTORY_NAME}"):
        wait_for(tmp_path, Tier.LOCAL, None)


@pytest.mark.parametrize("is_sealed", [False, True], ids=["without CUDA", "sealed"])
def test_what_never_was_in_memory_is_durable(tmp_path: Path, is_sealed: bool) -> None:
    write_inventory(tmp_path, *([f"checkpoint-{bytes(16).hex()}"] if is_sealed else []))
    if is_sealed:
        (tmp_path / SEALED_NAME).touch()
    assert wait_for(tmp_path, Tier.DURABLE, None) == Tier.DURABLE


def test_what_was_given_up_is_no_checkpoint(local: tuple[Path, Path]) -> None:
    images, stored = local
    run("arena", "discard", images)
    assert not stored.exists()
    with pytest.raises(ImageError, match="were given up"):
        wait_for(images, Tier.LOCAL, None)


def test_what_has_lost_its_image_directory_is_given_up_by_its_id(
    local: tuple[Path, Path], arena: Path
) -> None:
    images, stored = local
    shutil.rmtree(images)
    run("arena", "discard", "0" * 32, "--arena", arena, status=ImageError.exit_code)
    run("arena", "discard", images, status=ImageError.exit_code)
    assert stored.exists()
    found = run("arena", "discard", stored.name, "--arena", arena)
    assert found["arena_directory"] == str(stored)
    assert not stored.exists()


def test_an_inventory_of_another_checkpoint(local: tuple[Path, Path]) -> None:
    images, _ = local
    drain(images)
    write_inventory(images, f"checkpoint-{bytes(16).hex()}")
    with pytest.raises(ImageError, match="is not of the checkpoint"):
        wait_for(images, Tier.DURABLE, None)


def test_the_pool_is_emptied_on_request(local: tuple[Path, Path], arena: Path) -> None:
    images, _ = local
    drain(images)
    size = run("arena", "list", "--arena", arena)["pool_bytes"]
    assert size > 0
    assert run("arena", "clean", "--arena", arena)["freed_pool_bytes"] == 0
    refused = run("arena", "create", "--arena", arena, "--size", "1M", status=3)
    assert f"`gpustasis arena clean --pool --arena {arena}`" in refused["error"]["message"]
    assert run("arena", "clean", "--pool", "--arena", arena)["freed_pool_bytes"] == size
    assert list(arena.iterdir()) == []
    assert run("arena", "clean", "--pool", "--arena", arena)["freed_pool_bytes"] == 0
    assert not verify_directory(images).problems


def test_the_pool_of_a_dump_under_way_stays(
    local: tuple[Path, Path], arena: Path, tmp_path: Path
) -> None:
    images, _ = local
    drain(images)
    files = sorted((arena / "pool").iterdir())
    assert files
    other = tmp_path / "two"
    stored = make_local(other, arena)
    with under_way(other, stored):
        refused = run("arena", "clean", "--pool", "--arena", arena, status=3)
        assert f"a dump into {other} is under way" in refused["error"]["message"]
        assert sorted((arena / "pool").iterdir()) == files
        finish(other, stored)
    assert run("arena", "clean", "--pool", "--arena", arena)["freed_pool_bytes"] > 0
    assert list(arena.iterdir()) == [stored]
    assert not verify_directory(other).problems


def of_a_later_version(owner: Path) -> None:
    owner.write_text(
        owner.read_text().replace("gpustasis-arena-owner 1", "gpustasis-arena-owner 2")
    )


def damaged(owner: Path) -> None:
    owner.write_text("rubbish")


def writable_by_others(owner: Path) -> None:
    owner.chmod(0o666)


def a_directory(owner: Path) -> None:
    owner.unlink()
    owner.mkdir()


def gone_for_long(owner: Path) -> None:
    owner.unlink()
    os.utime(owner.parent, (1, 1))


UNREADABLE = pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (of_a_later_version, "version 2 is not known"),
        (damaged, "is cut short"),
        (writable_by_others, "others can write there"),
        (a_directory, "is no regular file"),
        (gone_for_long, "is missing"),
    ],
)


@UNREADABLE
def test_what_cannot_be_read_is_listed(
    local: tuple[Path, Path], arena: Path, tmp_path: Path, spoil: Any, why: str
) -> None:
    """Who drains by the list would lose a checkpoint that it leaves out."""
    _, stored = local
    two = tmp_path / "two"
    make_local(two, arena)
    assert run("arena", "list", "--arena", arena)["unreadable"] == []
    spoil(stored / ARENA_OWNER)
    listed = run("arena", "list", "--arena", arena, status=ImageError.exit_code)
    assert str(arena) in listed.pop("error")["message"]
    check_document(json.dumps(listed), "arena list")
    assert [one["directory"] for one in listed["entries"]] == [str(two)]
    (found,) = listed["unreadable"]
    assert found["arena_directory"] == str(stored)
    assert found["bytes"] > 0
    assert why in found["problem"]
    shown = CliRunner().invoke(cli, ["arena", "list", "--arena", str(arena)])
    assert isinstance(shown.exception, ImageError)  # main() makes status 10 of it
    assert str(two) in shown.stdout
    (line,) = (line for line in shown.stdout.splitlines() if line.startswith(f"{stored}: "))
    assert " MiB, unreadable: " in line
    assert why in line


@UNREADABLE
def test_the_pool_stays_if_a_dump_may_be_under_way(
    local: tuple[Path, Path], arena: Path, tmp_path: Path, spoil: Any, why: str
) -> None:
    """A later version may dump there: it cannot be told what it counts on."""
    drain(local[0])
    files = sorted((arena / "pool").iterdir())
    assert files
    stored = make_local(tmp_path / "two", arena)
    spoil(stored / ARENA_OWNER)
    with pytest.raises(CheckpointError, match=f"{stored} may be under way.*{why}"):
        empty_pool(arena)
    if spoil is not gone_for_long:  # that is nobody's, and removed before
        refused = run("arena", "clean", "--pool", "--arena", arena, status=3)
        assert f"need what is in {arena / 'pool'}" in refused["error"]["message"]
    assert set(files) <= set((arena / "pool").iterdir())


ASIDE = """
import pathlib, resource, sys, threading
from gpustasis.cli.drain import drain_aside
from support.priorities import priority

drain_aside(pathlib.Path(sys.argv[1]))
print(priority())
thread = threading.Thread(target=lambda: print(priority()))  # as those that read and write
thread.start()
thread.join()
files = resource.getrlimit(resource.RLIMIT_NOFILE)
print(files[0] == files[1])
"""


def test_a_drain_is_in_no_jobs_way(local: tuple[Path, Path]) -> None:
    """Also that of `checkpoint --wait durable`, which is the same function."""
    images, _ = local
    done = subprocess.run(
        [sys.executable, "-c", ASIDE, images],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["nice 19, disk 2/7"] * 2 + ["True"]
    assert tier_of(images) == Tier.DURABLE


def test_all_is_on_the_disk_before_the_manifest_says_so(
    local: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What CRIU has written, what the drain has, and the name of their directory, which may be a
    new one; and the marker goes last."""
    images, _ = local
    (images / "core-7.img").write_bytes(b"of CRIU, which syncs nothing")
    events: list[str] = []
    real_sync, real_unlink = os.fsync, Path.unlink

    def sync(descriptor: int) -> None:
        events.append("sync " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real_sync(descriptor)

    def write(directory: Path, manifest: Manifest, **times: Any) -> None:
        events.append("manifest")
        assert not (directory / MANIFEST_NAME).exists()
        write_manifest(directory, manifest, **times)

    def unlink(path: Path, missing_ok: bool = False) -> None:
        events.append(f"unlink {path.name}")
        real_unlink(path, missing_ok)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr("gpustasis.draining.drain.write_manifest", write)
    monkeypatch.setattr(Path, "unlink", unlink)
    drain(images)
    at = events.index("manifest")
    synced, of_names, after = events[: at - 2], events[at - 2 : at], events[at + 1 :]
    assert {"sync core-7.img", "sync gpustasis-7.img", f"sync {INVENTORY_NAME}"} <= set(synced)
    assert of_names == [f"sync {images.name}", f"sync {images.parent.name}"]
    assert after[:2] == [f"unlink {ARENA_MARKER}", f"sync {images.name}"]
    assert not verify_directory(images).problems


def test_a_directory_above_that_cannot_be_read_is_synced_with_all(
    local: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of mode 0711, where this user has a directory of his own."""
    images, _ = local
    events: list[str] = []

    def sync_directory(path: Path) -> None:
        if path.name == "..":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    def write(directory: Path, manifest: Manifest, **times: Any) -> None:
        events.append("manifest")
        write_manifest(directory, manifest, **times)

    monkeypatch.setattr("gpustasis.draining.syncing.sync_directory", sync_directory)
    monkeypatch.setattr("gpustasis.draining.drain.write_manifest", write)
    monkeypatch.setattr(os, "sync", lambda: events.append("sync of all"))
    drain(images)
    assert events == ["sync of all", "manifest"]
