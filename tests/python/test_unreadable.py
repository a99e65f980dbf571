# SPDX-License-Identifier: Apache-2.0
"""What cannot be read at this moment, or under such a name at all: no checkpoint is lost for it,
and no program ends in a traceback."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpustasis import oci_hook, policy
from gpustasis._core import PARENT_LINK, Manifest
from gpustasis.errors import CheckpointError, ImageError
from gpustasis.image import directory as image_directory
from gpustasis.image import store as store_module
from gpustasis.image.checkpoint import find_manifest, parent_directory
from gpustasis.image.directory import is_directory, is_file, is_there, try_exclude
from gpustasis.image.prune import Rules, prune
from gpustasis.image.store import list_store, read_entry
from gpustasis.image.store_verification import verify_store
from gpustasis.image.verification import verify_directory
from support.chains import make_chain, make_link, memory_of

FIRST = 1_800_000_000.0
LONG = "x" * 300  # longer than a name may be
LAST_ONE = Rules(last=1)
Refuse = Callable[[Path, int], None]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """a-full <- a-more, then b-full <- b-more."""
    place = tmp_path / "store"
    place.mkdir(mode=0o700)
    for number, (name, parent) in enumerate(
        [("a-full", None), ("a-more", "a-full"), ("b-full", None), ("b-more", "b-full")]
    ):
        below = None if parent is None else place / parent
        words = ["A", "b", "0", name]
        make_link(place / name, {7: memory_of(words)}, parent=below, taken=FIRST + number * 60)
    return place


def names(store: Path) -> list[str]:
    return sorted(path.name for path in store.iterdir())


class TestPruneWhileOneCannotBeRead:
    """It may be built on anything: nothing goes until it can be read."""

    @pytest.fixture
    def refuse(self, monkeypatch: pytest.MonkeyPatch) -> Refuse:
        """refuse(checkpoint, errno): its manifest cannot be read from now on; 0: it can."""
        refused: dict[Path, int] = {}

        def find(directory: Path) -> Manifest | None:
            if number := refused.get(directory):
                raise ImageError(f"cannot read {directory}") from OSError(number, "refused")
            return find_manifest(directory)

        monkeypatch.setattr(store_module, "find_manifest", find)
        return refused.__setitem__

    @pytest.mark.parametrize("dry_run", [False, True])
    @pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.EACCES])
    def test_its_parent_stays(
        self, store: Path, refuse: Refuse, number: int, *, dry_run: bool
    ) -> None:
        """Also where only its manifest tells of the parent."""
        (store / "a-more" / PARENT_LINK).unlink()
        refuse(store / "a-more", number)
        with pytest.raises(CheckpointError) as caught:
            prune(store, Rules(last=2), dry_run=dry_run)
        assert "what a-more is built on cannot be told: cannot read" in str(caught.value)
        assert str(caught.value).endswith("; nothing was removed")
        assert names(store) == ["a-full", "a-more", "b-full", "b-more"]
        refuse(store / "a-more", 0)
        prune(store, Rules(last=3))
        assert names(store) == ["a-full", "a-more", "b-full", "b-more"]

    def test_one_that_lies_outside_counts_too(
        self, store: Path, tmp_path: Path, refuse: Refuse
    ) -> None:
        outside = tmp_path / "outside"
        make_link(outside, {7: memory_of(["A", "C"])}, parent=store / "a-full", taken=FIRST)
        make_link(store / "new", {7: memory_of(["A"])}, parent=outside, taken=FIRST + 999)
        (outside / PARENT_LINK).unlink()
        refuse(outside, errno.ETIMEDOUT)
        with pytest.raises(CheckpointError, match="what outside is built on cannot be told"):
            prune(store, LAST_ONE)
        assert len(names(store)) == 5

    def test_a_link_that_is_not_told_counts_too(
        self, store: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(directory: Path) -> Path | None:
            if directory.name == "b-more":
                raise ImageError("no answer") from OSError(errno.EIO, "refused")
            return parent_directory(directory)

        monkeypatch.setattr(store_module, "parent_directory", refuse)
        with pytest.raises(CheckpointError, match="b-more is built on cannot be told: no answer"):
            prune(store, LAST_ONE)
        assert len(names(store)) == 4

    def test_a_damaged_one_hinders_nobody(self, store: Path) -> None:
        """It will not be read later either."""
        (store / "a-more" / "gpustasis-manifest.img").write_bytes(b"no manifest")
        (store / "a-more" / PARENT_LINK).unlink()
        prune(store, LAST_ONE)
        assert names(store) == ["a-more", "b-full", "b-more"]


def test_a_link_to_itself_is_no_checkpoint(store: Path) -> None:
    (store / "round").symlink_to("round")
    assert "round" in read_entry(store / "round").incomplete
    prune(store, LAST_ONE)
    assert names(store) == ["b-full", "b-more", "round"]


class TestLongLink:
    """A link of b-more to its parent that no file system could hold."""

    @pytest.fixture
    def hostile(self, store: Path) -> Path:
        (store / "b-more" / PARENT_LINK).unlink()
        (store / "b-more" / PARENT_LINK).symlink_to(LONG)
        return store

    @pytest.mark.parametrize(
        ("words", "status"),
        [
            (["inspect", "b-more"], 0),
            (["list", "."], 0),
            (["prune", ".", "--keep-last", "1"], 0),
            (["verify", "b-more"], 10),
            (["verify", "."], 10),
            (["flatten", "b-more", "-o", "out"], 10),
            (["flatten", "a-full", "-o", LONG], 3),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else None,
    )
    def test_commands(self, hostile: Path, words: list[str], status: int) -> None:
        ended = subprocess.run(
            [sys.executable, "-m", "gpustasis", *words],
            cwd=hostile,
            capture_output=True,
            text=True,
            check=False,
        )
        assert "Traceback" not in ended.stderr
        assert ended.returncode == status, ended.stderr
        if words[0] == "inspect":
            assert "MISSING" in ended.stdout

    def test_prune_keeps_the_parent_by_its_id(self, hostile: Path) -> None:
        prune(hostile, LAST_ONE)
        assert names(hostile) == ["b-full", "b-more"]

    def test_the_hook(self, hostile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        hostile.parent.chmod(0o700)
        monkeypatch.setattr(policy, "STORE_DIRECTORY", str(hostile.parent))
        oci_hook.apply_retention(hostile.name, 1)
        assert names(hostile) == ["b-full", "b-more"]

    def test_of_a_file_of_crius(self, tmp_path: Path) -> None:
        (tmp_path / "inventory.img").symlink_to(LONG)
        assert "File name too long" in verify_directory(tmp_path).problems[0]


@pytest.mark.parametrize("look", [is_directory, is_file, is_there])
@pytest.mark.parametrize("name", ["nothing", "file/below", "round/below", LONG])
def test_what_cannot_be_there_is_not(
    tmp_path: Path, look: Callable[[Path], bool], name: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "round").symlink_to("round")
    assert not look(tmp_path / name)


@pytest.mark.parametrize("look", [is_directory, is_file, is_there])
def test_what_cannot_be_looked_at_is_an_error(tmp_path: Path, look: Callable[[Path], bool]) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    os.seteuid(65534)
    try:
        with pytest.raises(ImageError, match=r"cannot look at .*: Permission denied") as caught:
            look(closed / "x")
    finally:
        os.seteuid(0)
    assert caught.value.errno == errno.EACCES


@pytest.mark.parametrize("name", ["gpustasis-manifest.img", "inventory.img"])
def test_what_cannot_be_looked_at_is_not_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    make_chain(tmp_path, 1)
    status = image_directory._status

    def refuse(place: Path, *, follow: bool) -> os.stat_result | None:
        if place == tmp_path / "c001" / name:
            raise ImageError(f"cannot look at {place}") from OSError(errno.EIO, "refused")
        return status(place, follow=follow)

    monkeypatch.setattr(image_directory, "_status", refuse)
    found = verify_store(tmp_path)
    assert found.ignored == {}
    assert [v.name for v in found.damaged] == ["c001"]
    assert found.damaged[0].problems == [f"cannot look at {tmp_path / 'c001' / name}"]
    assert [listed.entry.name for listed in list_store(tmp_path) if listed.problem] == ["c001"]


class TestLock:
    """No descriptor is left when a directory cannot be locked."""

    @pytest.fixture
    def descriptors(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def test_what_cannot_be_looked_at_is_not_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, descriptors: int
    ) -> None:
        def refuse(path: object) -> os.stat_result:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

        with monkeypatch.context() as patch:
            patch.setattr(os, "stat", refuse)
            assert try_exclude(tmp_path) is None
        assert len(os.listdir("/proc/self/fd")) == descriptors

    def test_where_locks_do_not_work(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, descriptors: int
    ) -> None:
        def refuse(fd: int, operation: int) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        monkeypatch.setattr(fcntl, "flock", refuse)
        with pytest.raises(ImageError, match=r"cannot lock .*: No locks available"):
            try_exclude(tmp_path)
        assert len(os.listdir("/proc/self/fd")) == descriptors
