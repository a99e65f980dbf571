# SPDX-License-Identifier: Apache-2.0
"""One process at a time works on a root, whoever it is and wherever it sees that root from."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpustasis.errors import InstallError
from gpustasis.install.root import LOCK, Root
from install.conftest import install_into, uninstall_from
from install.tree import tree

NOBODY = 65534
BUSY = "another process is installing into"


@contextmanager
def user(number: int) -> Iterator[None]:
    os.seteuid(number)
    try:
        yield
    finally:
        os.seteuid(0)


def test_one_at_a_time(root: Path) -> None:
    with Root(root), pytest.raises(InstallError, match=BUSY):
        Root(root)
    with Root(root):
        pass


def test_from_another_mount_namespace(root: Path) -> None:
    """As two pods with the same host mounted: each has a /run and a /tmp of its own."""
    code = (
        "import sys; from pathlib import Path; from gpustasis.install.root import Root\n"
        "with Root(Path(sys.argv[1])): print('has it')\n"
    )
    script = 'mount -t tmpfs tmpfs /run && exec "$@"'
    argv = ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-c", code, root]

    def enter() -> subprocess.CompletedProcess[str]:
        return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)

    with Root(root):
        refused = enter()
    assert refused.returncode != 0
    assert BUSY in refused.stderr, refused.stdout + refused.stderr
    assert enter().stdout == "has it\n"


def test_root_and_the_directory_s_owner(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.chown(root, NOBODY, NOBODY)
    monkeypatch.chdir(root)  # what is above it may be closed to nobody
    here = Path()
    with user(NOBODY):
        theirs = Root(here)
    with theirs, pytest.raises(InstallError, match=BUSY):
        Root(here)
    with (
        Root(here),
        user(NOBODY),
        pytest.raises(InstallError, match=f"cannot lock {LOCK}: Permission denied"),
    ):
        Root(here)
    with Root(here):
        pass
    assert tree(root) == {}


def test_nobody_else_can_keep_it_from_working(root: Path) -> None:
    """Any user may open "/" and lock it; what is locked here, nobody but root can open."""
    anybody = os.open(root, os.O_RDONLY)
    fcntl.flock(anybody, fcntl.LOCK_EX)
    try:
        with Root(root):
            found = (root / LOCK).lstat()
            assert found.st_uid == 0
            assert stat.S_IMODE(found.st_mode) == 0o600
        install_into(root)
    finally:
        os.close(anybody)


def test_it_is_gone_afterwards(root: Path) -> None:
    """What a killed process has left, too."""
    (root / LOCK).touch(mode=0o600)
    install_into(root)
    assert LOCK not in tree(root)
    with pytest.raises(InstallError, match="mine"), Root(root):
        raise InstallError("mine")
    uninstall_from(root)
    assert tree(root) == {}


def remove(path: Path) -> None:
    path.unlink()


def exchange(path: Path) -> None:
    path.unlink()
    path.touch(mode=0o600)


@pytest.mark.parametrize("change", [remove, exchange])
def test_who_had_it_removes_it_between_open_and_lock(
    root: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    """A lock on a file without that name would exclude nobody."""
    lock = fcntl.flock
    turns: list[int] = []

    def flock(fd: int, operation: int) -> None:
        turns.append(fd)
        if len(turns) == 1:
            change(root / LOCK)
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with Root(root):
        assert len(turns) == 2
        with pytest.raises(InstallError, match=BUSY):
            Root(root)
    assert tree(root) == {}


def test_another_s_lock_is_not_removed(root: Path) -> None:
    with Root(root):
        exchange(root / LOCK)  # by hand
        with Root(root):
            pass
        (root / LOCK).write_text("another's")
    assert (root / LOCK).read_text() == "another's"


def link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


@pytest.mark.parametrize("make", [link, os.mkfifo, os.mkdir])
def test_something_else_in_its_place(root: Path, make: Callable[[Path], None]) -> None:
    make(root / LOCK)
    before = tree(root)
    with pytest.raises(InstallError, match=f"cannot lock .*/{LOCK}: "):
        Root(root)
    assert tree(root) == before
